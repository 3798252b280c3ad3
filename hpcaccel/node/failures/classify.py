"""Classification of a failure: finds the failure's cause among all traces of an attempt, and the nodes to blame.

The cause is the trace whose row comes first in the table, not the earliest trace: a rank that has lost its peer often
fails before the peer itself has logged an error.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.failures import CAUSES, Cause, Failure, cause
from hpcaccel.node.failures.classify_logs import RankEnd, RankLog, rank_ends, read_rank_logs, read_slurm_lines
from hpcaccel.node.rank import LONGEST
from hpcaccel.slurm.states import JobState

__all__ = ["classify"]

_DIFFERS = re.compile(r", and rank (\d+) differs:")
"""Part of the runtime's errors about ranks that make different calls. The group is the rank whose call differs."""
_ENROOT_OR_SLURM = re.compile(r"^(?:\[(?:INFO|WARN|ERROR)\] |srun: |slurmstepd|\[\S*\d\d:\d\d:\d\d\S*\] error: |\s*$)")
"""Lines that enroot or Slurm writes to a rank's log; empty lines match, too."""
_ENROOT_ERROR = re.compile(
    r"^\[ERROR\] (?:Command not found|No such file or directory|File already exists|Invalid image)"
)
_CONSEQUENCES = ("rendezvous", "nccl_timeout", "gloo_timeout")
"""Causes that a rank shows when another one is gone."""
_SIGNALS = {  # srun's text for a rank that was killed by this signal
    signal.SIGKILL: "Killed",
    signal.SIGSEGV: "Segmentation fault",
    signal.SIGBUS: "Bus error",
    signal.SIGABRT: "Aborted",
    signal.SIGILL: "Illegal instruction",
    signal.SIGFPE: "Floating point exception",
    signal.SIGTERM: "Terminated",
}


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """A sign of a cause in a log or in an srun message, with the rank and the node where the sign appears."""

    cause: Cause
    text: str
    rank: int | None = None
    node: str | None = None
    at_fault: bool = False
    """Whether ``rank`` is the one that others miss, although the cause is a consequence of its failure."""

    def order(self, reported: Sequence[int]) -> tuple[int, int, int]:
        """The sort key: the cause's row; among traces of one cause those of no rank, then the ranks as reported.

        Args:
            reported: ranks in the order in which their ends were reported.
        """
        row = CAUSES.index(self.cause)
        if self.rank is None:
            return row, -1, -1
        return row, reported.index(self.rank) if self.rank in reported else len(reported), self.rank


def classify(
    run: RunDir,
    *,
    attempt: int,
    exit_code: int,
    nodes: Sequence[str] = (),
    ranks_per_node: int = 1,
    step_state: JobState | None = None,
    in_container: bool = False,
) -> Failure:
    """Find the cause of a failure.

    Args:
        exit_code: the common exit code of all ranks. It is no evidence if srun has killed ranks.
        nodes: nodes of the attempt, in the order of the ranks.
        step_state: state of the ranks' step in Slurm's accounting; None if Slurm was not queried.
        in_container: whether the ranks run in a container.
    """
    slurm_lines = read_slurm_lines(run, attempt)
    ends = [end for end in rank_ends(slurm_lines) if end.how != "Terminated"] or list(rank_ends(slurm_lines))
    where = dict(enumerate(node for node in nodes for _ in range(ranks_per_node)))
    where |= {end.rank: end.node for end in ends if end.node}
    # A failed rank sends no heartbeats while srun waits for the other ranks: this is not a hang.
    failed = {end.rank for end in ends if end.how.startswith("Exited")}
    traces = [*(trace for trace in _hang(run, attempt) if trace.rank not in failed), *_in_lines(slurm_lines)]
    killed = {end.rank for end in ends if end.how == "Killed"}
    logs = read_rank_logs(run, attempt)
    for log in logs:
        # A killed rank did not exit because of an exception, even if its log contains one.
        traces += [] if log.rank in killed else _in_errors(log, run)
        if in_container and all(_ENROOT_OR_SLURM.match(line) for line in log.lines):
            traces += _of_enroot(log.lines, rank=log.rank)
        # The indented lines of a traceback are the program's source code.
        traces += _in_lines([line for line in log.lines if not line.startswith("    ")], rank=log.rank)
    if in_container and not any(log.lines for log in logs):
        traces += _of_enroot(slurm_lines)  # enroot's messages are here if srun does not write to the ranks' logs
    if step_state is JobState.OUT_OF_MEMORY:
        traces.append(_Trace(cause=cause("host_out_of_memory"), text="Slurm killed the ranks: OUT_OF_MEMORY"))
    traces += _in_ends(ends or [_unseen_end(exit_code)], traces, logs)
    reported = list(dict.fromkeys(end.rank for end in ends))
    first = _named(min(traces, key=lambda trace: trace.order(reported)), logs)
    if first.node is None and first.rank is not None and not first.cause.elsewhere:
        first = dataclasses.replace(first, node=where.get(first.rank))
    return Failure(
        cause=first.cause,
        detail=_sentence(first, nodes),
        nodes=_blamed(first, traces, where, nodes),
        rank=_rank_at_fault(first),
    )


