"""Section ``entrypoint``: a script, a module or another program, and its arguments."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hpcaccel.spec.job.fields import Conflict, PathText, Section, Text, Word, below, checked_text
from hpcaccel.spec.job.quantities import format_number
from hpcaccel.spec.yaml12 import PlainScalar

__all__ = ["CHECKPOINT_PLACES", "EntrypointSection", "argument_value"]

Argument = str | int | float | bool | list[Any] | dict[str, Any] | None

_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_KEY = re.compile(r"[^\s=\-\x00-\x1f][^\s=\x00-\x1f]*")
_HYDRA_BARE = re.compile(r"[\w./@%+*-]+")
_PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)


def _module(value: Any) -> str:
    if not isinstance(value, str) or not _MODULE.fullmatch(value) or value.endswith(".py"):
        raise ValueError("is not a module name (such as pkg.train, without .py)")
    return value


def _command(value: Any) -> Any:
    if isinstance(value, str):
        words = ", ".join(value.split()) if value.split() else "./program, --flag"
        raise ValueError(f"must be a list of the program and its arguments: [{words}]")
    if isinstance(value, list) and not value:
        raise ValueError("must name a program: [./program, --flag]")
    return value


def _arguments(value: Any) -> Any:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {name: item for key, item in value.items() for name, item in [_entry(key, item, "")]}
    if isinstance(value, list | tuple):
        found = []
        for index, item in enumerate(value):
            with below(index):
                found.append(_item(item, f"item {index + 1} "))
        return found
    raise ValueError("must be a mapping (lr: 3e-4) or a list ([--lr, 3e-4])")


def _entry(key: Any, value: Any, parents: str) -> tuple[str, Argument]:
    with below(key):
        return _key(key, parents), argument_value(value, f"{parents}{key}")


def _key(key: Any, parents: str) -> str:
    text = str(key)
    if (bare := text.lstrip("-")) != text:
        raise ValueError(
            f"has the key {parents}{text}: write it without the dashes ({bare}), or write all args as a list"
        )
    if not _KEY.fullmatch(text):
        rule = "a key must not be empty or contain white space, control characters or '='"
        raise ValueError(f"has the key {parents + text!r}: {rule}")
    return checked_text(text)


def argument_value(value: Any, key: str) -> Argument:
    """Validate one value of ``args``; ``key`` is its name in messages. Numbers stay numbers and are formatted later.
    Infinities, NaN, and numbers whose spelling must be preserved (``_keep_spelling``) are converted to text."""
    if isinstance(value, Mapping):
        return {name: item for own, item in value.items() for name, item in [_entry(own, item, f"{key}.")]}
    if isinstance(value, list | tuple):
        found = []
        for index, item in enumerate(value):
            with below(index):
                found.append(_element(item, f"{key}: item {index + 1} "))
        return found
    return _scalar(value, f"{key}: ")


def _element(value: Any, where: str) -> Argument:
    if value is None or isinstance(value, Mapping | list | tuple):
        raise ValueError(f"{where}must be a string, a number, true or false, not {_kind(value)}")
    return _scalar(value, where)


def _kind(value: Any) -> str:
    return "null" if value is None else "a mapping" if isinstance(value, Mapping) else "a list"


def _scalar(value: Any, where: str) -> Argument:
    if isinstance(value, PlainScalar):
        value = _keep_spelling(value)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _checked(value, where)
    if hasattr(value, "__fspath__"):
        return _checked(str(value), where)
    allowed = "a string, a number, true, false, null, a list or a mapping"
    raise ValueError(f"{where}must be {allowed}, not of the type {type(value).__name__}")


def _keep_spelling(plain: PlainScalar) -> Argument:
    """The number, or its text if formatting would change an integer's spelling (``0123``) or if a float overflows."""
    if isinstance(plain.value, int) and not isinstance(plain.value, bool) and not _PLAIN_INTEGER.fullmatch(plain.text):
        return plain.text
    if isinstance(plain.value, float) and math.isinf(plain.value) and "inf" not in plain.text.lower():
        return plain.text
    return plain.value


def _item(value: Any, where: str) -> str:
    """An item of a list of arguments, as text. Numbers from YAML keep their spelling."""
    if isinstance(value, PlainScalar):
        return value.text
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return format_number(value)
    if isinstance(value, str) or hasattr(value, "__fspath__"):
        return _checked(str(value), where)
    raise ValueError(f"{where}must be a string or a number")


def _checked(value: str, where: str) -> str:
    try:
        return checked_text(value)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


CHECKPOINT_PLACES = ("{newest}", "{step}")
"""Placeholders in ``resume_args`` for the path and the step of the newest complete checkpoint."""

_SCALARS = ["string", "number", "boolean", "null"]
_ARGS_SCHEMA = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"type": [*_SCALARS, "array", "object"]}},
        {"type": "array", "items": {"type": ["string", "number", "boolean"]}},
        {"type": "null"},
    ]
}


