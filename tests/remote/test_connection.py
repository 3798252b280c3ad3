"""SSH connections: remote commands, and login problems with the message for each."""

from __future__ import annotations

import base64
import hashlib
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import paramiko
import pytest

from hpcaccel.errors import ClusterError
from hpcaccel.spec import load_profile
from hpcaccel.submission.remote import RemoteCluster
from hpcaccel.submission.remote import login as login_module
from hpcaccel.submission.remote.connection import ChannelSession
from hpcaccel.submission.remote.protocol import ConnectionLost

from .login_node import LoginNode, free_port, make_key


def cluster(name: str = "alps", **more: Any) -> RemoteCluster:
    profile = load_profile(name)
    assert profile is not None
    return RemoteCluster(profile, sleep=lambda seconds: None, **more)


def message(name: str = "alps") -> str:
    with pytest.raises(ClusterError) as caught, cluster(name) as there:
        there.run(["true"])
    return str(caught.value)


def test_run_passes_arguments_stdin_and_both_streams(client: LoginNode) -> None:
    with cluster() as there:
        answer = there.run(
            ["bash", "-c", 'echo "$1" "$HOME"; cat; echo complaint >&2; exit 3', "-", "it's $a"], "in put"
        )
        assert (answer.code, answer.stdout.splitlines()[-2:], answer.stderr) == (
            3,
            [f"it's $a {client.home}", "in put"],
            "complaint\n",
        )
        before = client.connections()
        assert there.run(["squeue", "--me", "--format=%i"]).code == 0  # the site's login scripts have set PATH
        assert client.connections() == before, "one connection for all"


def test_stderr_is_passed_on_while_the_program_runs(client: LoginNode) -> None:
    heard = b""
    go_on = client.home / "go-on"

    def hear(piece: bytes) -> None:
        nonlocal heard
        heard += piece
        go_on.touch()

    with cluster() as there:
        script = "echo one >&2; until [ -e ~/go-on ]; do sleep 0.05; done; echo two >&2"
        answer = there.run(["sh", "-c", script], on_output=hear)
    assert (answer.code, answer.stderr, heard) == (0, "one\ntwo\n", b"one\ntwo\n")


def test_runner_replaces_subprocess_for_slurm_commands(client: LoginNode) -> None:
    from hpcaccel.slurm.commands import Slurm

    with cluster() as there:
        assert Slurm(there.runner).version() == "23.02.0"
        with pytest.raises(FileNotFoundError):
            there.runner(["no-such-program"])


def test_an_unknown_host_key_is_refused_with_its_fingerprint(client: LoginNode) -> None:
    client.known_hosts.write_text("")
    blob = base64.b64decode((client.root / "etc" / "host_key.pub").read_text().split()[1])
    seen = "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    told = message()
    assert seen in told
    assert "ssh -p" in told


def test_changed_host_key_is_refused_with_the_command_to_remove_it(client: LoginNode) -> None:
    make_key(client.root / "etc" / "other_key")
    client.known_hosts.write_text(client.known_line("other_key"))
    told = message()
    assert told.startswith("THE HOST KEY OF [127.0.0.1]")
    assert "ssh-keygen -R" in told


def test_a_wrong_key_and_a_wrong_user_are_rejected(client: LoginNode) -> None:
    client.write_profile(host="nobody-of-this-name@alps", name="other")
    assert "rejected the login as 'nobody-of-this-name'" in message("other")
    (client.root / "etc" / "authorized_keys").write_text("")
    told = message()
    assert "rejected the login as" in told
    assert "id_ed25519" in told
    assert "ssh-copy-id" in told


def test_unknown_host_or_closed_port_is_reported(client: LoginNode) -> None:
    client.write_profile(host="no-such-host.invalid", name="lost")
    assert "unknown host 'no-such-host.invalid'" in message("lost")
    client.stop()
    assert f"cannot reach 127.0.0.1:{client.port}" in message()


def hello(told: str = "alps") -> str:
    with pytest.raises(ClusterError) as caught, cluster(told) as there:
        there.converse({"do": "command", "args": ["--version"]}, lambda conversation: None)
    return str(caught.value)


def test_problems_of_the_remote_installation_are_reported(client: LoginNode) -> None:
    client.install("#!/bin/sh\necho \"Error: No such command 'answer'.\" >&2; exit 2\n")
    assert "too old" in hello()
    client.install("#!/bin/sh\necho hpcaccel-answers 1 0.0.9\n")
    assert "hpcaccel 0.0.9, older than" in hello()
    client.install("#!/bin/sh\necho hpcaccel-answers 99 9.0.0\n")
    assert "too new" in hello()
    client.install("#!/no/such/python3.11\n")
    assert "the Python interpreter of hpcaccel on alps is missing" in hello()
    client.install().unlink()
    assert "hpcaccel was not found on alps" in hello()
    assert "cluster install alps" in hello()


def test_jump_host_is_used_and_its_host_key_is_checked(client: LoginNode) -> None:
    lines = ["Host behind", "HostName 127.0.0.1", f"Port {client.port}", "ProxyJump alps"]
    client.write_config(f"UserKnownHostsFile {client.known_hosts}", *lines, f"UserKnownHostsFile {client.known_hosts}",
                        f"IdentityFile {client.client}/.ssh/id_ed25519")  # fmt: skip
    client.write_profile(host=f"{client.root.owner()}@behind", name="inner")
    with cluster("inner") as there:
        assert there.run(["true"]).code == 0
        assert len(client.connections()) == 2
    client.known_hosts.write_text("")
    assert "unknown host key of" in message("inner")


