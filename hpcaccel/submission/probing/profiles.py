"""Writing a first profile: what the user says, and what the cluster itself told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcaccel.core.run_dir import PRIVATE_MODE, atomic_write
from hpcaccel.errors import SpecError
from hpcaccel.spec import ClusterProfile
from hpcaccel.spec.canonical import write_yaml
from hpcaccel.spec.cluster_profile import is_profile_name, profiles_directory
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.problems import describe, report
from hpcaccel.spec.site import SiteFacts
from hpcaccel.spec.yaml12 import Place, Plain, parse_value

__all__ = ["completed", "new_profile", "profile_path", "set_program", "write_profile"]

RESERVED = ("local", "slurm")
"""What --cluster takes without any profile."""


def profile_path(name: str) -> Path:
    return profiles_directory() / f"{name}.yaml"


def new_profile(name: str, *, host: str | None, default: bool, settings: Sequence[str]) -> dict[str, Any]:
    """The values of a profile that is not there yet.

    Args:
        settings: ``key=value`` with the profile's own keys: ``slurm.account=abc``, ``env.NCCL_DEBUG=WARN``.

    Raises:
        SpecError: the name is taken or can be none, or a setting is wrong.
    """
    if not is_profile_name(name) or name in RESERVED:
        raise SpecError(
            f"{name!r} can be no profile's name: letters, digits, '.', '_' and '-', at most 64, and not "
            f"{' or '.join(RESERVED)}"
        )
    if profile_path(name).exists():
        raise SpecError(f"there is a profile {name!r} already: edit {profile_path(name)}, or remove it first")
    values: dict[str, Any] = {"host": host} if host is not None else {}
    if default:
        values["default"] = True
    for setting in settings:
        _put(values, setting)
    validated(name, values)
    return values


def validated(name: str, values: dict[str, Any]) -> ClusterProfile:
    """Raises SpecError, with a line for each thing that is wrong."""
    try:
        return ClusterProfile.model_validate({"name": name, **values})
    except ValidationError as error:
        raise SpecError(report(describe(error, ClusterProfile, Layer(values), "--set"))) from None


def _put(values: dict[str, Any], setting: str) -> None:
    dotted, equals, text = setting.partition("=")
    section, dot, key = dotted.partition(".")
    if not equals or not section or (dot and not key):
        raise SpecError(f"--set {setting!r}: write key=value, such as slurm.account=abc or runs_dir=/scratch/me/runs")
    document = parse_value(text, Place(f"--set {setting}"))
    if document.problems:
        raise SpecError([str(problem) for problem in document.problems])
    if not dot:
        values[section] = _plain(document.value)
        return
    inside = values.setdefault(section, {})
    if section == "environment" and key.startswith("env."):
        inside, key = inside.setdefault("env", {}), key.removeprefix("env.")
    if not isinstance(inside, dict):
        raise SpecError(f"--set {setting!r}: {section} has a value of its own, and no keys below it")
    inside[key] = _plain(document.value)


def _plain(value: Any) -> Any:
    """For writing: a number whose spelling says more than its value (0123) stays text."""
    if isinstance(value, Plain):
        return value.value if str(value.value) == value.text or isinstance(value.value, bool) else value.text
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def completed(values: dict[str, Any], facts: SiteFacts) -> tuple[dict[str, Any], list[str]]:
    """The values with what the facts settle, and a sentence for each thing that was settled so."""
    filled = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    told = []
    if "runs_dir" not in filled and facts.scratch:
        filled["runs_dir"] = f"{facts.scratch[0]}/hpcaccel-runs"
        told.append(f"runs_dir: {filled['runs_dir']} (in your scratch directory)")
    elif "runs_dir" not in filled and "host" in filled:
        filled["runs_dir"] = "~/hpcaccel-runs"
        told.append("runs_dir: ~/hpcaccel-runs (no scratch directory was found: see whether your home has the room)")
    names = sorted({account.account for account in facts.accounts})
    slurm = filled.get("slurm", {})
    if "account" not in slurm and len(names) == 1 and not any(account.default for account in facts.accounts):
        filled["slurm"] = {**slurm, "account": names[0]}
        told.append(f"slurm.account: {names[0]} (the only one that you have)")
    return filled, told


def write_profile(name: str, values: dict[str, Any]) -> Path:
    """A new profile's file, readable by the user alone: paths and variables of a site are nobody else's."""
    path = profile_path(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    head = (
        f"# Cluster profile {name}: defaults of the site, below what a job spec sets. `hpcaccel cluster check {name}`\n"
        "# compares it with the cluster. Keys: host, runs_dir, slurm, environment, env, exclude, templates.\n"
    )
    atomic_write(path, head + (write_yaml(values) if values else f"name: {name}\n"), mode=PRIVATE_MODE)
    return path


def set_program(profile: ClusterProfile, program: str) -> bool:
    """Write down where hpcaccel is on the cluster, unless the profile says so already; False: it says otherwise."""
    if profile.hpcaccel is not None or profile.source is None:
        return profile.hpcaccel == program
    text = profile.source.read_text(encoding="utf-8")
    atomic_write(profile.source, f"{text.rstrip()}\n{write_yaml({'hpcaccel': program})}", mode=PRIVATE_MODE)
    return True
