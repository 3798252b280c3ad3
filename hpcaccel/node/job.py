"""The state that all attempts of one job share (run, allocation, nodes, ledger), and the writing of their end lines."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from hpcaccel.checkpoint_files.watched import SavedCheckpoint
from hpcaccel.core.attempt_steps import complete_timing
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.log import Mask
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RUN_DIR, RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.node.allocation import Allocation
from hpcaccel.node.allocation.batch_host_watch import BatchHostWatch
from hpcaccel.node.allocation.scheduler_view import SchedulerView
from hpcaccel.node.decision import Verdict
from hpcaccel.node.failures.disk_space import if_possible, retry_until_writable
from hpcaccel.node.failures.exclusion import Placement
from hpcaccel.node.ledger import Ledger, how_far
from hpcaccel.node.warm.eligible_runs import OFF, why_not_warm
from hpcaccel.node.warm.warm_ranks import WarmStep
from hpcaccel.slurm.job_dependencies import ended_well

__all__ = ["Job", "exit_code_of", "unmet_dependency"]

T = TypeVar("T")

UPSTREAM_SECONDS = 20.0
"""How long to wait for the end line of a run in ``after``. On a shared file system this line may become visible only
after Slurm has started this job."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Job:
    """One job of a run: the state that its attempts share."""

    run: RunDir
    launch: LaunchSpec
    allocation: Allocation
    ledger: Ledger
    scheduler: SchedulerView
    restarts: int = 0
    """Number of restarts of the ranks in this allocation."""
    warm_step: WarmStep | None = None
    """The warm parents that can start the next attempt's ranks."""
    _told: str = field(init=False, default="")
    """Why ranks had no warm parents, as it was logged last."""
    host_watch: BatchHostWatch | None = field(init=False, default=None)
    """Requeues the job if it loses the node of its batch step; None if Slurm does so."""
    placement: Placement = field(init=False)
    mask: Mask = field(init=False)

    def __post_init__(self) -> None:
        self.placement = Placement(self.run, self.launch, self.allocation)
        self.mask = Mask.of(self.run)
        if self.launch.resilience.outlives_nodes and not self.launch.local:
            count = self.allocation.restart_count
            self.host_watch = BatchHostWatch(self.run, job_id=self.allocation.job_id, restart_count=count)

    def fit_nodes(self) -> None:
        """Choose the number of nodes of the next ranks, where the spec allows several."""
        if self.launch.node_sizes:
            self.launch = dataclasses.replace(self.launch, nodes=len(self.placement.nodes))

    def watch_batch_host(self) -> None:
        """Keep the step running that watches the node of the batch step, if the job needs one. It is on a node of the
        ranks if possible: the loss of that node ends the attempt, and is detected by that."""
        if self.host_watch is not None:
            ranks = self.placement.nodes
            self.host_watch.look([*(node for node in self.allocation.nodes if node not in ranks), *ranks])

    def prepare_submitit(self) -> None:
        """In a run of a Python function: remove the results of earlier attempts, which submitit would accept, and link
        the pickle under this job's ID, for which submitit waits. A killed submit command may not have made the link."""
        if not self.launch.callable:
            return
        for path in self.run.submitit.glob("*_result.pkl"):
            path.unlink()
        with suppress(FileExistsError):
            self.run.submitit.joinpath(f"{self.allocation.job_id}_submitted.pkl").symlink_to(self.run.call.name)

    def has_results(self) -> bool:
        """In a run of a Python function: whether every rank has written its result."""
        return self.launch.callable and len(list(self.run.submitit.glob("*_result.pkl"))) >= self.launch.ranks

    def resume_args(self, newest: SavedCheckpoint) -> list[str]:
        """``entrypoint.resume_args`` with its placeholders replaced by the path and step of ``newest`` and by the run's
        directory; [] if the step is needed but unknown."""
        words, path = self.launch.resume_args, newest.name if newest.path is None else str(newest.path)
        if newest.step is None and any("{step}" in word for word in words):
            log.warning("entrypoint.resume_args are left out: the step of %s is unknown", path)
            return []
        step = "" if newest.step is None else str(newest.step)
        values = {"{newest}": path, "{step}": step, RUN_DIR: str(self.run.path)}
        return [re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], word) for word in words]

    def has_warm_parents(self, *, another_run: bool) -> bool:
        """Whether the next ranks have warm parents. If no restart in place is left, they would be of no use.

        Args:
            another_run: whether the parents may start the ranks of another run, too.
        """
        if not another_run and self.restarts >= self.launch.resilience.restart_in_place:
            return False
        why = why_not_warm(self.launch) or self._why_not_here()
        if why not in ("", OFF, self._told):
            log.info("restarts in place start new processes (resilience.warm_restart): not possible with %s", why)
            self._told = why
        return not why

    def _why_not_here(self) -> str:
        """Why the ranks have no warm parents in this job although the spec allows them; empty if they have."""
        if any(end.error_class == "host_out_of_memory" for end in self.ledger.ends):
            return "the memory of a job that has run out of it before"
        if (proctrack := self.allocation.proctrack) == "proctrack/pgid":
            return f"ProctrackType={proctrack}: Slurm would not signal the ranks, which have sessions of their own"
        return ""

    def check_warm_step(self) -> None:
        """End the warm parents if they cannot start the next ranks. This must be done before an attempt begins, since
        the last messages about the step are not about that attempt."""
        step = self.warm_step
        if step is not None and (self._why_not_here() or not step.may_start(self.placement.nodes)):
            self.end_warm_step()

    def end_warm_step(self) -> None:
        """End the warm parents, if there are any, and wait for their end."""
        if self.warm_step is not None:
            self.warm_step.end()
            self.warm_step = None

    def end_line(
        self,
        verdict: Verdict,
        *,
        attempt: int | None = None,
        started: float | None = None,
        exit_code: int | None = None,
        preflight_seconds: float | None = None,
    ) -> AttemptEnd:
        """The ledger's end line for ``verdict``.

        Args:
            attempt: number of the attempt; default: the number of the next attempt, whose ranks are not started.
            started: when the attempt began (seconds since the epoch); default: now.
            exit_code: the exit code of the ranks.
            preflight_seconds: duration of the preflight.
        """
        now = time.time()
        number = attempt or self.ledger.next_attempt
        return AttemptEnd(
            attempt=number,
            time=now,
            job_id=self.allocation.job_id,
            reason=verdict.reason,
            decision=verdict.decision,
            error_class=verdict.error_class,
            detail=verdict.detail,
            advice=verdict.advice,
            nodes_blamed=list(verdict.nodes_blamed),
            rank_blamed=verdict.rank_blamed,
            nodes_excluded=list(verdict.exclude),
            preflight_seconds=preflight_seconds,
            exit_code=exit_code,
            seconds=round(now - (started or now), 3),
            **how_far(self.run, number, ends=self.ledger.ends),
        )

    def write_end(self, line: AttemptEnd) -> None:
        """Append ``line`` to the ledger. If the disk is full, retry for up to 10 minutes, but not before a requeue: the
        next start of the job can write the line from the attempt's files."""
        if_possible(lambda: complete_timing(self.run, line.attempt))
        if line.decision == "requeue":
            if_possible(lambda: self.ledger.end(line))
        else:
            self.retry_until_writable(lambda: self.ledger.end(line))
        detail = f" ({line.detail})" if line.detail else ""
        log.info("attempt %d ended: %s%s; decision: %s", line.attempt, line.reason, detail, line.decision)

    def retry_until_writable(self, write: Callable[[], T]) -> T:
        """Retry ``write`` while the disk is full or unreachable, see ``disk_space.retry_until_writable``."""
        return retry_until_writable(write, run=self.run)


