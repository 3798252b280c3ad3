"""Chaos test: one long training with random faults of every kind, `make chaos N=100 SEED=1`, with warm restarts and
snapshots in memory `make chaos MEMORY=1`.

The seed determines the schedule; the moment at which a fault strikes also depends on the machine. Every kind of fault
comes once before any is repeated. The run must end with the losses and weights of the same training without faults.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import read_lines

from . import injectors, memory_faults
from .dev_cluster import Cluster, program, wait_until
from .scenario import Scenario

STEPS_PER_FAULT = 20
STEPS_PER_EPOCH = 10
PAUSE_SECONDS = 0.4
EVERY_STEPS = 2
CALM_EVERY_STEPS = 100
HANG_SECONDS = 40
PATIENCE_SECONDS = 600

Fault = Callable[["Chaos"], str]


@dataclass
class Chaos:
    """A run with injected faults, and their counts."""

    cluster: Cluster
    run: Scenario
    dice: random.Random
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    missed: int = 0
    """Faults that could not strike in time, such as the third rename of a save that makes only two. They are retried at
    the end, up to a limit."""
    seen_step: int = 0
    """The newest checkpoint when the last fault struck: two failures without a new one would end the run by its cap."""

    @property
    def newest(self) -> int:
        found = checkpoint_files.newest(self.run.dir.checkpoints)
        return found.step if found else 0

    @property
    def nodes(self) -> list[str]:
        nodes = self.run.lines("start")[-1]["nodes"]
        assert isinstance(nodes, list)
        return nodes

    @property
    def is_over(self) -> bool:
        return bool(self.run.ends) and self.run.ends[-1][1] == "end"

    def trains(self) -> bool:
        """Whether the newest attempt has done a step and has not ended."""
        starts = self.run.lines("start")
        if not starts or len(self.run.lines("end")) >= len(starts):
            return False
        attempt = starts[-1]["attempt"]
        return any(line["attempt"] == attempt for line, _ in read_lines(self.run.dir.metrics))

    def wait_for_progress(self) -> None:
        """Wait until the run trains and has a newer checkpoint than at the last fault and the last end."""

        def ready() -> bool:
            ends = self.run.lines("end")
            before = max(self.seen_step, (ends[-1]["checkpoint_step"] or 0) if ends else 0)
            return self.is_over or (self.newest > before and self.trains())

        wait_until(ready, f"a checkpoint after step {self.seen_step}", timeout_seconds=PATIENCE_SECONDS)
        self.seen_step = self.newest

    def wait_for_end(self, ends: int) -> None:
        self.run.wait_for_ends(ends + 1, timeout_seconds=PATIENCE_SECONDS)


# -- faults of ranks -----------------------------------------------------------------------------------------------


def kill_a_rank(chaos: Chaos) -> str:
    rank, ends = chaos.dice.randrange(4), len(chaos.run.lines("end"))
    injectors.signal_rank(chaos.run, rank)
    chaos.wait_for_end(ends)
    return f"rank {rank}"


def kill_all_ranks_of_a_node(chaos: Chaos) -> str:
    ranks, ends = chaos.dice.choice([(0, 1), (2, 3)]), len(chaos.run.lines("end"))
    for rank in ranks:
        injectors.signal_rank(chaos.run, rank)
    chaos.wait_for_end(ends)
    return f"ranks {ranks[0]} and {ranks[1]}"


def kill_inside_a_save(chaos: Chaos) -> str:
    call, number = chaos.dice.choice([("fsync", 6), ("rename", 4), ("mkdir", 2)])
    rank = chaos.dice.randrange(4) if call == "fsync" else 0
    number = chaos.dice.randint(1, number if rank == 0 else 2)
    ends = len(chaos.run.lines("end"))
    what = injectors.kill_inside_a_save(chaos.run, rank, call, number)
    chaos.wait_for_end(ends)
    return f"rank {rank} before its {call} {number}: {what[-90:]}"


def pause_a_rank(chaos: Chaos) -> str:
    rank, seconds = chaos.dice.randrange(4), chaos.dice.uniform(1, 5)
    if injectors.signal_rank(chaos.run, rank, signal.SIGSTOP):
        time.sleep(seconds)
        injectors.signal_rank(chaos.run, rank, signal.SIGCONT)
    return f"rank {rank} for {seconds:.1f} s"


def stop_a_rank_for_good(chaos: Chaos) -> str:
    rank, ends = chaos.dice.randrange(4), len(chaos.run.lines("end"))
    injectors.signal_rank(chaos.run, rank, signal.SIGSTOP)
    chaos.wait_for_end(ends)
    return f"rank {rank}, noticed"


def sigterm_to_a_rank(chaos: Chaos) -> str:
    rank = chaos.dice.randrange(4)
    injectors.signal_rank(chaos.run, rank, signal.SIGTERM)
    return f"rank {rank}"


def sigterm_twice_to_all(chaos: Chaos) -> str:
    ends = len(chaos.run.lines("end"))
    chaos.run.scancel("--signal=TERM")
    seconds = chaos.dice.uniform(0, 1)
    time.sleep(seconds)
    chaos.run.scancel("--signal=TERM")
    chaos.wait_for_end(ends)
    return f"{seconds:.1f} s apart"


# -- disks ---------------------------------------------------------------------------------------------------------


def disk_fault(chaos: Chaos) -> str:
    rank, error = chaos.dice.randrange(4), chaos.dice.choice(["ENOSPC", "EIO", "EDQUOT"])
    ends = len(chaos.run.lines("end"))
    with injectors.injected(chaos.run, rank, f"error={error}", calls=["fsync"]) as log:
        wait_until(lambda: "INJECTED" in log.read_text(), f"a save meets {error}", timeout_seconds=60)
    what = next(line for line in log.read_text().splitlines() if "INJECTED" in line)
    chaos.run.wait_for_ends(ends + 1, timeout_seconds=120)
    return f"{error} on rank {rank}: {what.partition('=')[0][-90:]}"


def damage_the_newest(chaos: Chaos) -> str:
    """Damage the newest checkpoint while the job waits in the queue."""
    injectors.hold_in_queue(chaos.run)
    newest = checkpoint_files.newest(chaos.run.dir.checkpoints)
    assert newest is not None
    kind = chaos.dice.choice(sorted(injectors.DAMAGES))
    file = chaos.dice.choice(injectors.files_of(newest.path))
    injectors.DAMAGES[kind](file, chaos.dice)
    # The next fault waits for a checkpoint newer than the damaged one: repeated steps do not count as progress.
    injectors.release(chaos.run)
    return f"{kind} in {newest.name}/{file.name}"


# -- Slurm and its users -------------------------------------------------------------------------------------------


def preempt(chaos: Chaos, *, grace_seconds: int) -> str:
    nodes = chaos.dice.sample(chaos.nodes, chaos.dice.choice([1, 2]))
    chaos.cluster.run("scontrol", "update", "PartitionName=gpu", f"GraceTime={grace_seconds}")
    ends = len(chaos.run.lines("end"))
    chaos.run.preempt(nodes)
    chaos.wait_for_end(ends)
    return f"{' and '.join(nodes)}, grace {grace_seconds} s"


def preempt_without_grace(chaos: Chaos) -> str:
    return preempt(chaos, grace_seconds=0)


def preempt_with_short_grace(chaos: Chaos) -> str:
    return preempt(chaos, grace_seconds=2)


def preempt_with_long_grace(chaos: Chaos) -> str:
    return preempt(chaos, grace_seconds=30)


def stop(chaos: Chaos) -> str:
    chaos.run.cli("stop", "--requeue", chaos.run.dir.run_id)
    return "hpcaccel stop --requeue"


def requeue_by_hand(chaos: Chaos) -> str:
    ends = len(chaos.run.lines("end"))
    chaos.cluster.run("scontrol", "requeue", chaos.run.job_id, check=False)  # it may have ended a moment ago
    chaos.wait_for_end(ends)  # until then the ranks continue, and a stop would be refused
    return "scontrol requeue"


def a_second_job(chaos: Chaos) -> str:
    """Submit the script once more: the second job is refused, and the first one is not affected."""
    free = next(node for node in chaos.cluster.nodes if node not in chaos.nodes)
    log = chaos.run.folder / "second.log"
    where = ["--nodes=1", f"--nodelist={free}", f"--output={log}"]
    job = chaos.cluster.sbatch(*where, str(chaos.run.dir.script))
    assert chaos.cluster.wait_for(job, ["COMPLETED", "FAILED"])["JobState"] == "FAILED"
    assert f"job {chaos.run.job_id}" in log.read_text(), log.read_text()
    return "refused"


def power_cut(chaos: Chaos) -> str:
    node = chaos.dice.choice(chaos.nodes)
    ends = len(chaos.run.lines("end"))
    with injectors.taken_away(chaos.cluster, node):
        chaos.wait_for_end(ends)
    return node


def slurmd_killed(chaos: Chaos) -> str:
    node, seconds = chaos.dice.choice(chaos.nodes), chaos.dice.uniform(0, 4)
    with injectors.taken_away(chaos.cluster, node, jobs_go_on=True):
        time.sleep(seconds)
    return f"{node}, back after {seconds:.1f} s"


def drain(chaos: Chaos) -> str:
    node = chaos.dice.choice(chaos.nodes)
    ends = len(chaos.run.lines("end"))
    with injectors.drained(chaos.cluster, node):
        chaos.run.cli("stop", "--requeue", chaos.run.dir.run_id)
        chaos.wait_for_end(ends)
        wait_until(lambda: chaos.trains() or chaos.is_over, "a start on other nodes", timeout_seconds=PATIENCE_SECONDS)
    return f"{node}, the run stopped meanwhile"


def controller_away(chaos: Chaos) -> str:
    seconds = chaos.dice.uniform(1, 6)
    with injectors.taken_away(chaos.cluster, "slurmctld"):
        time.sleep(seconds)
    return f"for {seconds:.1f} s"


def controller_away_at_requeue(chaos: Chaos) -> str:
    seconds, ends = chaos.dice.uniform(4, 10), len(chaos.run.lines("end"))
    chaos.run.cli("stop", "--requeue", chaos.run.dir.run_id)  # the ranks still have to save
    with injectors.taken_away(chaos.cluster, "slurmctld"):
        time.sleep(seconds)
    chaos.wait_for_end(ends)
    return f"for {seconds:.1f} s"


def controller_away_at_a_crash(chaos: Chaos) -> str:
    rank, seconds, ends = chaos.dice.randrange(4), chaos.dice.uniform(4, 10), len(chaos.run.lines("end"))
    with injectors.taken_away(chaos.cluster, "slurmctld"):
        injectors.signal_rank(chaos.run, rank)
        time.sleep(seconds)
    chaos.wait_for_end(ends)
    return f"rank {rank} killed, the controller away for {seconds:.1f} s"


def accounting_away(chaos: Chaos) -> str:
    ends = len(chaos.run.lines("end"))
    with injectors.taken_away(chaos.cluster, "slurmdbd"):
        chaos.run.cli("stop", "--requeue", chaos.run.dir.run_id)
        chaos.wait_for_end(ends)
        time.sleep(2)
    return "while the run is requeued"


FAULTS: dict[str, Fault] = {
    "a rank killed": kill_a_rank,
    "all ranks of a node killed": kill_all_ranks_of_a_node,
    "killed inside a save": kill_inside_a_save,
    "a rank paused": pause_a_rank,
    "a rank stopped for good": stop_a_rank_for_good,
    "SIGTERM to a rank": sigterm_to_a_rank,
    "SIGTERM to all, twice": sigterm_twice_to_all,
    "disk full or I/O error": disk_fault,
    "newest checkpoint damaged": damage_the_newest,
    "preempted without grace": preempt_without_grace,
    "preempted, short grace": preempt_with_short_grace,
    "preempted, long grace": preempt_with_long_grace,
    "stopped by the user": stop,
    "scontrol requeue": requeue_by_hand,
    "a second job on the run": a_second_job,
    "power cut": power_cut,
    "slurmd killed": slurmd_killed,
    "node drained": drain,
    "slurmctld away": controller_away,
    "slurmctld away at requeue": controller_away_at_requeue,
    "slurmctld away at a crash": controller_away_at_a_crash,
    "slurmdbd away at requeue": accounting_away,
}


def faults_of(*, memory: bool) -> dict[str, Fault]:
    return {**FAULTS, **memory_faults.FAULTS} if memory else FAULTS


def schedule(faults: int, seed: int, *, memory: bool = False) -> list[str]:
    """Names of faults; each comes once before any is repeated."""
    dice, names = random.Random(seed), list[str]()
    kinds = sorted(faults_of(memory=memory))
    while len(names) < faults:
        names += dice.sample(kinds, len(kinds))
    return names[:faults]


# -- the test ------------------------------------------------------------------------------------------------------


def train(
    run: Scenario, *words: str, epochs: int, strategy: str, faults: int, every_steps: int, memory: bool = False
) -> None:
    extra: dict[str, dict[str, Any]] = memory_faults.SETTINGS if memory else {"checkpoint": {}, "resilience": {}}
    run.train(
        "--epochs", str(epochs), *words,
        runtime={"strategy": strategy},
        slurm={"time": 600},
        checkpoint={"every_steps": every_steps, "keep": 3, **extra["checkpoint"]},
        resilience={
            "max_failures": 10 * faults + 10, "restart_in_place": 2, "hang_timeout_seconds": HANG_SECONDS,
            "max_excluded": 1,  # of 4 nodes: a run of 2 must still start while another node is drained or down
            **extra["resilience"],
        },
    )  # fmt: skip


def attack(chaos: Chaos, names: Sequence[str], *, epochs: int, strategy: str = "ddp", memory: bool = False) -> int:
    """Train with these faults, slowly until the last one has struck; return the exit code."""
    slow = chaos.run.folder / "slow"
    slow.touch()
    words = ("--pause", str(PAUSE_SECONDS), "--while-there", str(slow))
    train(
        chaos.run, *words, epochs=epochs, strategy=strategy, faults=len(names), every_steps=EVERY_STEPS, memory=memory
    )
    print(f"run directory: {chaos.run.dir.path}", flush=True)
    began = time.monotonic()
    left, number = list(names), 0
    while left:
        name, number = left.pop(0), number + 1
        chaos.wait_for_progress()
        if chaos.is_over:
            break
        time.sleep(chaos.dice.uniform(0, 1.5))
        step = chaos.newest
        try:
            what = faults_of(memory=memory)[name](chaos)
        except (TimeoutError, FileNotFoundError, ProcessLookupError) as error:
            # The last two: the process that was to be struck has ended just before, by a fault that struck earlier.
            chaos.missed += 1
            what = f"MISSED: {str(error).splitlines()[0]}"
            if chaos.missed <= len(names) // 5:
                left.append(name)
        else:
            chaos.counts[name] += 1
        print(f"{number:4} {time.monotonic() - began:6.0f} s  step {step:5}  {name}: {what}", flush=True)
    slow.unlink()
    return chaos.run.wait_until_over()


def report(chaos: Chaos, calm: Scenario) -> bool:
    """Print a summary; return whether the run has the losses and weights of the undisturbed one."""
    run = chaos.run
    status, decisions = run.status(), collections.Counter(decision for _, decision in run.ends)
    print(f"\nfaults injected: {chaos.counts.total()}, missed: {chaos.missed}")
    for name, count in sorted(chaos.counts.items()):
        print(f"  {count:4}  {name}")
    finished = status["state"] == "completed"
    same_losses = finished and run.losses == calm.losses
    same_weights = finished and run.digest == calm.digest
    restarts, requeues = decisions["restart"], decisions["requeue"]
    print(f"attempts: {status['attempts']}, restarts in place: {restarts}, requeues: {requeues}")
    from_memory = sum(line["resumed_from"] == "memory" for line in run.lines("end"))
    print(f"resumed from memory: {from_memory}")
    print(f"steps: {len(calm.losses)}, steps lost: {status['steps_lost']}")
    print(f"state: {status['state']} {status['detail'] or ''}")
    print(f"losses of all steps equal the undisturbed run's: {'yes' if same_losses else 'NO'}")
    print(f"final weights equal the undisturbed run's: {'yes' if same_weights else 'NO'}", flush=True)
    return same_losses and same_weights


def disturb(root: Path, *, faults: int, seed: int, strategy: str = "ddp", memory: bool = False) -> bool:
    """Start a cluster in ``root``, an undisturbed run and one with faults; return whether they ended alike."""
    root.chmod(0o755)  # munge requires that its socket is accessible to all users
    program("up", "--root", str(root / "cluster"), "--nodes", "4", "--slurmd-timeout-seconds", "10")
    try:
        cluster = Cluster.at(root / "cluster")
        for name in ("calm", "run"):
            (root / name).mkdir()
        epochs = (faults + 2) * STEPS_PER_FAULT // STEPS_PER_EPOCH
        calm = Scenario(cluster, root / "calm")
        train(calm, epochs=epochs, strategy=strategy, faults=0, every_steps=CALM_EVERY_STEPS)
        assert calm.wait_until_over() == 0, calm.story
        chaos = Chaos(cluster, Scenario(cluster, root / "run"), random.Random(seed))
        attack(chaos, schedule(faults, seed, memory=memory), epochs=epochs, strategy=strategy, memory=memory)
        return report(chaos, calm) and chaos.counts.total() == faults
    finally:
        program("down", "--root", str(root / "cluster"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--memory", action="store_true", help="warm restarts, snapshots in memory, their faults")
    parser.add_argument("--keep", action="store_true", help="keep the run directory")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="hpcaccel-chaos-", dir="/var/tmp"))
    began, good = time.monotonic(), False
    print(f"chaos: {args.faults} faults, seed {args.seed}, {args.strategy}, 2 nodes x 2 ranks", flush=True)
    try:
        good = disturb(root, faults=args.faults, seed=args.seed, strategy=args.strategy, memory=args.memory)
    finally:
        print(f"wall time: {time.monotonic() - began:.0f} s, the undisturbed run included", flush=True)
        if good and not args.keep:
            shutil.rmtree(root)
        else:
            print(f"everything is kept in {root}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
