"""Sections ``environment``, ``code``, ``container`` and ``stage`` of a job spec."""

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WithJsonSchema, model_serializer

from hpcaccel.spec.job.fields import (
    Conflict,
    Flag,
    PathText,
    Section,
    Text,
    Variable,
    Word,
    checked_text,
    empty_list,
    text_list,
)
from hpcaccel.spec.job.fields import Section as _Section
from hpcaccel.spec.yaml12 import PlainScalar

__all__ = ["IMAGE_FILES", "CodeSection", "ContainerSection", "EnvironmentSection", "StageSection", "is_image_path"]


_OWNED = re.compile(  # what users may set is documented in docs/design.md, "How ranks find each other"
    r"(?:HPCACCEL_(?!(?:USE_CPU|ALONE|GPUS_PER_TASK|LOG_LEVEL|SAMPLE_SECONDS)$)\w*|RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|"
    r"SLURM_(?:JOB_ID|JOBID|PROCID|NTASKS|LOCALID|NODEID|STEP_ID|RESTART_COUNT|ARRAY_\w+|JOB_NODELIST))"
)


class EnvironmentSection(Section):
    """Modules, Python environments, setup lines and variables of a job."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("conda", "venv"), ("venv", "python"))

    modules: list[Word] = text_list("Environment modules to load, in order: [gcc/12, cuda/12.4].")
    conda: Word | None = Field(default=None, description="A conda environment to activate: a name or a path.")
    venv: PathText | None = Field(
        default=None, description="A Python virtual environment to activate.", examples=["~/venvs/gpt"]
    )
    python: PathText | None = Field(
        default=None,
        description="The Python interpreter of the ranks: a path, or a name on PATH. Default: python3 of the "
        "container; else the one of conda or venv; else the one that runs hpcaccel, or, if that has no torch and "
        "modules or setup is set, the first on PATH after these.",
    )
    setup: list[Word] = text_list(
        "Shell lines that run once per job, before the ranks start. If a line fails, the job stops and reports it."
    )
    setup_per_node: list[Word] = text_list("Shell lines that run once on every node, before the ranks start.")
    env: dict[Variable, Text] = Field(
        default_factory=dict,
        description="Environment variables of the ranks. Only ${env:NAME} (a variable of the submitting environment) "
        "and a leading ~/ are expanded in the values.",
        examples=[{"HF_HOME": "~/hf", "TOKENIZERS_PARALLELISM": "false"}],
    )
    secrets: list[Variable] = text_list(
        "Names of environment variables to pass from the submitting environment; their values are never written to a "
        "file."
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        env = values.get("env")
        names = [str(name) for name in env] if isinstance(env, Mapping) else []
        listed = values.get("secrets")
        secrets = [str(name) for name in listed] if isinstance(listed, list) else []
        for index, name in enumerate(secrets):
            if name in names:
                found.append(
                    Conflict(
                        f"secrets.{index}",
                        f"{name!r} is also in environment.env, whose values are written to the run directory: remove "
                        "it from one of the two",
                    )
                )
            if name in secrets[:index]:
                found.append(Conflict(f"secrets.{index}", f"{name!r} is listed twice"))
        found += [
            Conflict(f"env.{name}", "is reserved for hpcaccel and Slurm: remove it")
            for name in names
            if _OWNED.fullmatch(name)
        ]
        found += [
            Conflict(f"secrets.{index}", f"{name!r} is reserved for hpcaccel and Slurm: remove it")
            for index, name in enumerate(secrets)
            if _OWNED.fullmatch(name)
        ]
        return found


class CodeSection(Section):
    """The copy of the code in the run directory, so that a requeued job runs what was submitted."""

    copy_: Flag = Field(
        default=True, alias="copy", description="Copy the code into the run directory and run the copy."
    )
    include: list[Word] = text_list("Patterns of additional files to copy, relative to the copied folder.")
    exclude: list[Word] = text_list("Patterns of files not to copy, such as data and old results: [data, '*.pt'].")

    @model_serializer(mode="wrap")
    def _by_alias(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize by alias: the key is ``copy`` in files, but an attribute ``copy`` would hide a pydantic method."""
        return {"copy" if key == "copy_" else key: value for key, value in serialize(self).items()}


IMAGE_FILES = (".sif", ".sqsh")
"""Suffixes of image files: Apptainer's, and enroot's, which pyxis also accepts."""

_REFERENCE = re.compile(r"(?:[a-z][a-z0-9+.-]*://)?[A-Za-z0-9$_][A-Za-z0-9$_./:@#+-]*", re.ASCII)
_SEPARATORS = re.compile(r"[:,]")


def is_image_path(image: str) -> bool:
    """Whether ``image`` is the path of a file or folder on the cluster, not a name in a registry."""
    return "://" not in image and (image.startswith(("/", "./", "../", "~")) or image.endswith(IMAGE_FILES))


