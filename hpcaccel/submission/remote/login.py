"""Authentication on a login node: agent keys, key files, then prompts on the terminal; and checks of host keys.

A host may require several methods in sequence (a key and then a one-time code).
"""

from __future__ import annotations

import base64
import getpass
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fabric
from fabric.auth import OpenSSHAuthStrategy
from paramiko import HostKeys, MissingHostKeyPolicy, PKey, SSHClient
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    BadHostKeyException,
    PasswordRequiredException,
    SSHException,
)

from hpcaccel.errors import ClusterError

if TYPE_CHECKING:
    from paramiko import Transport

__all__ = [
    "Login",
    "ask",
    "changed_host_key",
    "check_host_keys",
    "fingerprint",
    "has_terminal",
    "refused_login",
    "with_gateways",
]

_SUPPORTED = ("publickey", "keyboard-interactive", "password")
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_TRIES = 3


class Login(OpenSSHAuthStrategy):  # type: ignore[misc]
    """Authentication strategy for fabric. Unlike fabric's own, it supports hosts that require several methods."""

    def authenticate(self, transport: Transport) -> list[str]:
        """Authenticate. Returns the names of the methods and keys that were tried.

        Raises:
            AuthenticationException: the host requires a method that failed or is not available.
            ClusterError: a key cannot be read or decrypted, or a prompt needs a terminal.
        """
        try:
            return self._authenticate(transport)
        finally:
            self.close()  # disconnects from the agent

    def _authenticate(self, transport: Transport) -> list[str]:
        tried: list[str] = []
        obstacles: list[str] = []
        allowed = self._allowed(transport)
        if "publickey" in allowed:
            allowed = self._by_keys(transport, allowed, tried)
            if not tried:
                obstacles.append("no key found")
        if not transport.is_authenticated() and "keyboard-interactive" in allowed:
            allowed = self._by_prompts(transport, allowed, tried)
        if not transport.is_authenticated() and "password" in allowed:
            if has_terminal():
                self._by_password(transport, tried)
            else:
                obstacles.append("a password needs a terminal")
        if not transport.is_authenticated():
            if allowed and not set(allowed).intersection(_SUPPORTED):
                obstacles.append(f"hpcaccel supports only {', '.join(_SUPPORTED)}")
            raise AuthenticationException(
                f"accepted methods: {', '.join(allowed) or 'none'}; tried: {', '.join(tried) or 'none'}"
                + (f" ({'; '.join(obstacles)})" if obstacles else "")
            )
        return tried

    def _allowed(self, transport: Transport) -> list[str]:
        try:
            return list(transport.auth_none(self.username) or [])
        except BadAuthenticationType as error:
            return list(error.allowed_types)

    def _by_keys(self, transport: Transport, allowed: list[str], tried: list[str]) -> list[str]:
        for name, key in self._keys():
            tried.append(name)
            try:
                rest = transport.auth_publickey(self.username, key)
            except BadAuthenticationType as error:
                return list(error.allowed_types)
            except AuthenticationException:
                if not transport.is_active():
                    raise
                continue
            return list(rest or [])  # the further methods that the host requires, if any
        return allowed

    def _keys(self) -> Iterator[tuple[str, PKey]]:
        files = [Path(os.path.expanduser(name)) for name in self.ssh_config.get("identityfile", [])]
        only_these = str(self.ssh_config.get("identitiesonly", "no")).lower() == "yes"
        if not only_these:
            for key in self.agent.get_keys():
                yield f"agent key {key.get_name()} {key.comment or ''}".strip(), key
        for file in files or [Path.home() / ".ssh" / name for name in _DEFAULT_KEYS]:
            if file.is_file():
                yield str(file), _load(file)

    def _by_prompts(self, transport: Transport, allowed: list[str], tried: list[str]) -> list[str]:
        """Authenticate by keyboard-interactive: the host prompts for one-time codes, tokens or passwords."""
        for _ in range(_TRIES):
            try:
                rest = transport.auth_interactive(self.username, _prompt_answers)
            except BadAuthenticationType as error:
                return list(error.allowed_types)
            except AuthenticationException:
                if "keyboard-interactive" not in tried:
                    tried.append("keyboard-interactive")
                if not transport.is_active():
                    raise
                continue
            return list(rest or [])
        return []

    def _by_password(self, transport: Transport, tried: list[str]) -> None:
        for _ in range(_TRIES):
            tried.append("password")
            try:
                transport.auth_password(self.username, ask(f"password for {self.username}: ", echo=False))
            except AuthenticationException:
                if not transport.is_active():
                    raise
                continue
            return


