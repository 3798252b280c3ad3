"""The five kinds of daemons: how each is started, and how one knows that it is ready."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import processes, requirements
from .errors import DevClusterError
from .state import State

READY_PATIENCE_SECONDS = 240.0
UP_STATES = ("idle", "mixed", "allocated", "completing")


def start_munged(state: State) -> None:
    run = state.root / "run"
    # As root, like the other daemons: the root directory may lie where no other user may go.
    options = ["--foreground", f"--socket={run}/munge.socket", f"--key-file={state.root}/etc/munge.key"]
    files = [f"--pid-file={run}/munged.pid", f"--seed-file={run}/munged.seed", f"--log-file={run}/munged.log"]
    _start(state, "munged", [_program("munged"), *options, *files], hostname=state.controller)
    _wait(state, "munged", lambda: (run / "munge.socket").is_socket())


def start_mariadbd(state: State) -> None:
    root = state.root
    # Temporary files of its own: in /tmp, another cluster that is being made at the same moment takes them away.
    common = ["--no-defaults", f"--datadir={root}/mysql", f"--tmpdir={root}/tmp", "--user=root"]
    # A throw-away database: small, and it need not survive a power cut.
    common += ["--innodb-log-file-size=8M", "--innodb-flush-method=nosync", "--innodb-flush-log-at-trx-commit=0"]
    install = [_program("mariadb-install-db"), *common, "--auth-root-authentication-method=socket", "--skip-test-db"]
    files = [f"--socket={root}/run/mariadb.socket", f"--pid-file={root}/run/mariadbd.pid"]
    # slurmdbd's own check wants such a cache, and a patient lock wait.
    settings = [
        "--skip-networking",
        "--skip-log-bin",
        "--innodb-buffer-pool-size=128M",
        "--innodb-lock-wait-timeout=900",
    ]
    serve = [_program("mariadbd"), *common, *files, *settings]
    # One process, so that the making of the database too is recorded, and ended if somebody gives up meanwhile.
    both = f"{shlex.join(install)} && exec {shlex.join(serve)}"
    _start(state, "mariadbd", ["sh", "-c", both], hostname=state.controller)
    ping = [_program("mariadb-admin"), "--no-defaults", "--user=root", f"--socket={root}/run/mariadb.socket", "ping"]
    _wait(state, "mariadbd", lambda: _succeeds(ping))


def start_slurmdbd(state: State) -> None:
    _start(state, "slurmdbd", [_program("slurmdbd"), "-D"], hostname=state.controller)
    _wait(state, "slurmdbd", lambda: _listens(state.ports.slurmdbd))


def register_cluster(state: State) -> None:
    """slurmdbd has to know a cluster, once, before its slurmctld may speak to it."""
    add_cluster = ["sacctmgr", "-i", "add", "cluster", state.options.name]
    _wait(state, "slurmdbd", lambda: _succeeds(add_cluster, state))


def start_slurmctld(state: State) -> None:
    _start(state, "slurmctld", [_program("slurmctld"), "-D"], hostname=state.controller)
    _wait(state, "slurmctld", lambda: _listens(state.ports.slurmctld))


def start_slurmd(state: State, node: str) -> None:
    _start(state, node, [_program("slurmd"), "-D", "-N", node], hostname=node)


def wait_for_slurmd(state: State, node: str) -> None:
    port = state.ports.slurmd[state.nodes.index(node)]
    _wait(state, node, lambda: _listens(port))


def wait_for_nodes(state: State, nodes: Sequence[str]) -> None:
    """Until Slurm would give work to each of them."""

    def all_up() -> bool:
        states = node_states(state)
        return all(states.get(node) in UP_STATES for node in nodes)

    _wait(state, "slurmctld", all_up)


def node_states(state: State) -> dict[str, str]:
    """sinfo's long state by node, such as `idle`, `down*`; empty when the controller does not answer."""
    if not all(
        processes.is_alive(state.processes[role]) for role in ("munged", "slurmctld") if role in state.processes
    ):
        return {}  # sinfo would try for half a minute
    answer = client(state, ["sinfo", "-h", "-N", "-o", "%N %T"])
    if answer.returncode:
        return {}
    return dict(line.split() for line in answer.stdout.splitlines())


def client(state: State, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's own commands against this cluster."""
    env = {**requirements.environment(), "SLURM_CONF": str(state.slurm_conf)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def _start(state: State, role: str, command: Sequence[str], *, hostname: str) -> None:
    env = {
        **requirements.environment(),
        "SLURM_CONF": str(state.daemons_conf),
        # libmariadb, inside slurmdbd, has no other way to be told about a socket.
        "MYSQL_UNIX_PORT": f"{state.root}/run/mariadb.socket",
    }

    def record(process: processes.Process) -> None:
        state.processes[role] = process
        state.save()

    processes.start(role, command, log=_log(state, role), env=env, record=record, hostname=hostname)


def _log(state: State, role: str) -> Path:
    """What a daemon prints. Slurm's daemons, while in the foreground, also write to a log of their own: same lines."""
    return state.root / "log" / f"{role}.out"


def _wait(state: State, role: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_PATIENCE_SECONDS
    while not ready():
        log = _log(state, role)
        if not processes.is_alive(state.processes[role]):
            raise DevClusterError(f"{role} ended at once; see {log}{_tail(log)}")
        if time.monotonic() > deadline:
            raise DevClusterError(f"{role} was not ready after {READY_PATIENCE_SECONDS:.0f} s; see {log}{_tail(log)}")
        time.sleep(0.1)


def _succeeds(command: Sequence[str], state: State | None = None) -> bool:
    if state is not None:
        return client(state, command).returncode == 0
    answer = subprocess.run(command, env=requirements.environment(), capture_output=True, check=False)
    return answer.returncode == 0


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _program(name: str) -> str:
    path = shutil.which(name, path=requirements.SEARCH_PATH)
    if path is None:
        raise DevClusterError(f"{name} is not installed")
    return path


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "".join(f"\n  | {line}" for line in text)
