"""Where this process stands among the ranks, and what only some of them do."""

from __future__ import annotations

from typing import Any

import torch

from hpcaccel.runtime.session import Session

__all__ = ["PlaceFace"]


class PlaceFace:
    _session: Session

    @property
    def device(self) -> torch.device:
        return self._session.group.device

    @property
    def num_processes(self) -> int:
        return self._session.group.world_size

    @property
    def process_index(self) -> int:
        return self._session.group.rank

    @property
    def local_process_index(self) -> int:
        """This process's number on its node."""
        return self._session.group.env.local_rank

    @property
    def is_main_process(self) -> bool:
        return self._session.group.is_main

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` once a node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        self._session.group.barrier()
