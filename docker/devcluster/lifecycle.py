"""Start and stop a cluster; fail and restore one node or daemon."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from . import daemons, hosts, processes, requirements, setup
from .errors import DevClusterError
from .state import Options, State, is_root, load, locked

Report = Callable[[str], None]

# Time for a daemon to exit by itself. Anything it would still write is deleted at the next `up` anyway.
LEAVE_PATIENCE_SECONDS = 5


def up(root: Path, asked: Mapping[str, object], report: Report, *, pyxis: str = "") -> State:
    """Return a running cluster, existing or new. `asked` contains the options that were given."""
    if (problem := requirements.problem()) is not None:
        raise DevClusterError(problem)
    setup.claim(root)
    with locked(root):
        old = load(root)
        if old is not None and _is_up(old):
            _check_same(old, asked)
            if pyxis and pyxis != old.pyxis:
                raise DevClusterError(
                    f"the cluster in {root} is up with pyxis={old.pyxis!r}, not {pyxis!r}: stop it first with `down`"
                )
            report(f"already up: {root}")
            return old
        if old is not None:
            report("cleaning up after a crash")
            _stop(old)
        state = setup.create(root, Options(**asked), pyxis=pyxis)  # type: ignore[arg-type]  # argparse has checked the types
        try:
            _start(state, report)
        except BaseException:  # Ctrl-C too: clean up
            _stop(state)
            raise
        return state


def down(root: Path, report: Report) -> bool:
    """Stop what `up` started. Returns False if there is no cluster. The logs stay until the next `up`."""
    if not is_root(root):
        return False
    with locked(root):
        state = load(root)
        if state is None:
            return False
        report(f"stopping {sum(map(processes.is_alive, state.processes.values()))} daemons and their jobs")
        _stop(state)
        return True


def fail(root: Path, role: str, *, slurmd_only: bool) -> None:
    """Simulate a power cut: kill a node's slurmd, job step daemons and tasks at once; or kill slurmctld or slurmdbd."""
    _require(root)
    with locked(root):
        state = _running(root, role)
        state.failed = sorted({*state.failed, role})
        state.save()
        if role in state.nodes and not slurmd_only:
            _cut_power(state, role)
        else:
            processes.end([state.processes[role]], signal.SIGKILL, patience_seconds=10)


def restore(root: Path, role: str) -> None:
    """Start a failed node or daemon again."""
    _require(root)
    with locked(root):
        state = _running(root, role)
        if processes.is_alive(state.processes[role]):
            raise DevClusterError(f"{role} is running: only a role stopped by `fail {role}` can be restored")
        state.failed = [name for name in state.failed if name != role]
        if role == "slurmdbd":
            daemons.start_slurmdbd(state)
        elif role == "slurmctld":
            daemons.start_slurmctld(state)
            daemons.wait_for_nodes(state, [node for node in state.nodes if node not in state.failed])
        else:
            _end_descendants(state, [role])  # like a reboot: ends the jobs that --slurmd-only left running
            daemons.start_slurmd(state, role)
            daemons.wait_for_slurmd(state, role)
            daemons.wait_for_nodes(state, [role])


def _start(state: State, report: Report) -> None:
    where = f" of {state.slurm_folders[0]}" if state.slurm_folders else ""
    report(f"starting munge and MariaDB, for Slurm {requirements.slurm_version(folders=state.slurm_folders)}{where}")
    daemons.start_munged(state)
    daemons.start_mariadbd(state)
    report("starting slurmdbd")
    daemons.start_slurmdbd(state)
    daemons.register_cluster(state, report)
    report(f"starting slurmctld and {len(state.nodes)} slurmd")
    daemons.start_slurmctld(state)
    for node in state.nodes:
        daemons.start_slurmd(state, node)
    daemons.wait_for_nodes(state, state.nodes)
    state.ready = True
    state.save()


def _stop(state: State) -> None:
    if state.ready:
        state.ready = False
        state.save()
    # First the daemons that start jobs, then the jobs; the database last, because the others use it until they exit.
    order = [["slurmctld", *state.nodes], ["slurmdbd"], ["mariadbd", "munged"]]
    for roles in order:
        group = [state.processes[role] for role in roles if role in state.processes]
        processes.end(group, signal.SIGTERM, patience_seconds=LEAVE_PATIENCE_SECONDS)
        _end_descendants(state, [*state.nodes, "slurmctld", "slurmdbd", "mariadbd", "munged"])
    with hosts.locked():
        hosts.remove(state.root)
    setup.clear(state.root, keep_logs=True)
    state.forget()


def _cut_power(state: State, node: str) -> None:
    """Stop all processes of a node before any of them is killed: in a power cut none outlives another one. Otherwise
    srun's second process would cancel its step when srun is gone.

    The youngest is killed first, since the kernel continues stopped processes whose parents have ended (SIGCONT).
    """
    slurmd, stopped = state.processes[node], set[processes.Process]()
    while new := {slurmd, *processes.descendants([slurmd], [node])} - stopped:
        processes.send(list(new), signal.SIGSTOP)
        stopped |= new
    by_age = sorted(stopped, key=lambda one: (one.start_ticks, one.pid), reverse=True)
    processes.end(by_age, signal.SIGKILL, patience_seconds=10)
    _end_descendants(state, [node])


def _end_descendants(state: State, roles: Sequence[str]) -> None:
    """Kill all descendants of these daemons. The search is repeated, because processes may fork meanwhile."""
    daemons_of = [state.processes[role] for role in roles if role in state.processes]
    # Only these names: the namespace number of a dead node may now belong to another node, which was restored earlier.
    hostnames = {role if role in state.nodes else state.controller for role in roles}
    while left := processes.descendants(daemons_of, hostnames):
        processes.end(left, signal.SIGKILL, patience_seconds=10)


def _is_up(state: State) -> bool:
    roles = {"munged", "mariadbd", "slurmdbd", "slurmctld", *state.nodes} - set(state.failed)
    return state.ready and all(role in state.processes and processes.is_alive(state.processes[role]) for role in roles)


def _check_same(state: State, asked: Mapping[str, object]) -> None:
    for name, value in asked.items():
        running = getattr(state.options, name)
        if value != running:
            raise DevClusterError(
                f"the cluster in {state.root} is up with {name}={running}, not {value}: stop it first with `down`, or "
                "start another cluster with --root"
            )


def _require(root: Path) -> State:
    state = load(root)
    if state is None:
        raise DevClusterError(f"no cluster in {root}: start it with `up --root {root}`")
    return state


def _running(root: Path, role: str) -> State:
    state = _require(root)
    if role not in (allowed := [*state.nodes, "slurmctld", "slurmdbd"]):
        raise DevClusterError(f"{role!r} is not part of the cluster in {root} (has: {', '.join(allowed)})")
    return state
