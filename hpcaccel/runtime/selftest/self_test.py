"""The self-test of this rank: all checks, in an order in which each builds on those before it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.rank_env import RankEnvironment, detect
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.selftest import collective_checks, meeting, node_checks, pair_links, training_checks
from hpcaccel.runtime.selftest.check_runner import CheckFailed, CheckRunner, Fault, ResultLog, rank_of_variables
from hpcaccel.runtime.selftest.meeting import JoinedRanks

__all__ = ["SelfTest", "main"]

MARGIN_SECONDS = 20.0
"""Time by which the limit of a check exceeds the timeout of what it waits for."""
NODE_SECONDS = 60.0
"""Time limit for each check of the node itself."""
PAIR_SECONDS = 10.0
"""Time allowed for each round of pairs."""


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The self-test of this rank."""

    runner: CheckRunner
    folders: Sequence[Path]
    """The folders that are written to; the first one is for checkpoints."""
    expected: int | None
    """The number of ranks that were started, if the launcher has passed it."""
    timeout_seconds: float
    """Timeout of the rendezvous and of each collective."""
    cpu: bool

    def run(self) -> None:
        """Run all checks that are possible."""
        env = self._environment()
        if env is None:
            return
        ranks = None
        with ExitStack() as stack:
            if env.world_size > 1:
                door = stack.enter_context(meeting.listen()) if env.local_rank == 0 else None
                limit = self.timeout_seconds + MARGIN_SECONDS
                ranks = self.runner.together(
                    "rendezvous",
                    lambda: meeting.meet(env, door, timeout_seconds=self.timeout_seconds),
                    seconds=2 * limit,
                )
                reached = ranks is not None and self.runner.together(
                    "connections", lambda: meeting.check_reach(ranks, door, self.runner, timeout_seconds=limit),
                    seconds=2 * limit,
                )  # fmt: skip
            else:
                reached = True
        writable = self._node(env) if env.local_rank == 0 else True
        if not reached:
            self._skip("the ranks did not meet" if ranks is None else "not all nodes can connect to each other")
            return
        self._with_all(env, ranks, writable=writable)

    def _environment(self) -> RankEnvironment | None:
        log = self.runner.log
        log.rank = rank_of_variables()

        def check() -> RankEnvironment:
            try:
                env = detect()
            except RankEnvironmentError as error:
                kind = "world_size" if "WORLD_SIZE" in str(error) else "environment"
                raise CheckFailed(Fault(kind=kind, message=str(error))) from None
            log.rank = env.rank
            self.runner.measure(
                world_size=env.world_size,
                local_rank=env.local_rank,
                local_world_size=env.local_world_size,
                master=f"{env.master_addr}:{env.master_port}",
                source=env.source,
                places=meeting.expected_places(env),
                expected=self.expected,
            )
            meeting.check_world_size(env, self.expected)
            return env

        return self.runner.local("environment", check, seconds=NODE_SECONDS)

    def _node(self, env: RankEnvironment) -> bool:
        """The checks of this node. Returns whether all folders can be written."""
        runner = self.runner
        runner.local("kernel", lambda: node_checks.check_kernel(runner), seconds=NODE_SECONDS)
        writable = runner.local("disks", lambda: node_checks.check_disks(runner, self.folders), seconds=NODE_SECONDS)
        runner.local("network", lambda: node_checks.check_network(runner, env), seconds=NODE_SECONDS)
        if not self.cpu:
            runner.local("gpus", lambda: node_checks.check_gpus(runner, env, self.folders[0]), seconds=2 * NODE_SECONDS)
        return bool(writable)

    def _with_all(self, env: RankEnvironment, ranks: JoinedRanks | None, *, writable: bool) -> None:
        """The checks on this rank's device, and those that all ranks run together."""
        runner, limit = self.runner, self.timeout_seconds + MARGIN_SECONDS
        full = 0 if writable else 1
        if ranks is not None:
            # The slowest node may need the limits of all its own checks.
            wait = 5 * NODE_SECONDS
            found = runner.together(
                "ready",
                lambda: meeting.wait_for_all(
                    ranks, "its own checks", timeout_seconds=wait, bad=not writable, killed=runner.log.killed_ranks
                ),
                seconds=wait + MARGIN_SECONDS,
            )
            if found is None:
                self._skip("not all ranks are ready")
                return
            full = found
        world = runner.together("groups", self._join, seconds=2 * limit)
        if world is None:
            self._skip("the process groups could not be created")
            return
        runner.together("device", lambda: node_checks.check_device(runner, world.device), seconds=limit)
        if ranks is not None and not self._network(world, ranks, limit):
            self._skip("the network checks failed", but=("collectives", "pairs", "clocks"))
            return
        self._training(full=full, limit=limit)

    def _join(self) -> World:
        # The limits of the checks must apply first: they tell a rank that hangs from those that wait for it, while NCCL
        # would end all ranks alike.
        longest = self.timeout_seconds + 2 * MARGIN_SECONDS + pair_links.MOST_ROUNDS * PAIR_SECONDS
        world = World.current(cpu=self.cpu, timeout=timedelta(seconds=longest))
        world.group.wait_for_all("the self-test")
        return world

    def _network(self, world: World, ranks: JoinedRanks, limit: float) -> bool:
        """Collectives, links and clocks. Returns whether the ranks can go on together."""
        runner, device = self.runner, world.device
        nodes = ranks.first_of_nodes
        players = nodes if len(nodes) > 1 else list(range(ranks.env.world_size))
        rounds = min(len(players), pair_links.MOST_ROUNDS)

        def pairs() -> bool:
            pair_links.measure_pairs(runner, device, players)
            world.group.barrier("pairs")
            return True

        def clocks() -> bool:
            pair_links.measure_clocks(runner, nodes)
            world.group.barrier("clocks")
            return True

        def collectives() -> bool:
            collective_checks.check_collectives(runner, device)
            return True

        return bool(
            runner.together("collectives", collectives, seconds=limit)
            and runner.together("pairs", pairs, seconds=limit + rounds * PAIR_SECONDS)
            and (len(nodes) == 1 or runner.together("clocks", clocks, seconds=limit))
        )

    def _training(self, *, full: int, limit: float) -> None:
        runner = self.runner

        def train() -> training_checks.SmallTraining:
            training = training_checks.SmallTraining(cpu=self.cpu)
            training_checks.check_training(runner, training)
            return training

        def save() -> None:
            assert training is not None
            folder = self.folders[0] / "selftest-checkpoint"
            training_checks.check_checkpoint(runner, training, folder)
            training.accelerator.end_training()

        training = runner.together("training", train, seconds=limit)
        if training is None or full:
            runner.skip("checkpoint", "a disk cannot be written" if full else "the training failed")
        else:
            runner.together("checkpoint", save, seconds=limit)

    def _skip(self, why: str, *, but: Sequence[str] = ()) -> None:
        for check in ("collectives", "pairs", "clocks", "training", "checkpoint"):
            if check not in but:
                self.runner.skip(check, why)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-test of this rank. Returns exit code 0, even if faults were found: ``hpcaccel test`` computes the
    verdict from the results of all ranks.

    After a failed check, leave the process with ``os._exit``: its shutdown would wait for the other ranks.
    """
    parser = argparse.ArgumentParser(prog="python -m hpcaccel.runtime.selftest", description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder for the results of all ranks")
    parser.add_argument("--checkpoints", type=Path, help="shared folder for the checkpoint; default: --results")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="another folder to write to")
    parser.add_argument("--expected", type=int, help="number of ranks that were started")
    parser.add_argument("--timeout", type=float, default=60.0, help="timeout of the rendezvous, in seconds")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    given = parser.parse_args(arguments)
    log = ResultLog(given.results)
    try:
        given.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"hpcaccel: cannot create {given.results}: {error.strerror}", file=sys.stderr, flush=True)
    SelfTest(
        runner=CheckRunner(log),
        folders=[*node_checks.default_folders(given.checkpoints or given.results), *given.folder],
        expected=given.expected,
        timeout_seconds=given.timeout,
        cpu=given.cpu,
    ).run()
    log.write("end", "ok")
    return 0
