"""Accelerate's configuration file: finding, loading, checking and saving it.

The file is Accelerate's own ``default_config.yaml`` (or ``.json``), with the same keys, so that both programs can use
it. It is read as Accelerate reads it, as YAML 1.1: an unquoted ``no`` is a boolean there, and counts as the text 'no'
for a key that has text.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpcaccel.core.default_config import CONFIG_NAMES, PRECISIONS, config_folder, to_json
from hpcaccel.core.durable_files import atomic_write
from hpcaccel.errors import SpecError, UserError
from hpcaccel.launch.config_sections import SECTIONS, closest, dynamo_backend, section_problems, with_prefix

__all__ = [
    "DISTRIBUTED_TYPES",
    "KEY_KINDS",
    "LaunchConfig",
    "find_config",
    "load_config",
    "save_config",
    "values_in",
    "write_config_text",
]

DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
    "MULTI_NEURON", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA",
)  # fmt: skip
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": (*DISTRIBUTED_TYPES, "TPU"),
    "mixed_precision": PRECISIONS,
}
RETIRED = {"ipex_config": "Accelerate has removed IPEX", "use_xpu": "use distributed_type: MULTI_XPU"}
"""Keys that older versions of Accelerate wrote. They are read and have no effect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The content of a configuration file. The attributes are the file's keys; a key that is absent is None.

    Keys of the sections (``fsdp_config`` …) have their prefix even where the file omits it: ``fsdp_config`` maps
    ``fsdp_version``, ``dynamo_config`` maps ``dynamo_backend``. Values in the sections are as in the file.
    """

    compute_environment: str | None = None
    distributed_type: str | None = None
    mixed_precision: str | None = None
    use_cpu: bool | None = None
    debug: bool | None = None
    num_processes: int | None = None
    """All processes, on all machines. Accelerate writes -1 if the number is given on the command line."""
    num_machines: int | None = None
    machine_rank: int | None = None
    gpu_ids: str | None = None
    """``all``, or comma-separated indices."""
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = None
    same_network: bool | None = None
    main_training_function: str | None = None
    enable_cpu_affinity: bool | None = None
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    downcast_bf16: bool | None = None
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool | None = None
    tpu_use_sudo: bool | None = None
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None

    retired: tuple[str, ...] = ()
    """Keys in the file that have no effect, from older versions of Accelerate. They are not saved."""

    def to_dict(self) -> dict[str, Any]:
        """The keys and values of the file, in Accelerate's spelling, without keys that are None or empty sections."""
        values = {name: getattr(self, name) for name in KEY_KINDS}
        if self.downcast_bf16 is not None:
            values["downcast_bf16"] = "yes" if self.downcast_bf16 else "no"
        return {name: value for name, value in values.items() if value is not None and value != {}}


KEY_KINDS = {
    field.name: str(field.type).split(" |")[0] for field in dataclasses.fields(LaunchConfig) if field.name != "retired"
}
"""The kind of each key's value: ``str``, ``bool``, ``int``, ``list[str]`` or ``dict[str, Any]``."""


def find_config(path: str | None) -> Path | None:
    """The configuration file: ``path`` if given, else the file in Accelerate's folder; None if there is none.

    Accelerate's folder is ``$HF_HOME/accelerate``, else ``$XDG_CACHE_HOME/huggingface/accelerate``, else
    ``~/.cache/huggingface/accelerate``: the first variable that is set decides.

    Raises:
        UserError: ``path`` is given and is not a file.
    """
    if path is not None:
        given = Path(path).expanduser()
        if not given.is_file():
            raise UserError(
                f"there is no configuration file {path!r}. `hpcaccel config --config-file FILE` writes one, and "
                "`hpcaccel config default` one without questions"
            )
        return given
    folder = config_folder()
    return next((folder / name for name in CONFIG_NAMES if (folder / name).is_file()), None)


def load_config(path: Path) -> LaunchConfig:
    """Load and check a configuration file.

    Raises:
        SpecError: with all problems, each with the file's line: unknown keys, values of a wrong kind.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the configuration file {path}: {why}") from None
    values, lines = _parsed(text, path)
    config, problems = _checked(values)
    if problems:
        raise SpecError([f"{path}:{lines.get(key, 1)}: {message}" for key, message in problems])
    return config


def save_config(config: LaunchConfig, path: Path) -> None:
    """Write a configuration file: JSON if the name ends in ``.json``, else YAML. The file is replaced atomically; if
    ``path`` is a symbolic link, its target is replaced.

    Raises:
        UserError: the file cannot be written.
    """
    values = config.to_dict()
    text = to_json(values) if path.suffix == ".json" else yaml.safe_dump(values)
    write_config_text(path, text)


def write_config_text(path: Path, text: str) -> None:
    """Write ``text`` to the configuration file ``path``, atomically. Raises UserError if that fails."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        atomic_write(target, text, mode=mode)
    except OSError as error:
        raise UserError(
            f"cannot write the configuration file {path}: {error.strerror}. Choose another one with --config-file"
        ) from None


