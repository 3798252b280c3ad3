"""Snapshots of the public interface: names with parameters, commands with options, fields of spec files.

``HPCACCEL_RECORD=1 pytest tests/test_snapshots.py`` records them again; the diff then shows the changes.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcaccel

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOTS = ROOT / "tests" / "data" / "snapshots"
COLUMNS = 100


def is_as_recorded(name: str, text: str) -> bool:
    kept = SNAPSHOTS / name
    if os.environ.get("HPCACCEL_RECORD"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text)
    return text == kept.read_text()


@pytest.mark.torch
def test_public_names_and_parameters_are_as_recorded() -> None:
    code = "from tests.test_snapshots import public_names; print(public_names())"  # other tests change classes
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    assert is_as_recorded("names.json", found.stdout)


def public_names() -> str:
    found: dict[str, Any] = {}
    for name in sorted(hpcaccel.__all__):
        value = getattr(hpcaccel, name)
        found[name] = parameters(value)
        if inspect.isclass(value):
            found |= {f"{name}.{member}": shown for member, shown in members(value)}
    return json.dumps(found, indent=1)


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Public members that hpcaccel defines."""
    for name in sorted(dir(kind)):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and owner.__module__.startswith("hpcaccel"):
            yield name, parameters(inspect.getattr_static(kind, name))


def parameters(value: Any) -> str:
    """Names, kinds and defaults; annotations are free to change."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property) or not callable(value):
        return "attribute"
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return "callable"
    return "(" + ", ".join(str(one.replace(annotation=inspect.Parameter.empty)) for one in found) + ")"


def test_commands_and_options_are_as_recorded() -> None:
    import typer

    from hpcaccel.cli.main import program

    pages = list(help_pages(typer.main.get_command(program()), "hpcaccel", None))
    assert is_as_recorded("help.txt", "\n\n".join(pages) + "\n")


def help_pages(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=COLUMNS)
    yield f"$ {context.command_path} --help\n{command.get_help(context)}"
    for part in sorted(getattr(command, "commands", {})):
        yield from help_pages(command.commands[part], part, context)


@pytest.mark.parametrize("kind", ["job", "sweep"])
def test_fields_of_spec_files_are_as_recorded(kind: str) -> None:
    """The schema files in docs/ contain them; this test notices that one was added or removed."""
    schema = json.loads((ROOT / "docs" / f"{kind}.schema.json").read_text())
    found = sorted(set(fields(schema)))
    assert is_as_recorded(f"{kind}-fields.json", json.dumps(found, indent=1) + "\n")


def fields(schema: Any, path: str = "") -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties":
                yield from (f"{path}.{name}".lstrip(".") for name in value)
            step = key.removesuffix("Section")  # suffix of the class of a section
            yield from fields(value, f"{path}.{step}" if key not in ("properties", "$defs") else path)
    elif isinstance(schema, list):
        for value in schema:
            yield from fields(value, path)
