"""The image that the ranks run in, and what of the cluster they see there."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec.fields import Section as _Section
from hpcaccel.spec.fields import Text, Variable, Word, checked_text
from hpcaccel.spec.yaml12 import Plain

__all__ = ["IMAGE_FILES", "Container", "is_image_path"]

IMAGE_FILES = (".sif", ".sqsh")
"""What an image file is called: Apptainer's, and enroot's (which pyxis takes)."""

_REFERENCE = re.compile(r"(?:[a-z][a-z0-9+.-]*://)?[A-Za-z0-9$_][A-Za-z0-9$_./:@#+-]*", re.ASCII)
_SEPARATORS = re.compile(r"[:,]")


def is_image_path(image: str) -> bool:
    """Whether an image is a file or folder of the cluster's, and no name in a registry."""
    return "://" not in image and (image.startswith(("/", "./", "../", "~")) or image.endswith(IMAGE_FILES))


def _image(value: Any) -> str:
    text = str(value.text if isinstance(value, Plain) else value)
    checked_text(text)
    if not text.strip():
        raise ValueError("must not be empty")
    if is_image_path(text):
        if _SEPARATORS.search(text):
            raise ValueError("holds a ':' or ',', which the container runtimes take for the end of a path")
        return text
    if not _REFERENCE.fullmatch(text):
        raise ValueError(
            "is neither a path (/images/torch.sif) nor a name in a registry (docker://pytorch/pytorch:2.9)"
        )
    if "$" in text.partition("@")[0] and "@" not in text:
        raise ValueError("holds a '$': nothing is expanded here. Write ${env:NAME}")
    return text if "://" in text else f"docker://{text}"


def _mount(value: Any) -> str:
    text = checked_text(str(value.text if isinstance(value, Plain) else value))
    parts = text.split(":")
    if "," in text:
        raise ValueError("holds a comma, which the container runtimes take for the end of a mount")
    if len(parts) == 1:
        parts = [parts[0], parts[0]]
    if len(parts) == 2 and parts[1] in ("ro", "rw"):
        parts = [parts[0], parts[0], parts[1]]
    if len(parts) not in (2, 3) or not all(parts) or parts[2:] not in ([], ["ro"], ["rw"]):
        raise ValueError("is not a mount: write SRC:DST, SRC:DST:ro, or one path that is the same on both sides")
    if not parts[1].startswith("/"):
        raise ValueError(f"mounts at {parts[1]!r}: the place in the container must be an absolute path")
    return ":".join(parts if parts[2:] != ["rw"] else parts[:2])


def _inside(value: Any) -> str:
    text = checked_text(str(value.text if isinstance(value, Plain) else value))
    if not text.startswith("/") or _SEPARATORS.search(text):
        raise ValueError("must be an absolute path inside of the container, without ':' and ','")
    return text


Mount = Annotated[str, BeforeValidator(_mount), WithJsonSchema({"type": "string", "minLength": 1})]
"""``SRC:DST`` or ``SRC:DST:ro``."""


class Container(_Section):
    """An image for the ranks. hpcaccel's supervisor stays outside, and what the ranks need of hpcaccel is mounted."""

    image: Annotated[Word, BeforeValidator(_image)] = Field(
        description="A .sif or .sqsh file (or a folder that Apptainer takes), or a name in a registry, which is "
        "imported once into the runs_dir.",
        examples=["/images/torch.sif", "docker://nvcr.io/nvidia/pytorch:25.09-py3"],
    )
    runtime: Literal["auto", "pyxis", "apptainer", "enroot"] = Field(
        default="auto",
        description="What starts containers. auto: by the image's name and by what there is: pyxis, Apptainer (or "
        "Singularity), enroot.",
    )
    mounts: list[Mount] = Field(
        default_factory=list,
        description="More of the cluster's folders: SRC:DST, SRC:DST:ro, or one path that is the same inside. The run "
        "directory, workdir, the code, a checkpoint to resume from and staged data are always there.",
        examples=[["/datasets:/data:ro", "~/.cache/huggingface:/hf"]],
    )
    workdir: Annotated[str | None, BeforeValidator(lambda value: None if value is None else _inside(value))] = Field(
        default=None, description="Where the ranks start, inside of the container. Default: the job's own workdir."
    )
    env: dict[Variable, Text] = Field(
        default_factory=dict,
        description="Variables of the ranks over those of the image. Those of environment.env count in there too.",
    )