def _image(value: Any) -> str:
    text = str(value.text if isinstance(value, PlainScalar) else value)
    checked_text(text)
    if not text.strip():
        raise ValueError("must not be empty")
    if is_image_path(text):
        if _SEPARATORS.search(text):
            raise ValueError("contains ':' or ',', which container runtimes treat as the end of a path: rename it")
        return text
    if not _REFERENCE.fullmatch(text):
        raise ValueError(
            "is neither a path (/images/torch.sif) nor a name in a registry (docker://pytorch/pytorch:2.9)"
        )
    if "$" in text.partition("@")[0] and "@" not in text:
        raise ValueError("contains '$': shell variables are not expanded here. Write ${env:NAME}")
    return text if "://" in text else f"docker://{text}"


def _mount(value: Any) -> str:
    text = checked_text(str(value.text if isinstance(value, PlainScalar) else value))
    parts = text.split(":")
    if "," in text:
        raise ValueError("contains a comma, which container runtimes treat as the end of a mount")
    if len(parts) == 1:
        parts = [parts[0], parts[0]]
    if len(parts) == 2 and parts[1] in ("ro", "rw"):
        parts = [parts[0], parts[0], parts[1]]
    if len(parts) not in (2, 3) or not all(parts) or parts[2:] not in ([], ["ro"], ["rw"]):
        raise ValueError(
            "is not a valid mount: write SRC:DST or SRC (the same path in the container), optionally with :ro or :rw"
        )
    if not parts[1].startswith("/"):
        raise ValueError(f"has the target {parts[1]!r}: the path in the container must be absolute")
    return ":".join(parts if parts[2:] != ["rw"] else parts[:2])


def _inside(value: Any) -> str:
    text = checked_text(str(value.text if isinstance(value, PlainScalar) else value))
    if not text.startswith("/") or _SEPARATORS.search(text):
        raise ValueError("must be an absolute path inside the container, without ':' or ','")
    return text


Mount = Annotated[str, BeforeValidator(_mount), WithJsonSchema({"type": "string", "minLength": 1})]
"""``SRC:DST`` or ``SRC:DST:ro``."""


class ContainerSection(_Section):
    """A container image for the ranks. The supervisor runs outside; hpcaccel's files for the ranks are mounted."""

    image: Annotated[Word, BeforeValidator(_image)] = Field(
        description="A .sif or .sqsh file, a folder that Apptainer accepts, or a name in a registry. An image from a "
        "registry is imported once into runs_dir.",
        examples=["/images/torch.sif", "docker://nvcr.io/nvidia/pytorch:25.09-py3"],
    )
    runtime: Literal["auto", "pyxis", "apptainer", "enroot"] = Field(
        default="auto",
        description="The container runtime. auto: chosen by the image name and by what is installed: pyxis, Apptainer "
        "(or Singularity), enroot.",
    )
    mounts: list[Mount] = Field(
        default_factory=empty_list,
        description="Additional folders of the cluster to mount: SRC:DST, SRC:DST:ro, or one path that is the same "
        "inside. The run directory, workdir, the code, a checkpoint to resume from and staged data are always mounted.",
        examples=[["/datasets:/data:ro", "~/.cache/huggingface:/hf"]],
    )
    workdir: Annotated[str | None, BeforeValidator(lambda value: None if value is None else _inside(value))] = Field(
        default=None, description="Working directory of the ranks inside the container. Default: the job's workdir."
    )
    env: dict[Variable, Text] = Field(
        default_factory=dict,
        description="Environment variables of the ranks; they override those of the image. environment.env applies "
        "too.",
    )


class StageSection(Section):
    """Files and folders to copy to each node. Ranks find them in $HPCACCEL_STAGE_DIR under their original names."""

    moved: ClassVar[dict[str, str]] = {"source": "is called sources here: sources: [path, …]"}

    sources: list[PathText] = Field(
        min_length=1, description="Files and folders to copy to each node.", examples=[["/datasets/imagenet.tar"]]
    )
    directory: Word | None = Field(
        default=None,
        description="Target directory on every node: an absolute path, which may start with a variable of the job, "
        "such as $SLURM_TMPDIR. Default: $SLURM_TMPDIR, otherwise $TMPDIR, otherwise /tmp. hpcaccel creates a folder "
        "for the job in it.",
        examples=["$SLURM_TMPDIR", "/local/scratch"],
    )
    keep: Flag = Field(
        default=False,
        description="Keep the copy after the job, for the next job with the same sources on that node.",
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        sources = values.get("sources")
        names: dict[str, str] = {}
        for index, source in enumerate(sources if isinstance(sources, list) else []):
            name = PurePath(str(source)).name
            if not name:
                found.append(
                    Conflict(f"sources.{index}", f"{str(source)!r} has no file name under which it could be copied")
                )
            elif name in names:
                also = f"{str(source)!r} and {names[name]!r} would both be named {name!r} in the stage directory"
                found.append(Conflict(f"sources.{index}", f"cannot be staged: {also}"))
            names.setdefault(name, str(source))
        directory = values.get("directory")
        if directory is not None and not isinstance(directory, Mapping | list):
            text = str(getattr(directory, "text", directory))
            if not text.startswith(("/", "$")):
                found.append(Conflict("directory", f"{text!r} must be an absolute path or start with a variable"))
        return found
