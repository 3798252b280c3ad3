"""A script's numbered checkpoints: ``checkpoints/checkpoint_<i>`` in its project directory."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import is_pinned
from hpcaccel.errors import RuntimeMisuse

__all__ = ["NumberedCheckpoints", "newest_first"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint_(\d+)")


class NumberedCheckpoints:
    """The numbered checkpoints in one directory.

    Args:
        configuration: the script's ``ProjectConfiguration``; its ``iteration`` is the number of the next checkpoint.
    """

    def __init__(self, configuration: Any, directory: Path) -> None:
        self._configuration = configuration
        self._directory = directory

    @property
    def next(self) -> Path:
        """The directory of the next checkpoint."""
        return self._directory / f"checkpoint_{self._configuration.iteration}"

    def refuse_existing(self, path: Path) -> None:
        """Check that the checkpoint ``path`` does not exist.

        Raises:
            RuntimeMisuse: ``path`` exists.
        """
        if path.exists():
            raise RuntimeMisuse(
                f"{path} already exists. Set the next free number with "
                f"accelerator.project_configuration.iteration = {self._highest() + 1}, or call load_state() without a "
                "path first: it loads the newest checkpoint and sets the number"
            )

    def saved(self, path: Path) -> None:
        """After ``path`` was saved, set the number of the next checkpoint."""
        self._configuration.iteration = _number(path) + 1

    def loaded(self) -> None:
        """After a checkpoint was loaded, set the number of the next checkpoint to a number that is free."""
        self._configuration.iteration = max(self._configuration.iteration, self._highest() + 1)

    def prune(self, newest: Path) -> None:
        """Delete the oldest checkpoints beyond ``total_limit``, except ``newest`` and pinned ones. Log errors."""
        limit = self._configuration.total_limit
        if limit is None:
            return
        for path in [path for path in reversed(self.all()) if path != newest][max(limit - 1, 0) :]:
            if any(is_pinned(checkpoint.path) for checkpoint in checkpoint_files.committed(path)):
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("cannot delete the old checkpoint %s: %s", path, error)

    def all(self) -> list[Path]:
        """All checkpoints by number, oldest first."""
        if not self._directory.is_dir():
            return []
        found = [path for path in self._directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_number)

    def _highest(self) -> int:
        found = self.all()
        return _number(found[-1]) if found else -1


def newest_first(directories: list[Path]) -> list[Path]:
    """The committed checkpoints in these directories, highest step first. If steps are equal, the checkpoint in the
    later directory comes first."""
    found = [
        (item.step, index, item.path)
        for index, place in enumerate(directories)
        for item in checkpoint_files.committed(place)
    ]
    return [path for _, _, path in sorted(found, reverse=True)]


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])