def _load(file: Path) -> PKey:
    try:
        return PKey.from_path(file)
    except PasswordRequiredException:
        passphrase = ask(f"passphrase for {file}: ", echo=False)
    except (SSHException, ValueError, OSError) as error:
        raise ClusterError(f"cannot read the key {file}: {error}") from None
    try:
        return PKey.from_path(file, passphrase=passphrase.encode())
    except (SSHException, ValueError) as error:
        raise ClusterError(f"cannot decrypt the key {file} with that passphrase: {error}") from None


def _prompt_answers(title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
    for text in (title, instructions):
        if text.strip() and prompts:
            print(text.strip(), file=sys.stderr)
    return [ask(prompt, echo=echo) for prompt, echo in prompts]


def has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def ask(question: str, *, echo: bool) -> str:
    """Prompt on the terminal, even if stdin and stdout are redirected.

    Raises:
        ClusterError: there is no terminal.
    """
    if not has_terminal():
        raise ClusterError(
            f"the login prompts for {question.strip()!r}, but there is no terminal. Load the key into an agent "
            "(ssh-add), or share an open ssh connection: set ControlMaster auto, ControlPath and ControlPersist in "
            "~/.ssh/config, then log in once with ssh"
        )
    if not echo:
        return getpass.getpass(question)
    with open("/dev/tty", "r+", buffering=1, encoding="utf-8") as terminal:
        terminal.write(question)
        terminal.flush()
        return terminal.readline().rstrip("\n")


# -- host keys --------------------------------------------------------------------------------------------------------


def fingerprint(key: PKey) -> str:
    """The fingerprint of a key, as ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


class _Refuse(MissingHostKeyPolicy):  # type: ignore[misc]
    """Refuses unknown keys: the user has to compare them with those that the site publishes."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def missing_host_key(self, client: SSHClient, hostname: str, key: PKey) -> None:
        there = self._connection.original_host
        port = f"-p {self._connection.port} " if hostname.startswith("[") else ""
        raise ClusterError(
            f"unknown host key of {hostname}: {key.get_name()} {fingerprint(key)}. Compare it with the fingerprint "
            f"published by the site. If they match, log in once (ssh {port}{there}) and accept the key"
        )


def check_host_keys(connection: Any) -> None:
    client, config = connection.client, connection.ssh_config
    client.set_missing_host_key_policy(_Refuse(connection))
    known = config.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
    known += config.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2").split()
    for name in known:
        file = Path(os.path.expanduser(name))
        if file.is_file():
            client.load_system_host_keys(str(file))
    if (alias := config.get("hostkeyalias")) is not None:
        _accept_alias_keys(client, alias, connection)


def _known_name(connection: Any) -> str:
    """The host's name in the format of known_hosts."""
    return str(connection.host) if connection.port == 22 else f"[{connection.host}]:{connection.port}"


def _accept_alias_keys(client: SSHClient, alias: str, connection: Any) -> None:
    """Accept the keys known under an alias (``HostKeyAlias``) for this host."""
    name = _known_name(connection)
    keys: HostKeys = client.get_host_keys()
    known = client._system_host_keys.lookup(alias)
    for kind, key in ({} if known is None else dict(known)).items():
        keys.add(name, kind, key)


def with_gateways(connection: Any) -> Iterator[Any]:
    """Yield a connection and the connections to its jump hosts."""
    while isinstance(connection, fabric.Connection):
        yield connection
        connection = connection.gateway


def changed_host_key(error: BadHostKeyException, connection: Any) -> str:
    one = next(one for one in with_gateways(connection) if one.host == error.hostname)
    name = _known_name(one)
    return (
        f"THE HOST KEY OF {name} HAS CHANGED. The connection may be intercepted, or the host was reinstalled. "
        f"Known: {error.expected_key.get_name()} {fingerprint(error.expected_key)}; received: {error.key.get_name()} "
        f"{fingerprint(error.key)}. Nothing was sent. Ask the site whether the new key is correct. If it is, remove "
        f"the old one (ssh-keygen -R '{name}') and log in once (ssh {one.original_host})"
    )


def refused_login(host: str, connection: Any, why: str) -> str:
    return (
        f"{connection.host} rejected the login as {connection.user!r}: {why}. Check the user name (host: "
        f"user@{connection.host}), that your public key is installed (ssh-copy-id {host}), and that the right key is "
        f"used (IdentityFile in ~/.ssh/config, ssh-add -l). Try: ssh {host}"
    )
