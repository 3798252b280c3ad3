"""Data that is copied to the nodes' own disks before the ranks start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, ClassVar

from pydantic import Field

from hpcaccel.spec.fields import Conflict, Flag, PathText, Section, Word

__all__ = ["Stage"]


class Stage(Section):
    """Files and folders that each node gets a copy of. Ranks find them in $HPCACCEL_STAGE_DIR under their own names."""

    moved: ClassVar[dict[str, str]] = {"source": "is written sources: [path, …]"}

    sources: list[PathText] = Field(
        min_length=1, description="Files and folders to copy to each node.", examples=[["/datasets/imagenet.tar"]]
    )
    directory: Word | None = Field(
        default=None,
        description="Where to, on every node: an absolute path, which may begin with a variable of the job's such as "
        "$SLURM_TMPDIR. Default: $SLURM_TMPDIR, otherwise $TMPDIR, otherwise /tmp. A folder of the job's own is made "
        "in there.",
        examples=["$SLURM_TMPDIR", "/local/scratch"],
    )
    keep: Flag = Field(
        default=False,
        description="Leave the copy there at the end, for the next job with the same sources on that node.",
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        sources = values.get("sources")
        names: dict[str, str] = {}
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            name = PurePath(str(source)).name
            if not name:
                found.append(Conflict(f"sources.{index}", f"{str(source)!r} has no name of its own to be copied under"))
            elif name in names:
                also = f"{str(source)!r} and {names[name]!r} would both be called {name!r} in the stage directory"
                found.append(Conflict(f"sources.{index}", f"cannot be staged: {also}"))
            names.setdefault(name, str(source))
        directory = values.get("directory")
        if directory is not None and not isinstance(directory, Mapping | list):
            text = str(getattr(directory, "text", directory))
            if not text.startswith(("/", "$")):
                found.append(Conflict("directory", f"{text!r} must be an absolute path, or begin with a variable"))
        return found
