"""Reading and changing environment variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpcaccel.errors import RuntimeMisuse

__all__ = [
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]

TRUE = ("y", "yes", "t", "true", "on", "1")
FALSE = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0, or a bool with ``to_bool``, of yes and no in their usual spellings.

    Raises:
        RuntimeMisuse: neither.
    """
    word = value.lower()
    if word not in TRUE + FALSE:
        raise RuntimeMisuse(f"{value!r} is neither yes ({', '.join(TRUE)}) nor no ({', '.join(FALSE)})")
    return word in TRUE if to_bool else int(word in TRUE)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that holds a number from 0 on."""
    for key in env_keys:
        value = int(os.environ.get(key, -1))
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable that says yes or no.

    Raises:
        RuntimeMisuse: it says neither.
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable's word."""
    return os.environ.get(key, str(default))


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Variables with other values for a while; the names become upper case."""
    wanted = {key.upper(): str(value) for key, value in kwargs.items()}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextmanager
def clear_environment() -> Iterator[None]:
    """No variables at all for a while; those that are set meanwhile are gone afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines ``KEY=value`` for an environment file; what cannot stand in one is left out, of which a warning tells."""
    lines = []
    for key, value in current_env.items():
        if not key or not value or set(";\n<> ") & set(key + value):
            logging.getLogger(__name__).warning("%s=%s cannot stand in an environment file: left out", key, value)
        else:
            lines.append(f"{key}={value}\n")
    return lines
