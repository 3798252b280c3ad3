"""Container images before the queue: whether the image is there, and what its ranks need to see."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcaccel.errors import SpecError
from hpcaccel.slurm.pyxis import unmountable
from hpcaccel.spec.container_fields import IMAGE_FILES, is_image_path
from hpcaccel.submission.rank_side import FOLDER

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["IMAGES", "Image", "container_section", "look_at_image"]

IMAGES = ".images"
"""The folder in ``runs_dir`` that images are imported to."""
ASK_SECONDS = 30.0

_ABSENT = re.compile(
    r"(?:manifest|name) unknown|not found|unauthorized|denied|authentication required|invalid reference|\b40[134]\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Image:
    """What was found out of an image."""

    key: str
    """Its content, or where nobody could say that its name, in letters fit for a file's name."""
    advice: tuple[str, ...] = ()


def look_at_image(spec: JobSpec, runs_dir: Path) -> Image | None:
    """None for a run without a container.

    Raises:
        SpecError: the image is not there, or is of a kind that the chosen runtime cannot start.
    """
    if spec.container is None:
        return None
    image = spec.container.image
    if is_image_path(image):
        _check_file(Path(image), spec.container.runtime)
        return Image("")
    digest, advice = _ask_registry(image)
    key = hashlib.sha256(f"{image.partition('://')[2].partition('@')[0]} {digest}".encode()).hexdigest()[:16]
    if advice and any((runs_dir / IMAGES).glob(f"*-{key}.*")):
        advice = ()  # imported by an earlier run
    return Image(key, advice)


def _check_file(path: Path, runtime: str) -> None:
    if not path.exists():
        raise SpecError(f"container.image {str(path)!r} does not exist")
    if path.is_dir() and runtime in ("pyxis", "enroot"):
        raise SpecError(f"container.image {str(path)!r} is a folder, which {runtime} does not start: give it a .sqsh")
    if not path.is_dir() and path.suffix not in IMAGE_FILES:
        raise SpecError(
            f"container.image {str(path)!r} is no image that can be started (has: {', '.join(IMAGE_FILES)}). "
            "Make one: `apptainer build torch.sif docker-archive:FILE`, or `enroot import`"
        )
    wrong = {".sif": ("pyxis", "enroot"), ".sqsh": ("apptainer",)}.get(path.suffix, ())
    if runtime in wrong:
        raise SpecError(f"container.image {str(path)!r} cannot be started by {runtime}: leave container.runtime out")


def _ask_registry(image: str) -> tuple[str, tuple[str, ...]]:
    """The digest of an image, and what the user should know where it could not be asked.

    Only skopeo answers without fetching the whole image; Apptainer and enroot know no such question in all versions.
    """
    if not image.startswith("docker://"):
        return "", (f"{image} could not be checked before the queue: only docker:// can be asked for",)
    if shutil.which("skopeo") is None:
        advice = f"{image} could not be checked before the queue: there is no skopeo here to ask the registry with"
        return "", (advice,)
    command = ["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", image.replace("#", "/", 1)]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "", (f"{image} could not be checked: the registry did not answer within {ASK_SECONDS:g} s",)
    if answer.returncode == 0:
        return answer.stdout.strip(), ()
    words = " ".join(answer.stderr.split())[-300:]
    if _ABSENT.search(words):
        raise SpecError(f"container.image {image}: the registry does not give it: {words}")
    return "", (f"{image} could not be checked: {words}",)


def container_section(
    spec: JobSpec,
    image: Image | None,
    *,
    code: Path,
    roots: Sequence[Path],
    workdir: Path,
    images: Path,
    backend: Literal["slurm", "local"],
) -> dict[str, Any] | None:
    """The ``container`` part of ``spec.json``.

    Args:
        code: where the copy of the code lies, in the run's directory, the array's or the sweep's.
        roots: folders with code that is not copied.
    """
    container = spec.container
    if container is None or image is None:
        return None
    home = code.parent
    inside = container.workdir or str(workdir)
    own = [home, *([] if container.workdir else [workdir]), *roots, *_resumed(spec)]
    mounts = [*_same_inside(own), f"{home / FOLDER}:{home / FOLDER}:ro", *container.mounts]
    # Where pyxis is chosen on the node, that is looked at there.
    if container.runtime == "pyxis" and (why := unmountable(mounts)) is not None:
        raise SpecError(f"container: {why}. Give it another name, or set container.runtime to apptainer")
    return {
        "image": container.image,
        "runtime": container.runtime,
        "mounts": mounts,
        "workdir": inside,
        "gpus": spec.slurm.node_gpus > 0 or (backend == "local" and os.path.exists("/dev/nvidiactl")),
        "env": _env(spec.environment.env, container.env),
        "images": str(images),
        "key": image.key,
    }


def _env(outside: Mapping[str, str], inside: Mapping[str, str]) -> dict[str, str]:
    return {**outside, **inside}


def _resumed(spec: JobSpec) -> list[Path]:
    path = Path(spec.checkpoint.resume)
    return [path] if path.is_absolute() else []


def _same_inside(folders: Sequence[Path]) -> list[str]:
    """Mounts that are the same on both sides, each folder once."""
    chosen: list[Path] = []
    for folder in folders:
        if any(sign in str(folder) for sign in ":,"):
            raise SpecError(f"container: {str(folder)!r} cannot be mounted: its name holds a ':' or ','")
        if not any(folder.is_relative_to(other) for other in chosen):
            chosen.append(folder)
    return [f"{folder}:{folder}" for folder in chosen]
