"""The command line of ``hpcaccel launch``: flags, then the script, then the script's own arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.launch.flags import BY_NAME, Flag, spelled

__all__ = ["Arguments", "parse"]

USAGE = "hpcaccel launch [FLAGS] script.py [ARGUMENTS]"
_UNSUPPORTED = {
    "megatron_lm": "hpcaccel does not support Megatron-LM. --use-fsdp, and --parallelism-config-tp-size with a "
    "tp_plan, shard large models",
    "aws": "hpcaccel starts no jobs on SageMaker",
}
"""Why flags with a prefix are refused."""
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    values: Mapping[str, Any]
    """Values of the flags that were given, by name: str, int, float, bool, or a list of str."""
    script: str = ""
    """Path, module or program."""
    script_args: tuple[str, ...] = ()


def parse(words: Sequence[str]) -> Arguments:
    """Parse the words after ``hpcaccel launch``. With ``--help``, the script may be missing.

    Raises:
        UserError: an unknown flag, a missing or wrong value, or no script.
    """
    left = list(words)
    values: dict[str, Any] = {}
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        _take(word, left, values)
    if not left and not values.get("help"):
        raise UserError(f"the script is missing: {USAGE}")
    script, *rest = left or [""]
    return Arguments(values, script, tuple(rest))


def _take(word: str, left: list[str], values: dict[str, Any]) -> None:
    """Read one flag, and its value from ``left``, into ``values``."""
    flag, shown, value = _found(word)
    if flag.kind == "switch":
        values[flag.name] = True if value is None else _boolean(shown, value)
        return
    if value is None:
        if not left or left[0].startswith("--"):
            raise UserError(f"{shown} needs a value, such as {shown} {_example(flag)}")
        value = left.pop(0)
    converted = _converted(flag, shown, value)
    values[flag.name] = [*values.get(flag.name, []), converted] if flag.kind == "list" else converted


def _found(word: str) -> tuple[Flag, str, str | None]:
    """The flag, its spelling for messages, and the value after ``=`` or directly after a short form."""
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        flag = BY_NAME.get(name.replace("-", "_"))
        if flag is None:
            raise UserError(_unknown(word.partition("=")[0]))
        return flag, spelled(name.replace("-", "_")), text if equals else None
    flag = BY_NAME.get(word[:2])
    if flag is None or (word[2:] and flag.kind == "switch"):
        raise UserError(_unknown(word))
    return flag, word[:2], word[2:].removeprefix("=") or None


def _unknown(word: str) -> str:
    plain = word.lstrip("-").replace("-", "_")
    for prefix, why in _UNSUPPORTED.items():
        if plain.removeprefix("use_").startswith(prefix):
            return f"{word}: {why}"
    flags = [spelled(name) for name in BY_NAME]
    match = difflib.get_close_matches("--" + plain.replace("_", "-"), flags, n=1, cutoff=0.5)
    hint = f". Did you mean {match[0]}?" if match else ""
    return f"hpcaccel launch has no flag {word}{hint} Flags of the script come after the script: {USAGE}".replace(
        f"{word} Flags", f"{word}. Flags"
    )


def _converted(flag: Flag, shown: str, value: str) -> Any:
    if flag.kind == "boolean":
        return _boolean(shown, value)
    if flag.kind in ("whole", "number"):
        try:
            return int(value) if flag.kind == "whole" else float(value)
        except ValueError:
            raise UserError(f"{shown} {value!r} must be a {'whole ' * (flag.kind == 'whole')}number") from None
    if flag.choices:
        match = next((choice for choice in flag.choices if choice.lower() == value.lower()), None)
        if match is None:
            raise UserError(f"{shown} {value!r} is not valid (allowed: {', '.join(flag.choices)})")
        return match
    return value


def _boolean(shown: str, value: str) -> bool:
    if value.lower() not in _WORDS:
        raise UserError(f"{shown} {value!r} must be true or false")
    return _WORDS[value.lower()]


def _example(flag: Flag) -> str:
    if flag.choices:
        return flag.choices[-1]
    return {"whole": "2", "number": "0.5", "boolean": "true"}.get(flag.kind, "VALUE")