def _named(first: _Trace, logs: Sequence[RankLog]) -> _Trace:
    """If ``first`` reports a lost peer, return a trace for the peer instead: for the first rank without an exception in
    its log, if only a minority of the ranks has no exception. Otherwise return ``first``."""
    silent = [log.rank for log in logs if not log.exceptions]
    if first.cause.name not in ("gloo_timeout", "nccl_timeout") or not 0 < 2 * len(silent) < len(logs):
        return first
    also = f", like {len(silent) - 1} other {'ranks' if len(silent) > 2 else 'rank'}" if len(silent) > 1 else ""
    text = f"exited or hung without an exception{also}; rank {first.rank}: {first.text}"
    return _Trace(cause=first.cause, text=text[:LONGEST], rank=silent[0], at_fault=True)


def _hang(run: RunDir, attempt: int) -> Iterator[_Trace]:
    value: dict[str, Any] | None = read_json(run.attempt(attempt) / "hang.json")
    if value is not None:
        rank, node = value.get("culprit_rank"), value.get("node")
        text = str(value.get("why") or "no rank made progress")
        yield _Trace(cause=cause("hang"), text=text[:LONGEST], rank=rank, node=node)


def _in_lines(lines: Sequence[str], *, rank: int | None = None) -> Iterator[_Trace]:
    for row in CAUSES:
        found = [(line, match) for line in lines if (match := _first_match(row.lines, line))] if row.lines else []
        if found:
            line, match = next((one for one in found if one[1].groupdict().get("node")), found[0])
            node = match.groupdict().get("node")
            yield _Trace(cause=row, text=line.strip()[:LONGEST], rank=rank, node=node)


def _first_match(patterns: Sequence[str], line: str) -> re.Match[str] | None:
    return next(filter(None, (re.search(pattern, line) for pattern in patterns)), None)


def _of_enroot(lines: Sequence[str], *, rank: int | None = None) -> Iterator[_Trace]:
    """Yield a trace for each enroot error in ``lines``, which must not contain the program's output."""
    for line in filter(_ENROOT_ERROR.match, lines):
        yield _Trace(cause=cause("container"), text=line.strip()[:LONGEST], rank=rank)


def _in_errors(log: RankLog, run: RunDir) -> Iterator[_Trace]:
    """Yield a trace for the last exception in a log, if there is any. Its cause is the first row that matches this
    exception or an exception from which it was raised; if no row matches, the cause is ``exception``."""
    folders = {str(run.path), str(run.path.resolve()), str(run.checkpoints.resolve())}
    for row in CAUSES:
        for text in log.exceptions[:1] if row.last_only else log.exceptions:
            if row.in_error(text) and (not row.in_run or any(folder in text for folder in folders)):
                last = log.exceptions[0]
                shown = text if text == last else f"{last} (from {text})"
                yield _Trace(cause=row, text=shown[:LONGEST], rank=_odd_rank(shown, log.rank))
                return
    if log.exceptions:
        text = log.exceptions[0]
        yield _Trace(cause=cause("exception"), text=text, rank=_odd_rank(text, log.rank))


