"""Faults of what survives crashed ranks: warm parents, snapshots in shared memory, and their replicas on other nodes.

The nodes of the development cluster are on one machine and share /dev/shm, where each has a folder of its own name. A
node that is taken away therefore also loses its folder here.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.checkpoint.snapshot_parts import SnapshotKey
from hpcaccel.checkpoint_files import snapshot_folder

from . import injectors
from .dev_cluster import wait_until

if TYPE_CHECKING:
    from .chaos import Chaos

SETTINGS: dict[str, dict[str, Any]] = {
    "checkpoint": {"snapshot_every_steps": 1, "snapshot_replicas": 1},
    "resilience": {"warm_restart": "auto"},
}
"""What a run has to set so that these faults can strike."""
WAIT_SECONDS = 60


def parts(chaos: Chaos, node: str, ranks: tuple[int, ...]) -> list[Path]:
    """The files of snapshots on ``node`` that hold the parts of ``ranks``: contents and records."""
    folder = snapshot_folder._run_folder(chaos.run.dir.path) / node
    names = [f"rank_{rank:05d}.{suffix}" for rank in ranks for suffix in ("bin", "json")]
    return sorted(path for name in names for path in folder.glob(f"step_*/{name}"))


def ranks_of(chaos: Chaos, node: str) -> tuple[int, ...]:
    first = 2 * chaos.nodes.index(node)
    return first, first + 1


def signal_ranks(chaos: Chaos, number: signal.Signals, ranks: Iterable[int] = range(4)) -> None:
    for rank in ranks:
        injectors.signal_rank(chaos.run, rank, number)


def wait_for_parts(chaos: Chaos, node: str, ranks: tuple[int, ...]) -> None:
    wait_until(lambda: len(parts(chaos, node, ranks)) >= 2 * len(ranks), "snapshots", timeout_seconds=WAIT_SECONDS)


def damage(paths: list[Path], dice: random.Random) -> str:
    """Damage each of ``paths`` in its own way; return how."""
    kinds = []
    for path in paths:
        kinds.append(dice.choice(["bit flip", "zeroed page", "truncation", "missing file"]))
        injectors.DAMAGES[kinds[-1]](path, dice)
    return " and ".join(sorted(set(kinds)))


# -- faults --------------------------------------------------------------------------------------------------------


def kill_a_warm_parent(chaos: Chaos) -> str:
    """Kill the parent of a rank: the rank ends with it."""
    rank, ends = chaos.dice.randrange(4), len(chaos.run.lines("end"))
    pid = injectors.pid_of(chaos.run, rank)
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    command = Path(f"/proc/{parent}/cmdline").read_bytes()
    if b"hpcaccel" not in command:  # no restart in place is left in this job, and so the ranks have no warm parents
        raise TimeoutError(f"rank {rank} has no warm parent")
    os.kill(parent, signal.SIGKILL)
    chaos.wait_for_end(ends)
    return f"of rank {rank}"


def damage_a_snapshot(chaos: Chaos) -> str:
    """Damage the newest part of one rank, then kill a rank: the run resumes from something else."""
    owner, killed, ends = chaos.dice.randrange(4), chaos.dice.randrange(4), len(chaos.run.lines("end"))
    node = chaos.nodes[owner // 2]
    wait_for_parts(chaos, node, (owner,))
    signal_ranks(chaos, signal.SIGSTOP)  # otherwise they take the next snapshot
    newest = max((path.parent for path in parts(chaos, node, (owner,))), key=lambda path: SnapshotKey.of(path.name))
    path = chaos.dice.choice([path for path in parts(chaos, node, (owner,)) if path.parent == newest])
    kind = damage([path], chaos.dice)
    injectors.signal_rank(chaos.run, killed)
    signal_ranks(chaos, signal.SIGCONT)
    chaos.wait_for_end(ends)
    return f"{kind} in {newest.name}/{path.name}, rank {killed} killed"


def power_cut_with(change: Callable[[list[Path], random.Random], str]) -> Callable[[Chaos], str]:
    """A power cut of a node, whose folder of snapshots is lost, after ``change`` to its parts on the other node."""

    def fault(chaos: Chaos) -> str:
        node = chaos.dice.choice(chaos.nodes)
        other = next(name for name in chaos.nodes if name != node)
        ends, ranks = len(chaos.run.lines("end")), ranks_of(chaos, node)
        wait_for_parts(chaos, other, ranks)
        signal_ranks(chaos, signal.SIGSTOP)
        what = change(parts(chaos, other, ranks), chaos.dice)
        with injectors.taken_away(chaos.cluster, node):
            shutil.rmtree(snapshot_folder._run_folder(chaos.run.dir.path) / node)
            signal_ranks(chaos, signal.SIGCONT, ranks_of(chaos, other))
            chaos.wait_for_end(ends)
        return f"{node}, its replicas on {other} {what}"

    return fault


def _keep(paths: list[Path], dice: random.Random) -> str:
    return "intact"


def _delete(paths: list[Path], dice: random.Random) -> str:
    for path in paths:
        path.unlink()
    return "deleted"


def no_memory(chaos: Chaos) -> str:
    """Restart the ranks, and refuse a rank's memory for snapshots in the new attempt."""
    rank, killed, ends = chaos.dice.randrange(4), chaos.dice.randrange(4), len(chaos.run.lines("end"))
    injectors.signal_rank(chaos.run, killed)
    chaos.wait_for_end(ends)
    wait_until(lambda: len(chaos.run.lines("start")) > ends + 1, "a new attempt", timeout_seconds=WAIT_SECONDS)
    with injectors.injected(chaos.run, rank, "error=ENOSPC", calls=["fallocate"]) as log:
        wait_until(lambda: "INJECTED" in log.read_text(), "a snapshot meets ENOSPC", timeout_seconds=WAIT_SECONDS)
    chaos.wait_for_progress()  # without snapshots: this attempt takes no more of them, the next one does
    ends = len(chaos.run.lines("end"))
    injectors.signal_rank(chaos.run, killed)
    chaos.wait_for_end(ends)
    return f"rank {killed} killed, then none for rank {rank}, rank {killed} killed again"


FAULTS: dict[str, Callable[[Chaos], str]] = {
    "a warm parent killed": kill_a_warm_parent,
    "a snapshot damaged": damage_a_snapshot,
    "power cut, replicas intact": power_cut_with(_keep),
    "power cut, replicas damaged": power_cut_with(damage),
    "power cut, replicas deleted": power_cut_with(_delete),
    "no memory for snapshots": no_memory,
}
