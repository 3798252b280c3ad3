"""``checkpoint.watch``: where a program saves checkpoints of its own, and how a complete checkpoint is recognised."""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.core.run_dir import RUN_DIR
from hpcaccel.spec.job.fields import Conflict, Section, Word

if TYPE_CHECKING:
    from hpcaccel.core.launch_spec import LaunchWatch

__all__ = ["PRESETS", "Pattern", "PresetName", "WatchSection", "pattern_of", "watch_setting"]

PresetName = Literal["transformers", "lightning", "torchtitan", "megatron", "dcp"]


class Pattern(NamedTuple):
    """Where checkpoints are, and how a complete checkpoint is recognised; see the fields of ``WatchSection``."""

    glob: str
    complete: str | None
    step: str


class Preset(NamedTuple):
    """A trainer's pattern, relative to the directory in which the trainer saves."""

    pattern: Pattern
    arguments: tuple[str, ...]
    """Names of the trainer's arguments that can set this directory."""


PRESETS: dict[str, Preset] = {
    # trainer.py, _save_checkpoint: trainer_state.json is written last.
    "transformers": Preset(Pattern("checkpoint-*", "trainer_state.json", r"checkpoint-(\d+)$"), ("output_dir",)),
    # A checkpoint is one file, or with sharded strategies a directory whose meta.pt is written last.
    "lightning": Preset(Pattern("**/*.ckpt", "meta.pt", r"(?:step=|hpc_ckpt_)(\d+)"), ("default_root_dir",)),
    # torch.distributed.checkpoint renames .metadata into place after all other files.
    "torchtitan": Preset(Pattern("checkpoint/step-*", ".metadata", r"step-(\d+)$"), ("dump_folder", "job.dump_folder")),
    "dcp": Preset(Pattern("*", ".metadata", r"(\d+)\D*$"), ()),
    # latest_checkpointed_iteration.txt contains the newest iteration whose save has finished.
    "megatron": Preset(Pattern("iter_*", "../latest_checkpointed_iteration.txt", r"iter_(\d+)$"), ("save",)),
}


def watch_setting(value: Any) -> Any:
    """Convert a value of ``checkpoint.watch``: the name of a preset is short for ``{preset: NAME}``."""
    return {"preset": value} if isinstance(value, str) else value


