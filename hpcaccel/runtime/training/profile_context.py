"""The context of ``Accelerator.profile``: torch's profiler, and a trace of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup
    from hpcaccel.runtime.handlers import ProfileKwargs

__all__ = ["ProfileContext", "build_profiler"]


class ProfileContext:
    """The context of ``Accelerator.profile``. With ``output_trace_dir`` each rank writes its trace there, as
    ``profile_<rank>.json``, and waits for all ranks, unless the block raises."""

    def __init__(self, handler: ProfileKwargs, group: RankGroup) -> None:
        self._directory = None if handler.output_trace_dir is None else Path(handler.output_trace_dir)
        self._group = group
        self._profiler = build_profiler(handler)

    def __enter__(self) -> torch.profiler.profile:
        self._profiler.__enter__()  # type: ignore[no-untyped-call]
        return self._profiler

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._profiler.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self._directory is None or kind is not None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._directory / f"profile_{self._group.rank}.json"))
        self._group.barrier()


def build_profiler(handler: ProfileKwargs) -> torch.profiler.profile:
    """torch's profiler with the settings of ``handler``.

    Raises:
        RuntimeMisuse: an activity is unknown.
    """
    from hpcaccel.runtime.distributed.device_backend import profiler_activity

    schedule = None if handler.schedule_option is None else torch.profiler.schedule(**handler.schedule_option)
    return torch.profiler.profile(
        activities=None if handler.activities is None else [profiler_activity(name) for name in handler.activities],
        schedule=schedule,
        on_trace_ready=handler.on_trace_ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    )
