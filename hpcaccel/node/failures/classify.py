"""Why an attempt failed: the first cause in meaning among all traces that it left, and the nodes it speaks against.

Not the first in time: the rank whose peer is gone often fails before the one that has gone says why.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.node.failures.causes import CAUSES, Cause, cause
from hpcaccel.node.failures.classify_logs import LONGEST, RankEnd, RankLog, rank_ends, read_rank_logs, read_slurm_lines
from hpcaccel.slurm.states import JobState

__all__ = ["Failure", "classify"]

_DIFFERS = re.compile(r", and rank (\d+) differs:")
"""In what the runtime says of ranks that do not do the same."""
_ENROOT_OR_SLURM = re.compile(r"^(?:\[(?:INFO|WARN|ERROR)\] |srun: |slurmstepd|\[\S*\d\d:\d\d:\d\d\S*\] error: |\s*$)")
_ENROOT_ERROR = re.compile(
    r"^\[ERROR\] (?:Command not found|No such file or directory|File already exists|Invalid image)"
)
_SIGNALS = {
    signal.SIGKILL: "Killed",
    signal.SIGSEGV: "Segmentation fault",
    signal.SIGBUS: "Bus error",
    signal.SIGABRT: "Aborted",
    signal.SIGILL: "Illegal instruction",
    signal.SIGFPE: "Floating point exception",
    signal.SIGTERM: "Terminated",
}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong, and what the table says about it."""

    cause: Cause
    detail: str
    nodes: list[str] = field(default_factory=list)
    """Nodes that the evidence speaks against, where the cause is one of a node's own."""


@dataclass(frozen=True, kw_only=True)
class _Trace:
    cause: Cause
    text: str
    rank: int | None = None
    node: str | None = None

    @property
    def order(self) -> tuple[int, int]:
        return CAUSES.index(self.cause), -1 if self.rank is None else self.rank


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
    """The cause of a failure.

    Args:
        exit_code: of all ranks together; srun's own says little once it has ended the others.
        nodes: of the attempt, in the order of the ranks.
        step_state: how Slurm's accounting calls the end of the ranks' step, where somebody has asked.
        in_container: the ranks have one.
    """
    slurm_lines = read_slurm_lines(run, attempt)
    ends = [end for end in rank_ends(slurm_lines) if end.how != "Terminated"] or list(rank_ends(slurm_lines))
    where = dict(enumerate(node for node in nodes for _ in range(ranks_per_node)))
    where |= {end.rank: end.node for end in ends}
    # A rank that has failed gives no sign of life either, as long as srun waits for the others.
    failed = {end.rank for end in ends if end.how.startswith("Exited")}
    traces = [*(trace for trace in _hang(run, attempt) if trace.rank not in failed), *_in_lines(slurm_lines)]
    killed = {end.rank for end in ends if end.how == "Killed"}
    logs = read_rank_logs(run, attempt)
    for log in logs:
        # What has been killed has not ended by an exception, whatever it had printed before.
        traces += [] if log.rank in killed else _in_errors(log, run)
        if in_container and all(_ENROOT_OR_SLURM.match(line) for line in log.lines):
            traces += _of_enroot(log.lines, rank=log.rank)
        # The indented lines of a traceback are the program's own text.
        traces += _in_lines([line for line in log.lines if not line.startswith("    ")], rank=log.rank)
    if in_container and not any(log.lines for log in logs):
        traces += _of_enroot(slurm_lines)  # where srun does not write to the ranks' logs
    if step_state is JobState.OUT_OF_MEMORY:
        traces.append(_Trace(cause=cause("host_out_of_memory"), text="Slurm ended the ranks: OUT_OF_MEMORY"))
    traces += _in_ends(ends or [_unseen_end(exit_code)], traces, logs)
    first = _named(min(traces, key=lambda trace: trace.order), logs)
    if first.node is None and first.rank is not None and not first.cause.elsewhere:
        first = _Trace(cause=first.cause, text=first.text, rank=first.rank, node=where.get(first.rank))
    return Failure(cause=first.cause, detail=_sentence(first, nodes), nodes=_blamed(first, traces, where, nodes))


def _named(first: _Trace, logs: Sequence[RankLog]) -> _Trace:
    """Where ranks have lost another one: that one, if it is the only kind of rank that has said nothing."""
    mute = [log.rank for log in logs if not log.exceptions]
    if first.cause.name not in ("gloo_timeout", "nccl_timeout") or not 0 < 2 * len(mute) < len(logs):
        return first
    also = f", as {len(mute) - 1} more ranks did" if len(mute) > 1 else ""
    text = f"ended or stood still without a word{also}; rank {first.rank}: {first.text}"
    return _Trace(cause=first.cause, text=text[:LONGEST], rank=mute[0])


