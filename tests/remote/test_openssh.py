"""Connections through the user's own ssh."""

from __future__ import annotations

import errno
from unittest.mock import Mock

import pytest

from hpcaccel.errors import ClusterError
from hpcaccel.spec import load_profile
from hpcaccel.submission.remote import RemoteCluster, openssh
from hpcaccel.submission.remote.protocol import ConnectionLost

from .login_node import LoginNode


@pytest.fixture
def there(client: LoginNode, monkeypatch: pytest.MonkeyPatch) -> RemoteCluster:
    """A cluster reached through ssh. Its configuration is passed as an option, because ssh ignores HOME."""
    config = str(client.client / ".ssh" / "config")
    monkeypatch.setattr(openssh, "_arguments", lambda host: ["-F", config, host])
    profile = load_profile("alps")
    assert profile is not None
    return RemoteCluster(profile, connection=openssh.OpenSshConnection("alps", cluster="alps"))


def test_openssh_connection_runs_commands_like_fabric(client: LoginNode, there: RemoteCluster) -> None:
    answer = there.run(["bash", "-c", "cat; exit 3"], "in put")
    assert (answer.code, answer.stdout.splitlines()[-1]) == (3, "in put")
    code = there.converse({"do": "command", "args": ["--version"]}, lambda conversation: conversation.expect("out"))
    assert code[1].startswith(b"hpcaccel ")


def test_lost_and_refused_connections_raise_different_errors(client: LoginNode, there: RemoteCluster) -> None:
    session = there.connection.start("sleep 60")
    while not client.connections():
        pass
    client.cut()
    assert session.read(10) == b""
    with pytest.raises(ConnectionLost, match="ended without an exit status: the connection was lost, or the program"):
        session.wait()
    session.close()
    client.known_hosts.write_text("")
    with pytest.raises(ClusterError, match="Host key verification failed"):
        there.run(["true"])


def test_shared_connections_are_detected_from_the_ssh_configuration(client: LoginNode, there: RemoteCluster) -> None:
    assert not openssh.shares_connections("alps")
    client.write_config("ControlMaster auto", f"ControlPath {client.client}/.ssh/%C")
    assert openssh.shares_connections("alps")


@pytest.mark.parametrize("error", [ValueError("closed file"), OSError(errno.EBADF, "Bad file descriptor")])
def test_stream_closed_during_a_read_is_at_its_end(error: Exception) -> None:
    process = Mock(stderr=Mock(read=Mock(side_effect=error)))
    assert openssh.ProcessSession(process, "alps").read_error(10) == b""
