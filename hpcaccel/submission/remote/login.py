"""Who we are on the login node: keys of the agent, key files, then what the host asks for on the terminal.

A host may want several of these, one after another (a key and then a one-time code).
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.auth import OpenSSHAuthStrategy
from paramiko import PKey
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    PasswordRequiredException,
    SSHException,
)

from hpcaccel.errors import ClusterError

if TYPE_CHECKING:
    from paramiko import Transport

__all__ = ["Login", "ask", "has_terminal"]

_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_TRIES = 3


class Login(OpenSSHAuthStrategy):  # type: ignore[misc]
    """fabric's place for a way to log in. Unlike its own, it goes on until the host is content."""

    def authenticate(self, transport: Transport) -> list[str]:
        """Returns what was used.

        Raises:
            AuthenticationException: the host wants something that we do not have.
        """
        try:
            return self._authenticate(transport)
        finally:
            self.close()  # the agent

    def _authenticate(self, transport: Transport) -> list[str]:
        tried: list[str] = []
        allowed = self._allowed(transport)
        if "publickey" in allowed:
            allowed = self._by_keys(transport, allowed, tried)
        if not transport.is_authenticated() and "keyboard-interactive" in allowed:
            allowed = self._by_questions(transport, allowed, tried)
        if not transport.is_authenticated() and "password" in allowed:
            self._by_password(transport, tried)
        if not transport.is_authenticated():
            raise AuthenticationException(
                f"it takes {', '.join(allowed) or 'nothing'}; tried: {', '.join(tried) or 'nothing, there is no key'}"
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
            return list(rest or [])  # names of what it wants besides, when it wants more
        return allowed

    def _keys(self) -> Iterator[tuple[str, PKey]]:
        files = [Path(os.path.expanduser(name)) for name in self.ssh_config.get("identityfile", [])]
        only_these = str(self.ssh_config.get("identitiesonly", "no")).lower() == "yes"
        if not only_these:
            for key in self.agent.get_keys():
                yield f"agent's {key.get_name()} {key.comment or ''}".strip(), key
        for file in files or [Path.home() / ".ssh" / name for name in _DEFAULT_KEYS]:
            if file.is_file():
                yield str(file), _load(file)

    def _by_questions(self, transport: Transport, allowed: list[str], tried: list[str]) -> list[str]:
        """Keyboard-interactive: one-time codes, tokens, passwords; the questions are the host's own."""
        for _ in range(_TRIES):
            try:
                rest = transport.auth_interactive(self.username, _answers)
            except BadAuthenticationType as error:
                return list(error.allowed_types)
            except AuthenticationException:
                if "your answers" not in tried:
                    tried.append("your answers")
                if not transport.is_active():
                    raise
                continue
            return list(rest or [])
        return []

    def _by_password(self, transport: Transport, tried: list[str]) -> None:
        if not has_terminal():
            return
        for _ in range(_TRIES):
            tried.append("a password")
            try:
                transport.auth_password(self.username, ask(f"password of {self.username}: ", echo=False))
            except AuthenticationException:
                if not transport.is_active():
                    raise
                continue
            return


def _load(file: Path) -> PKey:
    try:
        return PKey.from_path(file)
    except PasswordRequiredException:
        passphrase = ask(f"passphrase of {file}: ", echo=False)
    except (SSHException, ValueError, OSError) as error:
        raise ClusterError(f"the key {file} cannot be read: {error}") from None
    try:
        return PKey.from_path(file, passphrase=passphrase.encode())
    except (SSHException, ValueError) as error:
        raise ClusterError(f"the key {file} cannot be opened with that passphrase: {error}") from None


def _answers(title: str, instructions: str, prompts: list[tuple[str, bool]]) -> list[str]:
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
    """An answer from the terminal, wherever stdin and stdout go.

    Raises:
        ClusterError: there is no terminal.
    """
    if not has_terminal():
        raise ClusterError(
            f"the login asks {question.strip()!r}, and there is no terminal to answer on. Load the key into an agent "
            "(ssh-add), or let ssh keep a connection open: ControlMaster auto, ControlPath and ControlPersist in "
            "~/.ssh/config, then log in once with ssh"
        )
    if not echo:
        return getpass.getpass(question)
    with open("/dev/tty", "r+", buffering=1, encoding="utf-8") as terminal:
        terminal.write(question)
        terminal.flush()
        return terminal.readline().rstrip("\n")
