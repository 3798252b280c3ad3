"""Routes that list and read the spec files below the directory in which the service was started, for the form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from hpcaccel.errors import RunNotFound
from hpcaccel.service.answers import ERRORS
from hpcaccel.service.service_settings import ServiceSettings

__all__ = ["spec_file_routes"]

DEPTH = 3
MOST = 200
LARGEST = 200_000
_LEFT_OUT = frozenset({"node_modules", "site-packages", "runs", "venv"})


class SpecFile(BaseModel):
    """A spec file. Its relative paths refer to ``directory``."""

    name: str
    """The path below the directory in which the service was started."""
    directory: str
    yaml: str


def spec_file_routes(settings: ServiceSettings) -> APIRouter:
    """The routes ``/spec-files`` and ``/spec-file``."""
    routes = APIRouter(tags=["submit"], responses=ERRORS)

    @routes.get("/spec-files")
    def spec_files() -> list[str]:
        """List YAML files with a program to run, as paths below the service's directory; at most 200."""
        return sorted(path.relative_to(settings.directory).as_posix() for path in _files(settings.directory))

    @routes.get("/spec-file")
    def spec_file(name: Annotated[str, Query(max_length=500)]) -> SpecFile:
        """The text of one of these files."""
        for path in _files(settings.directory):
            if path.relative_to(settings.directory).as_posix() == name:
                return SpecFile(name=name, directory=str(path.parent), yaml=path.read_text(encoding="utf-8"))
        raise RunNotFound(f"there is no spec file {name!r} below {settings.directory}")

    return routes


def _files(root: Path) -> Iterator[Path]:
    count = 0
    for folder, names, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        names[:] = sorted(name for name in names if depth < DEPTH and name[0] != "." and name not in _LEFT_OUT)
        for name in sorted(files):
            path = Path(folder, name)
            if count < MOST and name.endswith((".yaml", ".yml")) and _is_spec(path):
                count += 1
                yield path


def _is_spec(path: Path) -> bool:
    """Whether the file has a key of a spec's program. It may extend another file that has it."""
    try:
        if path.stat().st_size > LARGEST or not path.is_file():
            return False
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return any(line.startswith(("entrypoint:", "extends:")) for line in lines)
