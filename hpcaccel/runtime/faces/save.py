"""Saving and loading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcaccel.runtime.loop import Resumed
from hpcaccel.runtime.session import Session

__all__ = ["SaveFace"]


class SaveFace:
    _session: Session

    def _begin_saving(self, project_config: Any, project_dir: Any) -> None:
        """What the constructor was told."""
        self._project_config = project_config
        self.project_dir = None if project_dir is None else str(project_dir)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these too: anything with ``state_dict`` and ``load_state_dict``, the same on all ranks."""
        self._session.register(objects)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None) -> str:
        """Save everything prepared and registered now; where to, comes back."""
        loop = self._session.loop
        return str(loop.save("save_state", None if output_dir is None else Path(output_dir).absolute()))

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> Resumed:
        """Restore a checkpoint, or the newest one in a directory; without a path the run's newest."""
        return self._session.loop.load_newest(None if input_dir is None else Path(input_dir).absolute())
