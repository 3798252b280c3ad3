"""``add_stop_gate``: agreed stops and live metrics for scripts that keep ``accelerate.Accelerator``.

    from hpcaccel.integrations.accelerate import add_stop_gate, newest_checkpoint

    add_stop_gate(accelerator, args.output_dir)                      # after prepare()
    if (path := newest_checkpoint(args.output_dir)) is not None:     # unless the script resumes by itself
        accelerator.load_state(path)

When the script takes the next batch from a prepared DataLoader, the previous optimizer step is over, including
scheduler and ``zero_grad``. This step is then reported to the process's stop gate (``hpcaccel.stop_gate``).
Once all ranks have agreed on a step to stop at, ``accelerator.save_state`` saves it, and the program exits.

``save_state`` writes no file last on all ranks. So here it waits for all ranks and then writes ``hpcaccel_step.json``
with the number of optimizer steps; a directory that has this file is complete. ``load_state`` reads the number.

Source: accelerate 1.15, data_loader.py (each of three classes has an ``__iter__``), accelerator.py.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate import data_loader as loaders
from torch.optim import Optimizer

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.integrations import StepsBetweenBatches
from hpcaccel.runtime.rank_logger import TRAINING_LOG

__all__ = ["add_stop_gate", "newest_checkpoint"]

logger = logging.getLogger(TRAINING_LOG)

STEP_FILE = "hpcaccel_step.json"

_hook: _StepHook | None = None


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Path of the directory in ``output_dir`` that ``save_state`` completed last, after ``add_stop_gate``; None without
    one."""
    marks = [path for path in Path(output_dir).glob(f"*/{STEP_FILE}") if read_json(path) is not None]
    return str(max(marks, key=lambda path: path.stat().st_mtime).parent) if marks else None


def add_stop_gate(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str],
    *,
    name: str = "checkpoint-{step}",
    total_steps: int | None = None,
    save: Callable[[str], Any] | None = None,
) -> None:
    """Make a script save and stop at the same step on all ranks. Call it once on every rank, before the training loop.

    The steps of every optimizer count, but at most one between two batches. ``accelerator.log`` records
    numbers as metrics of the run, too. If the training is to end for good (``hpcaccel stop --finish``), the training
    loaders return no more batches, so that the code behind the loop runs; a pruned trial exits. Outside of a run only
    the step file is written.

    Args:
        output_dir: where to save at a stop; the same on all ranks and nodes.
        name: name of the directory; ``{step}`` is the number of optimizer steps.
        total_steps: number of optimizer steps of the whole training, for the remaining time in ``hpcaccel status``.
        save: called on all ranks with the directory's path, instead of ``accelerator.save_state``.

    Raises:
        RuntimeMisuse: this process has an ``hpcaccel.Accelerator`` or another accelerator with a gate.
    """
    global _hook
    if _hook is not None:
        raise RuntimeMisuse("add_stop_gate(): this process already has a stop gate. Call it once, for one Accelerator")
    _hook = _StepHook(accelerator, output_dir, name, total_steps, save)


class _StepHook(StepsBetweenBatches):
    """Counts the optimizer steps of one Accelerator. Replaces its ``save_state``, ``load_state`` and ``log``."""

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: str | os.PathLike[str],
        name: str,
        total_steps: int | None,
        save: Callable[[str], Any] | None,
    ) -> None:
        super().__init__(output_dir, name, total_steps)
        self._accelerator = accelerator
        self._save_state, self._load_state, self._log = accelerator.save_state, accelerator.load_state, accelerator.log
        self._save = save or self.save_state
        self._hooked: set[int] = set()
        accelerator.__dict__.update(save_state=self.save_state, load_state=self.load_state, log=self.log)

    def save(self, path: str) -> None:
        self._save(path)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.gate is not None:
            self.gate.phase = "saving"
        path = self._save_state(output_dir, *args, **kwargs)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process and path is not None:
            write_json(Path(path) / STEP_FILE, {"step": self.done})
        if self.gate is not None:
            self.gate.phase = "training"
        return path

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = self._load_state(input_dir, *args, **kwargs)
        step = None if input_dir is None else (read_json(Path(input_dir) / STEP_FILE) or {}).get("step")
        if step is None:
            logger.warning("%s has no %s: its optimizer steps count from 0", input_dir, STEP_FILE)
        else:
            self.loaded(int(step), str(input_dir))
        return found

    def log(self, values: dict[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> Any:
        self.report(values, step)
        return self._log(values, step, *args, **kwargs)

    def watch(self, batches: Iterator[Any], dataset: Any) -> Iterator[Any]:
        self._hook_optimizers()
        yield from super().watch(batches, dataset)

    def _hook_optimizers(self) -> None:
        for prepared in self._accelerator._optimizers:
            optimizer = prepared.optimizer
            if id(optimizer) in self._hooked:
                continue
            if not isinstance(optimizer, Optimizer):
                raise RuntimeMisuse(
                    f"add_stop_gate(): the steps of {type(optimizer).__qualname__} cannot be counted. Call "
                    "hpcaccel.stop_gate() and gate.step() in the training loop instead"
                )
            self._hooked.add(id(optimizer))
            optimizer.register_step_post_hook(self.note_step)


def _watched(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(iterate)
    def watched(self: Any) -> Iterator[Any]:
        return iterate(self) if _hook is None else _hook.watch(iterate(self), self.dataset)

    return watched


for _class in (loaders.DataLoaderShard, loaders.DataLoaderDispatcher, loaders.SkipDataLoader):
    setattr(_class, "__iter__", _watched(_class.__iter__))  # noqa: B010
