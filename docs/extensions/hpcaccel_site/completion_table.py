"""``hpcaccel/cli/completion.json``: commands, options and spec keys, for completion without Typer."""

from __future__ import annotations

import json
from typing import Any

from hpcaccel.spec import schema, sweep_schema
from hpcaccel_site.command_reference import commands

__all__ = ["completion_table"]

KINDS = {
    "run": "run", "runs": "run", "after": "run", "sweep": "sweep", "from_": "checkpoint", "checkpoint": "checkpoint",
    "place": "checkpoint", "places": "checkpoint", "source": "checkpoint", "cluster": "cluster",
    "partition": "partition", "overrides": "key", "grid": "key", "topic": "topic",
}  # fmt: skip
"""What completes a parameter, by its name."""
PARTITION_KEYS = ("slurm.partition",)


def completion_table() -> str:
    """The table as JSON, one entry a line."""
    known = {name.removeprefix("hpcaccel "): _command(name, command) for name, command, _ in commands()}
    keys = {**_keys(sweep_schema()), **_keys(schema())}
    parts = [f'  "{part}": {{\n{_lines(rows)}\n  }}' for part, rows in (("commands", known), ("keys", keys))]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(rows: dict[str, Any]) -> str:
    return ",\n".join(
        f"    {json.dumps(key)}: {json.dumps(row, ensure_ascii=False)}" for key, row in sorted(rows.items())
    )


def _command(name: str, command: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"--help": ""}
    arguments = []
    for parameter in command.params:
        kind = _kind(name, parameter)
        if parameter.param_type_name == "argument":
            arguments.append((kind, parameter.nargs))
        elif not parameter.hidden:
            takes = not (parameter.is_flag or getattr(parameter, "count", False))
            options |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], kind or "value" if takes else "")
    return {
        "about": " ".join((command.help or "").split("\n\n")[0].split()),
        "arguments": [kind for kind, _ in arguments],
        "repeated": bool(arguments) and arguments[-1][1] == -1,
        "options": options,
    }


def _kind(name: str, parameter: Any) -> Any:
    if name.startswith("hpcaccel cluster ") and parameter.name == "name" and not name.endswith(" add"):
        return "cluster"
    choices = getattr(getattr(parameter, "type_descriptor", None), "choices", None)
    return list(choices) if choices else KINDS.get(parameter.name, "")


def _keys(made: dict[str, Any], at: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """Each key of a spec file with its values, as far as a shell can offer them."""
    found: dict[str, Any] = {}
    for name, field in (at or made).get("properties", {}).items():
        if not prefix and name in ("spec_version", "extends"):
            continue
        key = prefix + name
        forms = [_resolved(made, form) for form in field.get("anyOf", field.get("allOf", [field]))]
        about = str(field.get("description", "")).partition(". ")[0]
        sections = [form for form in forms if "properties" in form]
        if sections:
            found |= _keys(made, sections[0], f"{key}.")
            continue
        values: Any = [
            value for form in forms for value in form.get("enum", [form["const"]] if "const" in form else [])
        ]
        if any(form.get("type") == "boolean" for form in forms):
            values += ["true", "false"]
        entry: dict[str, Any] = {"about": about}
        if key in PARTITION_KEYS:
            entry["values"] = "partition"
        elif values:
            entry["values"] = [str(value) for value in values if value is not None]
        found[key] = entry
    return found


def _resolved(made: dict[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    name = str(form.get("$ref", "")).removeprefix("#/$defs/")
    return made["$defs"][name] if name else form
