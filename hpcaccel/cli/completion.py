"""Shell completion without the command line library: commands, options, runs, clusters, partitions, spec keys.

Typer's script calls the program at each press of the tab key. Typer's own completion imports all commands, and pydantic
with them, which takes half a second. This module reads ``completion.json`` instead, which ``make generated`` generates
from the commands and the JSON Schemas.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Offer", "checkpoint_names", "complete", "completed_for_shell", "known_names"]

TABLE = Path(__file__).with_name("completion.json")
MOST_IDS = 50
"""Maximum number of run IDs that are offered."""


class Offer(NamedTuple):
    """A completion, and what it means."""

    text: str
    about: str = ""


def completed_for_shell(request: str, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """The exit code and the output for the completion script of a shell.

    Args:
        request: ``complete_bash``, ``complete_zsh`` or ``complete_fish``, as Typer's script for the shell sets it.
        environ: variables that the script has set.

    Returns:
        None for other requests: those of other shells, and the request for the script itself.
    """
    if request == "complete_bash":
        words = _split(environ.get("COMP_WORDS", ""))
        position = int(environ.get("COMP_CWORD", "0"))
        before, word = words[1:position], words[position] if position < len(words) else ""
        before, word = _joined_at_equals(before, word)
        return 0, "\n".join(offer.text for offer in complete(before, word))
    if request not in ("complete_zsh", "complete_fish"):
        return None
    line = environ.get("_TYPER_COMPLETE_ARGS", "")
    before = _split(line)[1:]
    word = before.pop() if before and not line.endswith(" ") else ""
    offers = complete(before, word)
    if request == "complete_zsh":
        shown = "\n".join(_for_zsh(offer) for offer in offers)
        return 0, f"_arguments '*: :(({shown}))'" if offers else "_files"
    if environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        return (0 if offers else 1), ""
    return 0, "\n".join(f"{offer.text}\t{offer.about}" if offer.about else offer.text for offer in offers)


def _split(line: str) -> list[str]:
    """The words of a command line whose last one may have an open quote."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words += lexer
    except ValueError:
        words.append(lexer.token)
    return words


def _joined_at_equals(before: list[str], word: str) -> tuple[list[str], str]:
    """Words as they were typed: bash splits ``slurm.partition=gpu`` at the sign, and completes the value alone."""
    if word == "=" and before:
        return before[:-1], f"{before[-1]}=\0"
    if len(before) > 1 and before[-1] == "=":
        return before[:-2], f"{before[-2]}=\0{word}"
    return before, word


def _for_zsh(offer: Offer) -> str:
    text, about = (
        one.replace('"', '""').replace("'", "''").replace("$", "\\$").replace("`", "\\`").replace(":", r"\\:")
        for one in offer
    )
    return f'"{text}":"{about}"' if about else f'"{text}"'


def complete(before: Sequence[str], word: str) -> list[Offer]:
    """Completions of the last word of a command line.

    Args:
        before: the words between the program and the last one.
        word: the beginning of the last word. ``KEY=\\0VALUE`` if only the value is replaced.
    """
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    commands: dict[str, Any] = table["commands"]
    name, rest = _command(commands, before)
    below = [key for key in commands if (key.rpartition(" ")[0] == name)]
    if below and not rest and not word.startswith("-"):
        return _matching(((key.rpartition(" ")[2], commands[key]["about"]) for key in below), word)
    if name not in commands:
        return []
    command = commands[name]
    if word.startswith("-"):
        option, equals, value = word.partition("=")
        if not equals:
            return _matching(command["options"].items(), word, with_about=False)
        value = value.lstrip("\0")
        kind = command["options"].get(option, "")
        prefix = "" if "\0" in word else f"{option}="
        return [Offer(prefix + one.text, one.about) for one in _of_kind(kind, value, before, table)]
    if rest and (kind := command["options"].get(rest[-1])):
        return _of_kind(kind, word, before, table)
    return _of_kind(_argument(command, rest), word, before, table)


def _command(commands: Mapping[str, Any], before: Sequence[str]) -> tuple[str, list[str]]:
    """The command, and the words after it."""
    name = ""
    for count, one in enumerate(before):
        longer = f"{name} {one}".strip()
        if longer not in commands:
            return name, list(before[count:])
        name = longer
    return name, []


def _argument(command: Mapping[str, Any], rest: Sequence[str]) -> Any:
    """The kind of the next argument: the last one of a command may be repeated."""
    given, skip = 0, False
    for one in rest:
        if skip:
            skip = False
        elif one.startswith("-") and one != "-":
            skip = bool(command["options"].get(one)) and "=" not in one
        else:
            given += 1
    kinds = command["arguments"]
    if given < len(kinds):
        return kinds[given]
    return kinds[-1] if kinds and command["repeated"] else ""


def _matching(pairs: Iterable[tuple[str, Any]], word: str, *, with_about: bool = True) -> list[Offer]:
    return [Offer(text, str(about) if with_about else "") for text, about in pairs if text.startswith(word)]