def _hang(run: RunDir, attempt: int) -> Iterator[_Trace]:
    value: dict[str, Any] | None = read_json(run.attempt(attempt) / "hang.json")
    if value is not None:
        rank, node = value.get("culprit_rank"), value.get("node")
        text = str(value.get("why") or "no rank took a step any more")
        yield _Trace(cause=cause("hang"), text=text[:LONGEST], rank=rank, node=node)


def _in_lines(lines: Sequence[str], *, rank: int | None = None) -> Iterator[_Trace]:
    for row in CAUSES:
        found = [(line, match) for line in lines if (match := row.in_line(line))] if row.lines else []
        if found:
            line, match = next((one for one in found if one[1].groupdict().get("node")), found[0])
            node = match.groupdict().get("node")
            yield _Trace(cause=row, text=line.strip()[:LONGEST], rank=rank, node=node)


def _of_enroot(lines: Sequence[str], *, rank: int | None = None) -> Iterator[_Trace]:
    """enroot's errors, among lines none of which is the program's."""
    for line in filter(_ENROOT_ERROR.match, lines):
        yield _Trace(cause=cause("container"), text=line.strip()[:LONGEST], rank=rank)


def _in_errors(log: RankLog, run: RunDir) -> Iterator[_Trace]:
    """The row that fits the last exception or one of those behind it, and the exception's own text."""
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
    """The rank that an error is about: all ranks raise the same one where they find that one of them differs."""
    match = _DIFFERS.search(text)
    return int(match[1]) if match else rank


def _unseen_end(exit_code: int) -> RankEnd:
    """The end of a rank that nobody has described: what its exit code says, in srun's words."""
    number = exit_code - 128
    if number <= 0:
        return RankEnd(node="", rank=-1, how=f"Exited with exit code {exit_code}")
    how = {int(sign): word for sign, word in _SIGNALS.items()}.get(number, f"Signal {number}")
    return RankEnd(node="", rank=-1, how=how)


def _in_ends(ends: Sequence[RankEnd], others: Sequence[_Trace], logs: Sequence[RankLog]) -> Iterator[_Trace]:
    speaks = {trace.rank for trace in others if trace.rank is not None}
    for end in ends:
        row = next((row for row in CAUSES if row.in_end(end.how)), cause("exit"))
        if row.name in ("exit", "crashed") and (end.rank in speaks or _only_follows(end, others)):
            continue
        yield _Trace(
            cause=row,
            text=_last_words(end, logs)[:LONGEST],
            rank=end.rank if end.rank >= 0 else None,
            node=end.node or None,
        )


def _only_follows(end: RankEnd, others: Sequence[_Trace]) -> bool:
    """Whether this end says no more than what a log has said already."""
    if end.how.startswith("Aborted"):  # so NCCL's watchdog ends a rank
        return any(trace.cause.name == "nccl_timeout" for trace in others)
    return end.rank < 0 and bool(others) and end.how == "Exited with exit code 1"


def _last_words(end: RankEnd, logs: Sequence[RankLog]) -> str:
    """How a rank ended, with the last line of its log where it ended by itself; rank 0's where nobody knows which."""
    code = end.how.removeprefix("Exited with exit code ")
    if code == end.how:
        return end.how
    said = next((log.lines for log in logs if log.rank == max(end.rank, 0)), [])
    line = next((line.strip() for line in reversed(said) if line.strip() and "CANCELLED AT" not in line), "")
    return f"the program ended with code {code}" + (f": {line}" if line else "")


def _sentence(trace: _Trace, nodes: Sequence[str]) -> str:
    if trace.rank is None or trace.cause.name == "hang":
        return trace.text  # whoever found a hang has said which rank
    node = f" on {trace.node}" if trace.node and len(nodes) > 1 else ""
    return f"rank {trace.rank}{node}: {trace.text}"


def _blamed(first: _Trace, traces: Sequence[_Trace], where: dict[int, str], nodes: Sequence[str]) -> list[str]:
    """The nodes of all ranks that show this cause; none where all nodes do, since then it is not theirs."""
    if first.cause.follows != "exclude" and first.cause.name != "hang":
        return []
    found = [
        trace.node or (where.get(trace.rank) if trace.rank is not None and not first.cause.elsewhere else None)
        for trace in traces
        if trace.cause is first.cause
    ]
    blamed = sorted({node for node in found if node})
    return [] if len(nodes) > 1 and set(blamed) >= set(nodes) else blamed
