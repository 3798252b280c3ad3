"""The five kinds of daemons: starting them, and waiting until they are ready."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import processes, requirements, setup
from .errors import DevClusterError
from .state import State

READY_PATIENCE_SECONDS = 240.0
TELL_SECONDS = 5.0
"""If a daemon is not ready after this time, the reason is reported, and again whenever the reason changes."""
Report = Callable[[str], None]
UP_STATES = ("idle", "mixed", "allocated", "completing")


def start_munged(state: State) -> None:
    run = state.root / "run"
    # It runs as root, like the other daemons: the cluster's root may be in a directory that other users cannot enter.
    options = ["--foreground", f"--socket={run}/munge.socket", f"--key-file={state.root}/etc/munge.key"]
    files = [f"--pid-file={run}/munged.pid", f"--seed-file={run}/munged.seed", f"--log-file={run}/munged.log"]
    _start(state, "munged", [_program("munged"), *options, *files], hostname=state.controller)
    _wait(state, "munged", lambda: "" if (run / "munge.socket").is_socket() else "no socket yet")


def start_mariadbd(state: State) -> None:
    root = state.root
    # A directory of its own for temporary files: in /tmp, another cluster that is created at that time deletes them.
    common = ["--no-defaults", f"--datadir={root}/mysql", f"--tmpdir={root}/tmp", "--user=root"]
    # A throw-away database: small, and it need not survive a power cut.
    common += ["--innodb-log-file-size=8M", "--innodb-flush-method=nosync", "--innodb-flush-log-at-trx-commit=0"]
    install = [_program("mariadb-install-db"), *common, "--auth-root-authentication-method=socket", "--skip-test-db"]
    files = [f"--socket={root}/run/mariadb.socket", f"--pid-file={root}/run/mariadbd.pid"]
    # slurmdbd checks the size of the buffer pool and the lock timeout, and complains about the defaults.
    settings = [
        "--skip-networking",
        "--skip-log-bin",
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
    ]
    serve = [_program("mariadbd"), *common, *files, *settings]
    # One process for both commands, so that the creation of the database, too, is recorded and is ended on Ctrl-C.
    both = f"{shlex.join(install)} && exec {shlex.join(serve)}"
    _start(state, "mariadbd", ["sh", "-c", both], hostname=state.controller)
    ping = [_program("mariadb-admin"), "--no-defaults", "--user=root", f"--socket={root}/run/mariadb.socket", "ping"]
    _wait(state, "mariadbd", lambda: _problem_of(ping))


def start_slurmdbd(state: State) -> None:
    _start(state, "slurmdbd", [_program("slurmdbd", state), "-D"], hostname=state.controller)
    _wait(state, "slurmdbd", lambda: _silence(state.ports.slurmdbd))


def register_cluster(state: State, report: Report) -> None:
    """Register the cluster in slurmdbd, once, before its slurmctld may connect."""
    add_cluster = ["sacctmgr", "-i", "add", "cluster", state.options.name]
    _wait(state, "slurmdbd", lambda: _problem_of(add_cluster, state), report=report)


def start_slurmctld(state: State) -> None:
    # If slurmctld was killed before it wrote its state for the first time, newer releases start again only with -i.
    states = state.root / "spool" / "slurmctld"
    unfinished = (states / "clustername").exists() and not (states / "assoc_usage").exists()
    options = ["-i"] if unfinished else []
    _start(state, "slurmctld", [_program("slurmctld", state), "-D", *options], hostname=state.controller)
    _wait(state, "slurmctld", lambda: _silence(state.ports.slurmctld))


def start_slurmd(state: State, node: str) -> None:
    mounts = [(state.login_scripts, setup.LOGIN_SCRIPTS)] if state.folders else []
    _start(state, node, [_program("slurmd", state), "-D", "-N", node], hostname=node, mounts=mounts)


def wait_for_slurmd(state: State, node: str) -> None:
    port = state.ports.slurmd[state.nodes.index(node)]
    _wait(state, node, lambda: _silence(port))


def wait_for_nodes(state: State, nodes: Sequence[str]) -> None:
    """Wait until Slurm would schedule jobs on each of the nodes."""

    def not_up() -> str:
        states = {node: states.get(node, "unknown") for states in [node_states(state)] for node in nodes}
        return ", ".join(f"{node} is {found}" for node, found in states.items() if found not in UP_STATES)

    _wait(state, "slurmctld", not_up)


def node_states(state: State) -> dict[str, str]:
    """sinfo's long state by node, such as `idle`, `down*`; empty if the controller does not respond."""
    if not all(
        processes.is_alive(state.processes[role]) for role in ("munged", "slurmctld") if role in state.processes
    ):
        return {}  # sinfo would try for half a minute
    answer = client(state, ["sinfo", "-h", "-N", "-o", "%N %T"])
    if answer.returncode:
        return {}
    return dict(line.split() for line in answer.stdout.splitlines())


def client(state: State, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands on this cluster."""
    env = {**requirements.environment(state.slurm_folders), "SLURM_CONF": str(state.slurm_conf)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _start(
    state: State, role: str, command: Sequence[str], *, hostname: str, mounts: Sequence[tuple[Path, Path]] = ()
) -> None:
    env = {
        **requirements.environment(state.folders),
        "SLURM_CONF": str(state.daemons_conf),
        # libmariadb, inside slurmdbd, reads the socket only from this variable.
        "MYSQL_UNIX_PORT": f"{state.root}/run/mariadb.socket",
    }

    def record(process: processes.Process) -> None:
        state.processes[role] = process
        state.save()

    processes.start(role, command, log=_log(state, role), env=env, record=record, hostname=hostname, mounts=mounts)


def _log(state: State, role: str) -> Path:
    """The file with a daemon's output. Slurm's daemons in the foreground also write the same lines to their own log."""
    return state.root / "log" / f"{role}.out"


def _wait(state: State, role: str, problem: Callable[[], str], *, report: Report | None = None) -> None:
    """Wait until `problem` returns an empty string; otherwise it returns why the daemon is not ready."""
    started = time.monotonic()
    reported = ""
    while why := problem():
        log = _log(state, role)
        if not processes.is_alive(state.processes[role]):
            raise DevClusterError(f"{role} exited at startup; see {log}{_tail(log)}")
        waited = time.monotonic() - started
        if waited > READY_PATIENCE_SECONDS:
            raise DevClusterError(
                f"{role} was not ready after {READY_PATIENCE_SECONDS:.0f} s: {why}; see {log}{_tail(log)}"
            )
        if report is not None and waited > TELL_SECONDS and why != reported:
            report(f"waiting for {role}: {why}")
            reported = why
        time.sleep(0.1)


def _problem_of(command: Sequence[str], state: State | None = None) -> str:
    """Output of a failed program; empty if it succeeds."""
    if state is not None:
        answer = client(state, command)
    else:
        env = requirements.environment()
        answer = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        return ""
    words = " ".join((answer.stderr or answer.stdout).split())
    return f"{Path(command[0]).name}: {words or f'exit code {answer.returncode}'}"


def _silence(port: int) -> str:
    """Empty once a process listens on the port, else the error."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError as error:
        return f"port {port}: {error.strerror or error}"
    return ""


def _program(name: str, state: State | None = None) -> str:
    path = shutil.which(name, path=requirements.search_path(state.slurm_folders if state else ()))
    if path is None:
        raise DevClusterError(f"{name} is not installed")
    return path


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "".join(f"\n  | {line}" for line in text)