def _of_kind(kind: Any, word: str, before: Sequence[str], table: Mapping[str, Any]) -> list[Offer]:
    """Completions of an argument or a value. ``kind`` is a list of values or a name from ``completion.json``."""
    if isinstance(kind, list):
        return _matching(((str(one), "") for one in kind), word)
    if kind == "key":
        return _keys(word, before, table)
    if kind in ("run", "sweep"):
        return known_names(word, only_sweeps=kind == "sweep")
    if kind == "checkpoint":
        return checkpoint_names(word)
    if kind == "cluster":
        return _matching(((name, "") for name in [*_profiles(), "slurm"]), word)
    if kind == "partition":
        return _matching(_partitions(before), word)
    if kind == "topic":
        from hpcaccel.cli.doc_pages import titles

        return _matching(titles().items(), word)
    return []


# -- spec keys ---------------------------------------------------------------------------------------------------------


def _keys(word: str, before: Sequence[str], table: Mapping[str, Any]) -> list[Offer]:
    key, equals, value = word.partition("=")
    if not equals:
        return [Offer(f"{one}=", about["about"]) for one, about in table["keys"].items() if one.startswith(word)]
    known = table["keys"].get(key, {})
    alone = value.startswith("\0")
    found = _of_kind(known.get("values", ""), value.lstrip("\0"), before, table)
    return [Offer(one.text if alone else f"{key}={one.text}", one.about) for one in found]


# -- runs --------------------------------------------------------------------------------------------------------------


def known_names(word: str, *, only_sweeps: bool = False) -> list[Offer]:
    """Names, then ids, of this user's runs (those on clusters behind SSH too), each newest first."""
    names: dict[str, Offer] = {}
    ids: dict[str, Offer] = {}
    for run_id, name in sorted({*_here(only_sweeps), *_there(only_sweeps)}, reverse=True):
        if name.startswith(word):
            names.setdefault(name, Offer(name, f"the latest is {run_id}"))
        if run_id.startswith(word) and len(ids) < MOST_IDS:
            ids.setdefault(run_id, Offer(run_id, name))
    return [*names.values(), *ids.values()]


def _here(only_sweeps: bool) -> Iterator[tuple[str, str]]:
    from hpcaccel.core.registered_runs import index_lines
    from hpcaccel.core.run_dir import default_runs_dir

    paths = [str(line.get("path", "")) for line in index_lines()]
    for folder in _folders(str(default_runs_dir())):
        paths += _folders(folder)
    for path in dict.fromkeys(paths):
        if os.path.exists(os.path.join(path, "sweep.json" if only_sweeps else "record.json")):
            yield os.path.basename(path), os.path.basename(os.path.dirname(path))


def _there(only_sweeps: bool) -> Iterator[tuple[str, str]]:
    from hpcaccel.core.durable_files import read_lines
    from hpcaccel.core.run_dir import state_home

    for line, _ in read_lines(state_home() / "hpcaccel" / "remote-runs.jsonl"):
        if not only_sweeps or line.get("kind", "sweep") == "sweep":
            yield str(line["run_id"]), str(line["name"])


def _folders(place: str) -> list[str]:
    try:
        return sorted(entry.path for entry in os.scandir(place) if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []


def checkpoint_names(word: str) -> list[Offer]:
    """Runs or, after ``RUN@``, the steps of the checkpoints of the latest run with this name or id."""
    run, at, step = word.partition("@")
    if not at:
        return known_names(word)
    from hpcaccel.core.registered_runs import index_lines

    for line in reversed(index_lines()):
        if run in (line.get("run_id"), line.get("name"), line.get("job_id")):
            names = [os.path.basename(one) for one in _folders(os.path.join(str(line["path"]), "checkpoints"))]
            steps = [(str(int(one[5:])), one) for one in names if re.fullmatch(r"step_\d+", one)]
            return [Offer(f"{run}@{number}", one) for number, one in steps if number.startswith(step)]
    return []


# -- clusters ----------------------------------------------------------------------------------------------------------


def _profiles_folder() -> str:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.environ.get("HPCACCEL_PROFILES") or os.path.join(base, "hpcaccel", "clusters")


def _profiles() -> list[str]:
    try:
        found = [entry.removesuffix(".yaml") for entry in os.listdir(_profiles_folder()) if entry.endswith(".yaml")]
    except OSError:
        found = []
    return sorted({"local", *found})


def _partitions(before: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The partitions of the cluster of this command line, else of the default profile, else of all probed clusters."""
    for name in _chosen(before):
        document = _yaml(os.path.join(_profiles_folder(), f"{name}.facts", "facts.yaml"))
        for one in document.get("partitions") or ():
            if isinstance(one, dict) and "name" in one:
                yield str(one["name"]), f"on {name}"


def _chosen(before: Sequence[str]) -> list[str]:
    given = [before[at + 1] for at, one in enumerate(before[:-1]) if one == "--cluster"]
    given += [one.partition("=")[2] for one in before if one.startswith("--cluster=")]
    if given:
        return [name for name in given[-1:] if "/" not in name]
    names = [name for name in _profiles() if name != "local"]
    default = [name for name in names if _yaml(os.path.join(_profiles_folder(), f"{name}.yaml")).get("default")]
    return default[:1] or names


def _yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  (both are safe)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}