def _expression(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(r"must be a regular expression with one group, such as 'step-(\d+)'")
    try:
        groups = re.compile(value).groups
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    if groups != 1:
        raise ValueError(rf"must have exactly one group in parentheses, the step: 'step-(\d+)', not {value!r}")
    return value


class WatchSection(Section):
    """Checkpoints that the program writes itself. Complete ones count as progress and are shown by ``status``."""

    moved: ClassVar[dict[str, str]] = {"path": "is called glob", "pattern": "is called glob", "dir": "is directory"}

    preset: PresetName | None = Field(
        default=None,
        description="How this trainer names and completes its checkpoints. `dcp`: directories of "
        "torch.distributed.checkpoint whose names end with the step.",
    )
    directory: Word | None = Field(
        default=None,
        description="The directory in which the trainer saves, relative to the working directory; {run_dir} stands for "
        "the run's directory. Default: the trainer's own argument in entrypoint.args (output_dir, default_root_dir, "
        "dump_folder, save).",
        examples=["out", "{run_dir}/out"],
    )
    glob: Word | None = Field(
        default=None,
        description="Checkpoints of other programs: files or directories, relative to `directory` if it is set, else "
        "to the working directory.",
        examples=["out/checkpoint-*", "{run_dir}/epoch_*.pt"],
    )
    complete: Word | None = Field(
        default=None,
        description="A file that exists in every complete checkpoint directory, written last. With `../`: a file "
        "beside the checkpoints that contains the step of the newest complete one. Checkpoints that are single files "
        "need none: a file of torch.save must have its end, any other file must not be empty.",
        examples=["trainer_state.json", "../latest_checkpointed_iteration.txt"],
    )
    step: Annotated[
        str | None,
        BeforeValidator(lambda value: None if value is None else _expression(value)),
        WithJsonSchema({"type": ["string", "null"]}),
    ] = Field(
        default=None,
        description="A regular expression whose group matches the step in the checkpoint's name, or in its path if the "
        "expression contains a slash. Default: the last number in the name.",
        examples=[r"checkpoint-(\d+)"],
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("preset") is None and values.get("glob") is None:
            found.append(Conflict("glob", f"must be set, or use a preset: {', '.join(PRESETS)}"))
        if values.get("preset") is not None and values.get("glob") is not None:
            found.append(Conflict("glob", "conflicts with preset: set only one of preset, glob"))
        if str(values.get("complete") or "").startswith("/"):
            found.append(Conflict("complete", "must be relative to the checkpoint: a name, or ../ and a name"))
        return found

    def pattern(self, arguments: Mapping[str, Any] | Sequence[str]) -> Pattern:
        """The pattern, with the directory in which the program saves prepended to the glob.

        Args:
            arguments: ``entrypoint.args``.

        Raises:
            ValueError: for a preset, the directory is neither set nor among ``arguments``.
        """
        if self.preset is None:
            own = Pattern(str(self.glob), self.complete, self.step or r"(\d+)\D*$")
            return own if self.directory is None else own._replace(glob=f"{glob.escape(self.directory)}/{own.glob}")
        (pattern, complete, step), names = PRESETS[self.preset]
        directory = self.directory or next(filter(None, (_argument(arguments, name) for name in names)), None)
        if directory is None:
            known = f", and entrypoint.args has no {' or '.join(names)}" if names else ""
            raise ValueError(
                f"needs the directory in which the program saves{known}: write "
                f"watch: {{preset: {self.preset}, directory: out}}"
            )
        return Pattern(f"{glob.escape(directory)}/{pattern}", self.complete or complete, self.step or step)

    def located(self, arguments: Mapping[str, Any] | Sequence[str], workdir: str) -> "LaunchWatch":
        """The pattern with an absolute glob. A glob that begins with ``{run_dir}`` stays unchanged.

        Args:
            arguments: ``entrypoint.args``.
            workdir: working directory of the ranks.

        Raises:
            ValueError: see ``pattern``.
        """
        pattern = self.pattern(arguments)
        place = os.path.expanduser(pattern.glob)
        if not place.startswith(("/", RUN_DIR)):
            place = f"{glob.escape(workdir)}/{place}"
        from hpcaccel.core.launch_spec import LaunchWatch  # `render` and `validate` need none of its classes

        return LaunchWatch(glob=place, complete=pattern.complete, step=pattern.step)


def pattern_of(watch: Any, arguments: Any) -> Pattern:
    """Returns ``WatchSection.pattern`` for values that may not be validated yet.

    Raises:
        ValueError: see ``WatchSection.pattern``; also raised if the values are not valid.
    """
    section = watch if isinstance(watch, WatchSection) else WatchSection.model_validate(watch_setting(watch))
    return section.pattern(arguments if isinstance(arguments, Mapping | list) else {})


def _argument(arguments: Mapping[str, Any] | Sequence[str], name: str) -> str | None:
    """The value of the program's argument ``name``, or None. In names, ``-`` and ``_`` are treated as equal."""

    def same(word: str) -> bool:
        return word.lstrip("-").replace("-", "_") == name.replace("-", "_")

    if isinstance(arguments, Mapping):
        found = next((value for key, value in arguments.items() if same(str(key))), None)
        if found is None and "." in name:
            section, _, key = name.partition(".")
            nested = arguments.get(section)
            found = nested.get(key) if isinstance(nested, Mapping) else None
        return None if found is None else str(found)
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        key, equals, value = str(word).partition("=")
        if same(key):
            return value if equals else str(after) or None
    return None