class OneTimeCodes(paramiko.ServerInterface):
    """An SSH server that requires a key and then a one-time code."""

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey,keyboard-interactive"

    def check_auth_interactive(self, username: str, submethods: str) -> Any:
        return paramiko.InteractiveQuery("Second factor", "From your phone.", ("Code: ", True))

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        return paramiko.AUTH_SUCCESSFUL if responses == ["123456"] else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Timer(0.2, self._answer, (channel,)).start()  # after the reply to this request
        return True

    def _answer(self, channel: paramiko.Channel) -> None:
        channel.sendall(b"inside\n")
        channel.send_exit_status(0)
        channel.close()


@pytest.fixture
def asking_host(client: LoginNode) -> Iterator[None]:
    port = free_port()
    server = socket.create_server(("127.0.0.1", port))
    transports = []

    def serve() -> None:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        transport = paramiko.Transport(connection)
        transport.add_server_key(paramiko.PKey.from_path(client.root / "etc" / "host_key"))
        transport.start_server(server=OneTimeCodes())
        transports.append(transport)

    thread = threading.Thread(target=serve)
    thread.start()
    with client.known_hosts.open("a") as known:
        known.write(f"[127.0.0.1]:{port} {(client.root / 'etc' / 'host_key.pub').read_text()}")
    client.write_config("Host asking", "HostName 127.0.0.1", f"Port {port}",
                        f"IdentityFile {client.client}/.ssh/id_ed25519",
                        f"UserKnownHostsFile {client.known_hosts}")  # fmt: skip
    client.write_profile(host="somebody@asking", name="asking")
    yield
    server.close()
    thread.join()
    for transport in transports:
        transport.close()


@pytest.mark.usefixtures("asking_host")
def test_login_prompts_for_a_one_time_code_after_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answers = iter(["000000", "123456"])

    def ask(question: str, *, echo: bool) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(login_module, "ask", ask)
    with cluster("asking") as there:
        assert there.run(["true"]).stdout == "inside\n"
    assert asked == ["Code: ", "Code: "]


@pytest.mark.usefixtures("asking_host")
def test_one_time_code_without_a_terminal_fails_with_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_module, "has_terminal", lambda: False)
    assert "ControlMaster" in message("asking")


@pytest.mark.usefixtures("client")
def test_retries_are_limited_unless_connections_last() -> None:
    clock = [0.0]
    breaks = [100.0] * 9 + [1.0] * 5

    def follow() -> None:
        clock[0] += breaks.pop(0)
        raise ConnectionLost("the connection to alps was lost")

    with (
        cluster(now=lambda: clock[0], note=lambda text: None) as there,
        pytest.raises(ConnectionLost, match="nothing is submitted twice"),
    ):
        there.again(follow)
    assert breaks == [1.0], "four tries more behind the last that held, and then it is given up"


def test_client_has_its_own_home_and_no_slurm(client: LoginNode) -> None:
    assert shutil.which("sbatch") is None
    assert Path.home() == client.client


@pytest.mark.parametrize(
    "error", [EOFError(), OSError("Socket is closed"), paramiko.SSHException("timeout"), ConnectionResetError()]
)
def test_errors_while_sending_become_connection_lost(error: Exception) -> None:
    class Broken:
        def sendall(self, data: bytes) -> None:
            raise error

    session = ChannelSession(Broken(), "alps")  # type: ignore[arg-type]
    with pytest.raises(ConnectionLost, match="the connection to alps was lost"):
        session.write(b"code")


@pytest.mark.parametrize(
    ("accepted", "said"),
    [
        (["publickey"], "accepted methods: publickey; tried: none (no key found)"),
        (["password"], "accepted methods: password; tried: none (a password needs a terminal)"),
        (["publickey", "password"], "tried: none (no key found; a password needs a terminal)"),
        (["gssapi-with-mic"], "tried: none (hpcaccel supports only publickey, keyboard-interactive, password)"),
        ([], "accepted methods: none; tried: none"),
    ],
)
def test_login_without_a_usable_method_names_the_obstacle(
    monkeypatch: pytest.MonkeyPatch, accepted: list[str], said: str
) -> None:
    monkeypatch.setattr(login_module, "has_terminal", lambda: False)
    monkeypatch.setattr(login_module.Login, "_keys", lambda login: iter(()))
    login = object.__new__(login_module.Login)
    login.username = "somebody"
    transport = Mock()
    transport.auth_none.side_effect = paramiko.BadAuthenticationType("", accepted)
    transport.is_authenticated.return_value = False
    with pytest.raises(paramiko.AuthenticationException) as caught:
        login._authenticate(transport)
    assert str(caught.value).endswith(said)


def test_program_without_exit_status_may_have_been_killed(client: LoginNode) -> None:
    with cluster() as there:
        session = there.connection.start("kill -9 $$")
        with pytest.raises(ConnectionLost, match="the program on alps ended without an exit status"):
            session.wait()
        session.close()
