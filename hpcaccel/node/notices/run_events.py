"""The events of a run as notices, derived from its ledger, ``hang.json`` and the samples of its GPUs.

The same files always give the same notices with the same keys. A ledger line gives at most one notice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.formatting import counted
from hpcaccel.core.notice_message import Notice
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.records import AttemptEnd, AttemptStart, Hang, from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.core.samples import IdleGpu, idle_now

__all__ = ["RunEvents"]

_FAILED = ("failed", "lost")
_WHAT_FOLLOWS = {
    "restart": "its ranks are started again in the same job",
    "requeue": "the job is requeued and continues",
    "pause": "it continues when it is resumed: hpcaccel resume {run}",
    "end": "",
}


class RunEvents:
    """Notices about ``run``.

    Args:
        events: the events that the user wants.
    """

    def __init__(self, run: RunDir, events: Collection[str]) -> None:
        self._run, self._events = run, frozenset(events)
        spec = (read_json(run.spec) or {}).get("spec") or {}
        self._name = str(spec.get("name") or run.path.parent.name)
        self._read: tuple[int, int] | None = None
        self._found: list[Notice] = []
        self._last = RunLedger()

    def notices(self) -> list[Notice]:
        """The notices of all starts, ends and hangs so far, oldest first.

        Raises:
            OSError: a file cannot be read.
        """
        try:
            found = self._run.ledger.stat()
        except FileNotFoundError:
            return []
        if self._read != (found.st_ino, found.st_size):
            self._last = RunLedger.read(self._run)
            self._read = found.st_ino, found.st_size
            self._found = sorted(self._from(self._last), key=lambda notice: notice.time)
        newest = self._last.starts[-1] if self._last.starts else None
        return [*self._found, *self._hang(newest)]

    def _from(self, ledger: RunLedger) -> Iterator[Notice]:
        restarted = {end.attempt + 1 for end in ledger.ends if end.decision == "restart"}
        for start in ledger.starts:
            if "start" in self._events and start.attempt not in restarted:
                yield self._start(start)
        for end in ledger.ends:
            if end.error_class == "hang":
                yield from self._hang(ledger.start_of(end.attempt))
            yield from self._ends(end, ledger.start_of(end.attempt))

    def _start(self, line: AttemptStart) -> Notice:
        where = f" on {', '.join(line.nodes)}" if 0 < len(line.nodes) <= 4 else f" on {len(line.nodes)} nodes"
        since = "" if line.checkpoint_step is None else f", from step {line.checkpoint_step}"
        word = "started" if line.attempt == 1 else "continues"
        return self._notice(
            "start",
            line.attempt,
            f"{self._name} {word}{where if line.nodes else ''}{since}",
            moment=line.time,
            job=line.job_id,
            step=line.checkpoint_step,
            nodes=list(line.nodes),
        )

    def _ends(self, line: AttemptEnd, start: AttemptStart | None) -> Iterator[Notice]:
        """The notice of an attempt's end; none if the user wants no such event."""
        event = next((one for one in _candidates(line, self._events) if one in self._events), None)
        if event is not None:
            yield self._end(event, line, start)

    def _end(self, event: str, line: AttemptEnd, start: AttemptStart | None) -> Notice:
        word = line.reason.replace("_", " ")
        how = {"completed": "is complete", "failed": f"failed: {line.error_class or 'unknown cause'}"}
        text = f"{self._name} {how.get(line.reason, f'ended: {word}')}"
        if follows := _WHAT_FOLLOWS[line.decision].format(run=self._run.run_id):
            text += f"; {follows}"
        return self._notice(
            event,
            line.attempt,
            text,
            moment=line.time,
            job=line.job_id,
            step=line.last_step if line.last_step is not None else line.checkpoint_step,
            reason=line.reason,
            decision=line.decision,
            detail=line.detail,
            advice=line.advice,
            nodes=list(line.nodes_blamed) or ([] if start is None else list(start.nodes)),
        )

    def _hang(self, start: AttemptStart | None) -> Iterator[Notice]:
        """The hang of an attempt, which is known before the attempt has ended."""
        value = read_json(self._run.hang(start.attempt)) if start is not None and "hang" in self._events else None
        if start is None or value is None:
            return
        hang = from_dict(Hang, value)
        yield self._notice(
            "hang",
            start.attempt,
            f"{self._name} hangs; its ranks are ended",
            moment=hang.time or start.time,
            job=start.job_id,
            reason="hang",
            detail=hang.why,
            nodes=[hang.node] if hang.node else list(start.nodes),
        )

    def idle_gpus(self, known: Mapping[str, Notice]) -> list[Notice]:
        """A notice about GPUs that no ``known`` notice of this attempt names, in a list of at most one.

        Raises:
            OSError: a file cannot be read.
        """
        start = self._last.unfinished() if "idle_gpus" in self._events else None
        if start is None:
            return []
        prefix = f"{start.attempt}.idle_gpus."
        earlier = [one for key, one in known.items() if key.startswith(prefix)]
        named = {uuid for one in earlier for uuid in one.gpus}
        idle = [gpu for gpu in idle_now(self._run, start.attempt) if gpu.uuid not in named]
        if not idle:
            return []
        notice = self._notice(
            "idle_gpus",
            start.attempt,
            f"{self._name} leaves {counted(len(idle), 'GPU')} idle",
            moment=time.time(),
            key=f"{prefix}{len(earlier) + 1}",
            job=start.job_id,
            detail="\n".join(_idle_line(gpu) for gpu in idle),
            advice=f"Request fewer GPUs, or check what their ranks are doing: hpcaccel stacks {self._run.run_id}",
            nodes=sorted({gpu.node for gpu in idle}),
            gpus=[gpu.uuid for gpu in idle],
        )
        return [notice]

    def _notice(self, event: str, attempt: int, text: str, *, moment: float, **values: object) -> Notice:
        common = {"key": f"{attempt}.{event}", "run": self._run.run_id, "name": self._name, "host": node_name()}
        given = {"event": event, "attempt": attempt, "text": text, "time": moment, **common, **values}
        return from_dict(Notice, given)


def _candidates(line: AttemptEnd, events: Collection[str]) -> list[str]:
    """The events that an end line can be, the most specific first: the first one that the user wants is sent."""
    failed = line.reason in _FAILED
    asked = ["stop"] if line.reason in ("stop", "cancelled") else []
    # A hang has a notice of its own, sent when it was found.
    failure = ["failure"] if failed and not (line.error_class == "hang" and "hang" in events) else []
    if line.decision == "end":
        return ["end", *failure, *asked]
    if line.decision == "pause":
        return ["stop", *failure]
    if line.decision == "requeue":
        return [*failure, "requeue", *asked]
    return failure


def _idle_line(gpu: IdleGpu) -> str:
    since = "" if gpu.since_step is None else f", since step {gpu.since_step}"
    return f"{gpu.name or 'GPU'} {gpu.uuid} of node {gpu.node}: idle for {gpu.seconds / 60:.0f} min{since}"
