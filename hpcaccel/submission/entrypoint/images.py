"""Container images: a check that the image exists, and the mounts that the ranks need."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcaccel.core.launch_spec import LaunchContainer
from hpcaccel.errors import SpecError
from hpcaccel.slurm.site_parsing import unmountable_by_pyxis
from hpcaccel.spec.job.environment_fields import IMAGE_FILES, is_image_path
from hpcaccel.submission.code.package import RANK_SIDE

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["IMAGES", "Image", "launch_container", "look_at_image"]

IMAGES = ".images"
"""The folder in ``runs_dir`` for imported images."""
ASK_SECONDS = 30.0
"""Timeout of the query to the registry."""
_UNCHECKED = "container.image {0!r} could not be checked before submission"

_ABSENT = re.compile(
    r"(?:manifest|name) unknown|not found|unauthorized|denied|authentication required|invalid reference|\b40[134]\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Image:
    """The result of checking an image."""

    key: str
    """A hash of the image's name and (if known) digest, used in file names; "" if the image is a file."""
    advice: tuple[str, ...] = ()


def look_at_image(spec: JobSpec, runs_dir: Path) -> Image | None:
    """Check a run's image; None for a run without a container.

    Raises:
        SpecError: the image does not exist, is not supported, or cannot be started by the chosen runtime.
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
        raise SpecError(f"container.image {str(path)!r} is a directory, which {runtime} cannot start: use a .sqsh file")
    if not path.is_dir() and path.suffix not in IMAGE_FILES:
        raise SpecError(
            f"container.image {str(path)!r} is not a supported image file (allowed: {', '.join(IMAGE_FILES)}). "
            "Create one with `apptainer build torch.sif docker-archive:FILE` or `enroot import`"
        )
    wrong = {".sif": ("pyxis", "enroot"), ".sqsh": ("apptainer",)}.get(path.suffix, ())
    if runtime in wrong:
        raise SpecError(f"container.image {str(path)!r} cannot be started by {runtime}: set container.runtime to auto")


def _ask_registry(image: str) -> tuple[str, tuple[str, ...]]:
    """The digest of an image, and advice if the registry could not be queried.

    skopeo reads the digest without downloading the image; not all versions of Apptainer and enroot can do that.
    """
    if not image.startswith("docker://"):
        return "", (f"{_UNCHECKED.format(image)}: only docker:// images can be checked",)
    if shutil.which("skopeo") is None:
        return "", (f"{_UNCHECKED.format(image)}: skopeo, which queries the registry, is not on PATH",)
    command = ["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", image.replace("#", "/", 1)]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "", (f"{_UNCHECKED.format(image)}: the registry did not respond within {ASK_SECONDS:g} s",)
    if result.returncode == 0:
        return result.stdout.strip(), ()
    output = " ".join(result.stderr.split())[-300:]
    if _ABSENT.search(output):
        raise SpecError(f"container.image {image!r} is not available from the registry: {output}")
    return "", (f"{_UNCHECKED.format(image)}: {output}",)


def launch_container(
    spec: JobSpec,
    image: Image | None,
    *,
    code: Path,
    roots: Sequence[Path],
    workdir: Path,
    images: Path,
    backend: Literal["slurm", "local"],
) -> LaunchContainer | None:
    """The ``container`` part of ``spec.json``.

    Args:
        code: the copy of the code, which is a subfolder of the directory of the run, array or sweep.
        roots: folders with code that is not copied.

    Raises:
        SpecError: the path of a folder that the container needs cannot be mounted.
    """
    container = spec.container
    if container is None or image is None:
        return None
    home = code.parent
    inside = container.workdir or str(workdir)
    own = [home, *([] if container.workdir else [workdir]), *roots, *_resumed(spec)]
    mounts = [*_same_inside(own), f"{home / RANK_SIDE}:{home / RANK_SIDE}:ro", *container.mounts]
    # With `runtime: auto`, the node selects the runtime, and checks the mounts if it selects pyxis.
    if container.runtime == "pyxis" and (why := unmountable_by_pyxis(mounts)) is not None:
        raise SpecError(f"container: {why}. Rename the path, or set container.runtime to apptainer")
    return LaunchContainer(
        image=container.image,
        runtime=container.runtime,
        mounts=mounts,
        workdir=inside,
        gpus=spec.slurm.node_gpus > 0 or (backend == "local" and os.path.exists("/dev/nvidiactl")),
        env={**spec.environment.env, **container.env},
        images=str(images),
        key=image.key,
    )


def _resumed(spec: JobSpec) -> list[Path]:
    path = Path(spec.checkpoint.resume)
    return [path] if path.is_absolute() else []


def _same_inside(folders: Sequence[Path]) -> list[str]:
    """Mounts that give folders the same path in the container. A folder inside an earlier one needs no mount."""
    chosen: list[Path] = []
    for folder in folders:
        if any(character in str(folder) for character in ":,"):
            raise SpecError(f"container: {str(folder)!r} cannot be mounted: rename the path, which contains ':' or ','")
        if not any(folder.is_relative_to(other) for other in chosen):
            chosen.append(folder)
    return [f"{folder}:{folder}" for folder in chosen]
