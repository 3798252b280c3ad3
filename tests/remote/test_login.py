"""Login methods, each tested against Debian's sshd."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcaccel.spec import load_profile
from hpcaccel.submission.remote import RemoteCluster, openssh
from hpcaccel.submission.remote.connection import FabricConnection
from hpcaccel.submission.remote.remote_cluster import _connect

from .login_node import LoginNode, wait_for, why_no_sshd

CHECK = '#!/bin/sh\n[ "$(tr -d "\\0")" = 123456 ]\n'
PAM = """\
auth required pam_exec.so quiet expose_authtok {}
auth required pam_permit.so
account required pam_permit.so
session required pam_permit.so
"""
AGENT = shutil.which("ssh-agent") or "ssh-agent"
"""Looked up here, because the client's PATH has neither ssh-agent nor ssh-add from the same directory."""
OWN_PAM = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/pam.d/sshd && exec "$@"']


def logs_in(node: LoginNode) -> None:
    profile = load_profile("alps")
    assert profile is not None
    with RemoteCluster(profile) as there:
        assert isinstance(there.connection, FabricConnection)
        assert there.run(["true"]).code == 0


@pytest.fixture
def agent(client: LoginNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ssh-agent with the only copy of the key."""
    socket, key = client.root / "agent", client.client / ".ssh" / "id_ed25519"
    process = subprocess.Popen([AGENT, "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    wait_for(socket.exists, "the agent's socket")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    subprocess.run([f"{AGENT[:-5]}add", "-q", str(key)], check=True)
    key.unlink()
    yield
    process.terminate()
    process.wait()


@pytest.mark.usefixtures("agent")
def test_login_uses_the_key_of_the_ssh_agent(client: LoginNode) -> None:
    config = client.client / ".ssh" / "config"
    config.write_text(config.read_text().replace("IdentitiesOnly yes", "IdentitiesOnly no"))
    logs_in(client)


def test_login_supports_host_key_alias_and_proxy_command(client: LoginNode) -> None:
    client.known_hosts.write_text(f"alps.example.org {(client.root / 'etc' / 'host_key.pub').read_text()}")
    through = "/bin/bash -c 'exec 3<>/dev/tcp/%h/%p; /bin/cat <&3 & exec /bin/cat >&3'"
    client.write_config("HostKeyAlias alps.example.org", f"ProxyCommand {through}")
    logs_in(client)


def test_control_master_connection_is_shared_and_renewed_after_a_cut(
    client: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = client.client / ".ssh" / "config"  # ssh reads the account's home and ignores HOME
    client.write_config("ControlMaster auto", f"ControlPath {client.client}/m", "ControlPersist 60")
    monkeypatch.setattr(openssh, "_arguments", lambda host: ["-F", str(config), host])
    profile = load_profile("alps")
    assert profile is not None
    try:
        for _ in range(3):  # as in three calls of the program
            with RemoteCluster(profile, connection=_connect(profile)) as there:
                assert isinstance(there.connection, openssh.OpenSshConnection)
                assert there.run(["echo", "here"]).stdout.splitlines()[-1] == "here"
        assert client.log.read_text().count("Accepted publickey") == 1
        client.cut()  # the shared connection is lost: ssh makes a new one
        assert there.again(lambda: there.run(["true"])).code == 0
    finally:
        subprocess.run(["ssh", "-F", str(config), "-O", "exit", "alps"], capture_output=True, check=True)


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[LoginNode]:
    """A host that requires a key and then a one-time code, requested by PAM."""
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    if os.getuid() or shutil.which("unshare") is None or not Path("/etc/pam.d/sshd").exists():
        pytest.skip("sshd gets a PAM file of its own from root only, with unshare (Debian: util-linux)")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace of mounts can be made here")
    options = ["UsePAM yes", "KbdInteractiveAuthentication yes"]
    node = LoginNode(tmp_path / "login", options=[*options, "AuthenticationMethods publickey,keyboard-interactive"])
    (tmp_path / "check").write_text(CHECK)
    (tmp_path / "check").chmod(0o755)
    (tmp_path / "pam").write_text(PAM.format(tmp_path / "check"))
    node.wrapper = [*OWN_PAM, str(tmp_path / "pam")]
    node.start()
    yield node
    node.stop()


def test_login_prompts_for_a_one_time_code_on_the_terminal(asking: LoginNode) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(asking.client)
        os.execve(sys.executable, [sys.executable, "-m", "hpcaccel", "list", "--cluster", "alps"], asking.environment())
    for code in ("000000\n", "123456\n"):
        _read_until("Password: ", terminal)
        os.write(terminal, code.encode())
    said = _read_until(None, terminal)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, said
    assert "Accepted keyboard-interactive/pam" in asking.log.read_text()


def _read_until(question: str | None, terminal: int) -> str:
    """Terminal output up to ``question``; None: up to the end."""
    said = ""
    while question is None or question not in said:
        try:
            said += os.read(terminal, 1 << 12).decode()
        except OSError:  # on Linux, the end of a terminal
            assert question is None, said
            break
    return said