def values_in(path: Path) -> dict[Any, Any]:
    """The values of a configuration file as they are written, unchecked. Raises SpecError if it is not valid YAML."""
    return _parsed(path.read_text(encoding="utf-8"), path)[0]


def _parsed(text: str, path: Path) -> tuple[dict[Any, Any], dict[str, int]]:
    """The values of the file, and the line of each key (``section.key`` for those of a section)."""
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise SpecError(f"{path}:1: the file must be a mapping, such as 'num_processes: 4'")
    return values, _lines(text)


def _lines(text: str) -> dict[str, int]:
    """The line of each key. A JSON file that is not YAML, because it has tabs, has none."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return {}
    lines: dict[str, int] = {}
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        lines[str(key.value)] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode):
            lines |= {f"{key.value}.{inner.value}": inner.start_mark.line + 1 for inner, _ in value.value}
    return lines


def _checked(values: dict[Any, Any]) -> tuple[LaunchConfig, list[tuple[str, str]]]:
    """The configuration, and the problems as key and message."""
    found: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":
        problems.append(
            ("compute_environment", "compute_environment 'AMAZON_SAGEMAKER': hpcaccel starts no jobs on SageMaker")
        )
        return LaunchConfig(), problems
    values = _brought_up_to_date(values)
    for key, value in values.items():
        name = str(key)
        if name in RETIRED:
            continue
        if name not in KEY_KINDS:
            problems.append((name, f"{name} is not a known key{closest(name, KEY_KINDS)}"))
            continue
        if name in SECTIONS and isinstance(value, dict):
            problems += [(f"{name}.{inner}", text) for inner, text in section_problems(name, value)]
            value = with_prefix(name, value)
        try:
            found[name] = _converted(name, value)
        except ValueError as error:
            problems.append((name, f"{name} {error}"))
    config = LaunchConfig(**found, retired=tuple(sorted(str(key) for key in values if key in RETIRED)))
    return config, problems


def _brought_up_to_date(values: dict[Any, Any]) -> dict[Any, Any]:
    """The values with the keys of Accelerate 1.15 in place of those that older versions wrote."""
    result = dict(values)
    if result.pop("fp16", False) is True and "mixed_precision" not in result:
        result["mixed_precision"] = "fp16"
    backend = result.pop("dynamo_backend", None)
    if backend is not None and "dynamo_config" not in result:
        off = dynamo_backend(backend).upper() == "NO"
        result["dynamo_config"] = {} if off else {"dynamo_backend": backend}
    return result


def _converted(name: str, value: Any) -> Any:
    """The value in the kind that the key has. Raises ValueError with the end of a message."""
    kind = KEY_KINDS[name]
    if value is None:
        return None
    if kind == "str":
        return _text(name, value)
    if kind == "bool":
        flag = {"yes": True, "no": False, "true": True, "false": False}.get(str(value).lower())
        if flag is None:
            raise ValueError(f"{value!r} must be true or false")
        return flag
    if kind == "int":
        if isinstance(value, bool) or not str(value).removeprefix("-").isdecimal():
            raise ValueError(f"{value!r} must be a whole number")
        return int(value)
    if kind.startswith("list"):
        if not isinstance(value, list):
            raise ValueError(f"{value!r} must be a list")
        return [str(item) for item in value]
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} must be a mapping")
    return value


def _text(name: str, value: Any) -> str:
    if isinstance(value, list | dict):
        raise ValueError(f"{value!r} must be text")
    choices = _CHOICES.get(name)
    if value is False and choices and "no" in [one.lower() for one in choices]:
        value = "no"
    text = str(value)
    if choices is None:
        return text
    match = next((one for one in choices if one.lower() == text.lower()), None)
    if match is None:
        near = difflib.get_close_matches(text.upper(), [one.upper() for one in choices], n=1, cutoff=0.5)
        hint = f". Did you mean {next(one for one in choices if one.upper() == near[0])!r}?" if near else ""
        raise ValueError(f"{text!r} is not valid (allowed: {', '.join(choices)}){hint}")
    return "XLA" if match == "TPU" else match