class EntrypointSection(Section):
    """What the ranks run: exactly one of ``script``, ``module`` and ``command``, or in Python a ``function``."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("script", "module", "command", "function"),)

    script: PathText | None = Field(
        default=None,
        description="A Python script, relative to this file. It is started as `python script.py` on every rank.",
        examples=["train.py"],
    )
    module: Annotated[
        str | None,
        BeforeValidator(lambda value: None if value is None else _module(value)),
        WithJsonSchema({"type": ["string", "null"]}),
    ] = Field(
        default=None,
        description="A Python module, started as `python -m module` on every rank.",
        examples=["pkg.train"],
    )
    command: Annotated[list[Word] | None, BeforeValidator(_command)] = Field(
        default=None,
        description="Any other program and its first arguments. A name with a slash is relative to this file; a "
        "name without one is looked up on PATH.",
        examples=[["./train.sh"], ["julia", "train.jl"]],
    )
    function: Text | None = Field(
        default=None, description="The name of the Python function passed to hpcaccel.submit()."
    )
    args: Annotated[dict[str, Any] | list[str], BeforeValidator(_arguments), WithJsonSchema(_ARGS_SCHEMA)] = Field(
        default_factory=dict,
        description="The program's arguments: a mapping or a list. A mapping is passed in its order: `lr: 3e-4` gives "
        "`--lr 3e-4`, true gives the bare flag `--lr`, false and null omit it, a list gives `--lr a b` (args_style "
        "changes this format). A list is passed unchanged.",
        examples=[{"lr": 3e-4, "compile": True, "betas": [0.9, 0.95]}, ["--lr", "3e-4"]],
    )
    resume_args: Annotated[dict[str, Any] | list[str], BeforeValidator(_arguments), WithJsonSchema(_ARGS_SCHEMA)] = (
        Field(
            default_factory=dict,
            description="Further arguments, passed after args by attempts that start with a complete checkpoint (see "
            "checkpoint.watch). {newest} stands for its path, {step} for its step. Written like args.",
            examples=[{"resume_from_checkpoint": "{newest}"}, ["--load", "{newest}"]],
        )
    )
    args_style: Literal["flags", "equals", "key=value"] = Field(
        default="flags",
        description="How a mapping of args is passed. `flags`: `--lr 3e-4`. `equals`: `--lr=3e-4`, with "
        "`--compile=True` and `--compile=False` for booleans, `--betas=[0.9,0.95]` for lists (Python syntax: nanoGPT, "
        "fire, tyro, jsonargparse, absl) and `--a.b=1` for nested mappings; null omits the argument. `key=value`: "
        "`lr=3e-4` (Hydra, OmegaConf), with `key=[a,b]` for lists and `a.b=1` for nested mappings; true, false and "
        "null are written out. In all three, strings outside lists are passed unchanged.",
    )

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if all(values.get(key) is None for key in cls.rivals[0]):
            found.append(Conflict("", "must have one of script, module, command"))
        for section in ("args", "resume_args"):
            args = values.get(section)
            if isinstance(args, Mapping) and values.get("args_style", "flags") == "flags":
                found += [
                    Conflict(
                        f"{section}.{key}",
                        f"is a mapping, which args_style: flags does not support. Write {key}.<name>: …, "
                        "or set args_style: equals or key=value",
                    )
                    for key, value in args.items()
                    if isinstance(value, Mapping)
                ]
        if args and not any(place in str(args) for place in CHECKPOINT_PLACES):
            found.append(Conflict("resume_args", "must contain {newest} or {step}; other arguments belong in args"))
        if args and values.get("function") is not None:
            found.append(Conflict("resume_args", "cannot be used with a Python function, which has no command line"))
        return found

    @property
    def kind(self) -> Literal["script", "module", "command", "function"]:
        """Which of the four keys is set."""
        if self.script is not None:
            return "script"
        if self.module is not None:
            return "module"
        return "command" if self.command is not None else "function"

    def arguments(self) -> list[str]:
        """The command-line arguments of the program, in order."""
        return self._words(self.args)

    def resume_arguments(self) -> list[str]:
        """The words of ``resume_args``, with their placeholders."""
        return self._words(self.resume_args)

    def _words(self, args: dict[str, Any] | list[str]) -> list[str]:
        if isinstance(args, list):
            return list(args)
        write = _WRITERS[self.args_style]
        return [word for key, value in args.items() for word in write(key, value)]


def _argument_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return format_number(value) if isinstance(value, int | float) else str(value)


def _flag_arguments(key: str, value: Argument) -> list[str]:
    if value is None or value is False:
        return []
    if value is True:
        return [f"--{key}"]
    if isinstance(value, list):
        return [f"--{key}", *(_argument_text(item) for item in value)]
    return [f"--{key}", _argument_text(value)]


def _equals(key: str, value: Argument) -> list[str]:
    """One argument per value, in a form that ``ast.literal_eval`` parses. Text outside of lists is unchanged."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [word for name, item in value.items() for word in _equals(f"{key}.{name}", item)]
    if isinstance(value, list):
        return [f"--{key}=[{','.join(repr(item) if isinstance(item, str) else _literal(item) for item in value)}]"]
    return [f"--{key}={_literal(value)}"]


def _literal(value: Any) -> str:
    return str(value) if isinstance(value, bool) else _argument_text(value)


def _assignments(key: str, value: Argument) -> list[str]:
    if isinstance(value, dict):
        return [word for name, item in value.items() for word in _assignments(f"{key}.{name}", item)]
    if isinstance(value, list):
        return [f"{key}=[{','.join(_hydra_element(item) for item in value)}]"]
    return [f"{key}={'null' if value is None else _argument_text(value)}"]


def _hydra_element(value: Any) -> str:
    """An element of a list, quoted if Hydra needs it: https://hydra.cc/docs/advanced/override_grammar."""
    text = _argument_text(value)
    if not isinstance(value, str) or (_HYDRA_BARE.fullmatch(text) and isinstance(text, str)):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_WRITERS = {"flags": _flag_arguments, "equals": _equals, "key=value": _assignments}