def _odd_rank(text: str, rank: int) -> int:
    """The rank that an error is about. If one rank's calls differ, all ranks raise the same error, which names this
    rank."""
    match = _DIFFERS.search(text)
    return int(match[1]) if match else rank


def _unseen_end(exit_code: int) -> RankEnd:
    """A rank's end in srun's wording, derived from the exit code. Used if srun has reported no rank's end."""
    number = exit_code - 128
    if number <= 0:
        return RankEnd(node="", rank=-1, how=f"Exited with exit code {exit_code}")
    how = {int(sign): word for sign, word in _SIGNALS.items()}.get(number, f"Signal {number}")
    return RankEnd(node="", rank=-1, how=how)


def _in_ends(ends: Sequence[RankEnd], others: Sequence[_Trace], logs: Sequence[RankLog]) -> Iterator[_Trace]:
    explained = {trace.rank for trace in others if trace.rank is not None}
    for end in ends:
        row = next((row for row in CAUSES if any(re.match(one, end.how) for one in row.ends)), cause("exit"))
        if row.name in ("exit", "crashed") and (end.rank in explained or _only_follows(end, others)):
            continue
        yield _Trace(
            cause=row,
            text=_end_text(end, logs)[:LONGEST],
            rank=end.rank if end.rank >= 0 else None,
            node=end.node or None,
        )


def _only_follows(end: RankEnd, others: Sequence[_Trace]) -> bool:
    """Whether this end is only a consequence of a failure that a log shows."""
    if end.how.startswith("Aborted"):  # NCCL's watchdog ends a rank in this way
        return any(trace.cause.name == "nccl_timeout" for trace in others)
    return end.rank < 0 and bool(others) and end.how == "Exited with exit code 1"


def _end_text(end: RankEnd, logs: Sequence[RankLog]) -> str:
    """How a rank ended, as text. If the rank exited by itself, the text includes the last line of its log (of rank 0's
    log if the rank is unknown)."""
    code = end.how.removeprefix("Exited with exit code ")
    if code == end.how:
        return end.how
    output = next((log.lines for log in logs if log.rank == max(end.rank, 0)), [])
    line = next((line.strip() for line in reversed(output) if line.strip() and "CANCELLED AT" not in line), "")
    return f"the program exited with code {code}" + (f": {line}" if line else "")


def _rank_at_fault(first: _Trace) -> int | None:
    """The rank of ``first``, unless the trace only shows that another rank is gone."""
    about_itself = not first.cause.elsewhere and first.cause.name not in _CONSEQUENCES
    return first.rank if about_itself or first.at_fault or _DIFFERS.search(first.text) else None


def _sentence(trace: _Trace, nodes: Sequence[str]) -> str:
    if trace.rank is None or trace.cause.name == "hang":
        return trace.text  # the text about a hang names the rank already
    node = f" on {trace.node}" if trace.node and len(nodes) > 1 else ""
    return f"rank {trace.rank}{node}: {trace.text}"


def _blamed(first: _Trace, traces: Sequence[_Trace], where: dict[int, str], nodes: Sequence[str]) -> list[str]:
    """The nodes of all ranks that show this cause, if the cause may be a node's fault. Empty if there are several nodes
    and all of them show the cause: then no single node is at fault."""
    if first.cause.follows != "exclude" and first.cause.name != "hang":
        return []
    found = [
        trace.node or (where.get(trace.rank) if trace.rank is not None and not first.cause.elsewhere else None)
        for trace in traces
        if trace.cause is first.cause
    ]
    blamed = sorted({node for node in found if node})
    return [] if len(nodes) > 1 and set(blamed) >= set(nodes) else blamed
