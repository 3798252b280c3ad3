"""What has to be there before the ranks start, and the copy of the code that they run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hpcaccel.spec.fields import Conflict, Flag, PathText, Section, Text, Variable, Word, words

__all__ = ["Code", "Environment"]

_OWNED = re.compile(  # what users may set is documented in docs/design.md, "How ranks find each other"
    r"(?:HPCACCEL_(?!(?:USE_CPU|ALONE|GPUS_PER_TASK)$)\w*|RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|"
    r"SLURM_(?:JOB_ID|JOBID|PROCID|NTASKS|LOCALID|NODEID|STEP_ID|RESTART_COUNT|ARRAY_\w+|JOB_NODELIST))"
)


class Environment(Section):
    """Modules, Python environments, setup lines and variables, in the order in which the job applies them."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("conda", "venv"), ("venv", "python"))

    modules: list[Word] = words("Environment modules to load, in order: [gcc/12, cuda/12.4].")
    conda: Word | None = Field(default=None, description="A conda environment to activate: its name, or its path.")
    venv: PathText | None = Field(
        default=None, description="A Python virtual environment to activate.", examples=["~/venvs/gpt"]
    )
    python: PathText | None = Field(
        default=None,
        description="The Python of the ranks: a path, or a name on PATH. Default: the one of conda or venv, otherwise "
        "the one that hpcaccel itself runs in (where that has no torch: the first on PATH after modules and setup).",
    )
    setup: list[Word] = words(
        "Shell lines that run once in the job, before the ranks start. A line that fails stops the job and is named."
    )
    setup_per_node: list[Word] = words("Shell lines that run once on every node, before the ranks start.")
    env: dict[Variable, Text] = Field(
        default_factory=dict,
        description="Variables of the ranks. Values are taken as they are; ${env:NAME} is the submitter's NAME.",
        examples=[{"HF_HOME": "~/hf", "TOKENIZERS_PARALLELISM": "false"}],
    )
    secrets: list[Variable] = words(
        "Names of variables that the job takes over from where it is submitted; their values are never written down."
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
                        f"secrets.{index}", f"{name!r} stands in environment.env too: a secret's value is not written"
                    )
                )
            if name in secrets[:index]:
                found.append(Conflict(f"secrets.{index}", f"{name!r} stands twice"))
        found += [Conflict(f"env.{name}", "is set by hpcaccel itself") for name in names if _OWNED.fullmatch(name)]
        found += [
            Conflict(f"secrets.{index}", f"{name!r} is set by hpcaccel itself")
            for index, name in enumerate(secrets)
            if _OWNED.fullmatch(name)
        ]
        return found


class Code(Section):
    """The copy of the code that the run keeps, so that a requeued job runs what was submitted."""

    copy_: Flag = Field(
        default=True, alias="copy", description="Copy the code into the run directory and run the copy."
    )
    include: list[Word] = words("Patterns of more files to copy, relative to the copied folder.")
    exclude: list[Word] = words("Patterns of files to leave out, such as data and old results: [data, '*.pt'].")

    @model_serializer(mode="wrap")
    def _by_alias(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """``copy`` is the name in files; as an attribute it would hide a method of pydantic's."""
        return {"copy" if key == "copy_" else key: value for key, value in serialize(self).items()}