def unmet_dependency(launch: LaunchSpec) -> str:
    """Why this run must not start, as a phrase for the user; empty if every run in ``after`` has ended as required.

    Slurm starts the job once the runs in ``after`` are over, but Slurm does not check how a chain has ended. Runs that
    are arrays are not checked here: they have no ledger of their own, and Slurm's check is enough for them.
    """
    for one in launch.after:
        kind, other = one["kind"], RunDir(one["run"])
        if kind == "afterany" or not other.record.exists() or other.tasks.exists():
            continue
        end = time.monotonic() + UPSTREAM_SECONDS
        while kind == "afterok" and not ended_well(other) and time.monotonic() < end:
            time.sleep(1.0)
        if ended_well(other) != (kind == "afterok"):
            how = "succeeded" if kind == "afternotok" else "did not succeed"
            return f"{kind}: run {other.run_id} {how}"
    return ""


def exit_code_of(end: Verdict | AttemptEnd) -> int:
    """The batch step's exit code if the run, or the run's part in this job, has ended with ``end``."""
    if end.reason in ("completed", "pruned"):
        return 0
    if end.decision == "pause":
        return EXIT_CONTINUED
    if end.reason == "cancelled":
        return 130
    return HpcaccelError.exit_code if end.error_class != "user_mistake" else 2
