"""``ResultsFile``: a result for every item, once and in order, however often the program is stopped or killed.

    state = hpcaccel.PartialState()
    results = hpcaccel.ResultsFile("answers.jsonl", prompts, batch_size=16)
    with state.split_between_processes(results.missing) as mine:
        for batch in results.until_stopped(mine):
            results.write(batch, generate(batch.items))
    results.merge()

The unit of work is a batch of successive items. A batch has the same items in every attempt and on any number of ranks,
so that results that depend on the batch (padding, a seed for each batch) are the same as without an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import fsync_directory
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.batch_inference.result_parts import Plan, ResultParts, append_results
from hpcaccel.runtime.training.independent_gate import independent_gate

__all__ = ["ItemBatch", "ResultsFile"]

SHOWN = 10
"""Maximum number of missing batches in a message."""


@dataclass(frozen=True)
class ItemBatch:
    """Successive items that are computed together."""

    number: int
    """The batch's number, from 0: the same in every attempt, for example for a seed."""
    first: int
    """Number of its first item."""
    items: Sequence[Any]

    def __len__(self) -> int:
        return len(self.items)


class ResultsFile:
    """Results of many items, computed by all ranks, in a JSON-lines file. Create it on every rank, before the loop and
    after ``PartialState(...)``, if that has arguments. If an earlier attempt was stopped or killed, only the batches
    that it left undone are ``missing``, and the number of ranks may differ.

    Args:
        path: the file, on a file system that all nodes share. A line is
            ``{"index": 0, "item": …, "result": …}``. It is written when all results exist; until then they are in the
            folder ``<path>.parts``.
        items: list of texts or other values that can be written as JSON; the same on all ranks.
        batch_size: number of items that are computed together.
        settings: what else the results depend on, such as the model's name. An attempt with other settings is an error,
            so that one file has no results of two models.

    Raises:
        RuntimeMisuse: the file has results for other items or settings; the ranks have different items, batch sizes or
            settings; an item cannot be written as JSON; the folder is not shared by all nodes; this process has an
            Accelerator.
        OSError: a file cannot be read or written.

    Example::

        results = hpcaccel.ResultsFile("answers.jsonl", prompts, batch_size=8)
        with hpcaccel.PartialState().split_between_processes(results.missing) as mine:
            for batch in results.until_stopped(mine):
                results.write(batch, [len(prompt) for prompt in batch.items])
        results.merge()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        items: Sequence[Any],
        *,
        batch_size: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(items, str | bytes) or not isinstance(items, Sequence):
            raise RuntimeMisuse(f"ResultsFile: items is {items!r:.100}. Pass a list, such as list(dataset['prompt'])")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise RuntimeMisuse(f"ResultsFile: batch_size={batch_size!r} must be an integer of at least 1")
        self.path = Path(path).absolute()
        self.items = items
        self._plan = plan = Plan.of(items, batch_size=batch_size, settings=settings or {})
        self._parts = ResultParts(self.path, plan)
        self._gate = gate = independent_gate("ResultsFile")
        self._stopped = False
        exchange = gate.group.exchange
        if exchange is not None:  # before rank 0 writes its plan to the manifest
            _refuse_differences(exchange.objects_from_all(plan, what="ResultsFile"))
        opened: Any = self._open() if gate.group.is_main else None
        found = gate.group.from_main(opened, "ResultsFile")
        if isinstance(found, str):
            raise RuntimeMisuse(found)
        self._start, missing = found
        self.is_complete = missing is None
        """Whether an earlier attempt has written the whole file, so that there is nothing to do."""
        if not self._parts.manifest.exists():
            raise RuntimeMisuse(
                f"rank {gate.group.rank} does not find {self._parts.manifest}, which rank 0 has written: {path} must "
                "be on a file system that all nodes share"
            )
        self._part = self._parts.part(self._start, gate.group.rank)
        self.missing = [self._batch(number) for number in missing or ()]
        """The batches without results, for ``split_between_processes``; the same on all ranks."""
        done = plan.batches - len(self.missing)
        gate.begin_work(done=done, total=plan.batches, checkpoint=str(self._parts.folder) if done else None)

    def until_stopped(self, batches: Iterable[ItemBatch]) -> Iterator[ItemBatch]:
        """This rank's batches, until a stop is requested. The loop ends on each rank after its current batch.

        Args:
            batches: this rank's part of ``missing``.

        Raises:
            RankFailed: the connection to rank 0 was lost.
        """
        for batch in batches:
            if self._gate.must_stop():
                self._stopped = True
                return
            yield batch

    def write(self, batch: ItemBatch, results: Sequence[Any]) -> None:
        """Write the results of a batch. They are on the disk when this returns. After a kill before that, the batch
        is either complete or done again.

        Args:
            results: one for each item, in the items' order: texts, numbers, lists or dicts.

        Raises:
            RuntimeMisuse: there are more or fewer results than items; a result cannot be written as JSON.
            OSError: the file cannot be written, for example because the disk is full.
        """
        if isinstance(results, str | bytes) or len(results) != len(batch):
            what = f"the text {results!r:.60}" if isinstance(results, str | bytes) else f"{len(results)} results"
            raise RuntimeMisuse(
                f"write: batch {batch.number} has {len(batch)} items, but got {what}. Pass a list with one per item"
            )
        is_new = not self._part.exists()
        append_results(self._part, batch.number, results, first=batch.first)
        if is_new:
            fsync_directory(self._part.parent)
        self._gate.count()

    def merge(self) -> Path:
        """Wait for all ranks, then write the file. Call this on every rank, after the loop. Collective.

        Returns:
            The file's path.

        Raises:
            SystemExit: a stop was requested before all results were written. The exit code is 85 if the run
                continues later, and 0 if it is to end for good.
            RuntimeMisuse: batches have no results, although no stop was requested.
            RankFailed: another rank has failed. Results that were written are kept.
            OSError: the file cannot be written. The results are kept, and the next start writes it.
        """
        gate = self._gate
        stopped = gate.meet(stopped=self._stopped)
        gate.phase = "finishing"
        missing = self._merge() if gate.group.is_main and not self.is_complete else []
        gate.meet()  # writing the file may take longer than the other ranks would wait in the next call
        missing = gate.group.from_main(missing, "merge")
        if missing and stopped:
            gate.stop_now(done=self._plan.batches - len(missing), checkpoint=str(self._parts.folder))
        if missing:
            shown = ", ".join(map(str, missing[:SHOWN])) + (" …" if len(missing) > SHOWN else "")
            raise RuntimeMisuse(
                f"{len(missing)} of {self._plan.batches} batches have no results: {shown}. Call write() for each batch "
                f"of the loop, on every rank, and keep {self._parts.folder} on a file system that all nodes share"
            )
        self.is_complete = True
        gate.finish(done=self._plan.batches)
        return self.path

    def _open(self) -> tuple[str, list[int] | None] | str:
        """The result of ``ResultParts.open``, or the message of its error, which all ranks raise."""
        try:
            return self._parts.open()
        except RuntimeMisuse as error:
            return str(error)

    def _merge(self) -> list[int]:
        """Numbers of the batches without results; if there are none, the file has been written."""
        ranks = range(self._gate.group.world_size)
        return self._parts.merge(self.items, [self._parts.part(self._start, rank) for rank in ranks])

    def _batch(self, number: int) -> ItemBatch:
        span = self._plan.span(number)
        return ItemBatch(number, span.start, self.items[span.start : span.stop])


def _refuse_differences(plans: Sequence[Plan]) -> None:
    """Refuse ranks with different plans.

    Args:
        plans: the plan of each rank, in rank order; the same list on all ranks, so that all raise the same error.

    Raises:
        RuntimeMisuse: a rank has another plan than rank 0.
    """
    first = plans[0]
    for rank, plan in enumerate(plans):
        if (plan.items, plan.digest) != (first.items, first.digest):
            raise RuntimeMisuse(
                f"ResultsFile: rank {rank} has different items than rank 0 ({plan.items} items; rank 0 has "
                f"{first.items}). Read them from the same file, in the same order, on all ranks"
            )
        for name, value, firsts in (
            ("batch_size", plan.batch_size, first.batch_size),
            ("settings", plan.settings, first.settings),
        ):
            if value != firsts:
                raise RuntimeMisuse(
                    f"ResultsFile: rank {rank} has {name}={value!r}, but rank 0 has {name}={firsts!r}. Pass the same "
                    "value on all ranks"
                )
