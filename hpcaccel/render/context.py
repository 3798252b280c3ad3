"""The variables of the batch script template, and quoting that preserves each value byte for byte.

Values that cannot be quoted are rejected: a line break would start a new script line, and a NUL would end the value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import SpecError
from hpcaccel.spec.job.component_fields import ComponentSlurmSection
from hpcaccel.spec.job.slurm import SlurmSection

if TYPE_CHECKING:
    from hpcaccel.spec.cluster.cluster_profile import ClusterProfile
    from hpcaccel.spec.job.job_spec import JobSpec

__all__ = ["VARIABLES_OF_BASH", "checked", "comment", "directive", "pattern", "shell", "template_names"]


VARIABLES_OF_BASH = frozenset(
    """
    BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_LINENO BASH_REMATCH
    BASH_SOURCE BASH_SUBSHELL BASH_VERSINFO DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD LINENO
    OLDPWD OPTIND PIPESTATUS PPID PWD RANDOM SECONDS SHELLOPTS SHLVL SRANDOM UID _
    """.split()  # noqa: SIM905
)
"""Variables that bash sets itself, or that are read-only in bash."""


def template_names(
    spec: JobSpec,
    *,
    run_dir: RunDir,
    python: str,
    workdir: str,
    profile: ClusterProfile | None,
    array_size: int | None,
    backend: str,
    header: Mapping[str, object],
) -> dict[str, Any]:
    """All template variables, by name.

    Raises:
        SpecError: an environment variable's name or the run directory's path is not allowed.
    """
    slurm = backend == "slurm"
    environment = spec.environment
    _refuse_variables_of_bash([*environment.env, *environment.secrets, *(profile.env if profile else {})])
    return {
        "spec": spec,
        "profile": profile,
        "slurm": slurm,  # False on the local backend
        "array": array_size is not None,
        "sweep": isinstance(run_dir, SweepDir),  # a sweep is also an array, of workers
        "header": [f"hpcaccel job {spec.name}", *(f"{key}: {value}" for key, value in header.items())],
        "directives": _directives(spec, run_dir, array_size, profile.exclude if profile else []) if slurm else [],
        "components": _components(spec, profile.exclude if profile else []) if slurm else [],
        "expedite": slurm and _requeue(spec) == ("requeue", "expedite"),
        "run_dir": str(run_dir.path),  # for an array or a sweep, the directory of the whole array or sweep
        "python": python,
        "workdir": workdir,
        "modules": environment.modules,
        "conda": environment.conda,
        "venv": environment.venv,
        "setup": environment.setup,
        "shared": spec.sharing is not None,
        "env": list(environment.env.items()),
        "site_env": list(profile.env.items()) if profile else [],
        "secrets": environment.secrets,
        "cpus_per_task": spec.slurm.cpus_per_task,
        "threads": spec.slurm.cpus_per_task or 1,
    }


def _directives(
    spec: JobSpec, run_dir: RunDir, array_size: int | None, left_out: Sequence[str]
) -> list[tuple[str, str | None]]:
    """The long options for sbatch, each with its value (None if the option takes none).

    Args:
        left_out: nodes that the profile excludes for all jobs.
    """
    log = run_dir.slurm_log if array_size is None else run_dir.tasks / "ARRAY" / run_dir.slurm_log.name
    output = pattern(str(log)) if array_size is None else pattern(str(log.parent.parent)) + f"/%a/{log.name}"
    options: list[tuple[str, str | None]] = [("job-name", spec.name), *_nodes(spec, left_out)]
    options += spec.notify.mail_options()
    options.append(_requeue(spec))
    if spec.resilience.outlives_nodes:
        options.append(("no-kill", None))
    options.append(("signal", f"B:USR2@{spec.warning_seconds}"))
    options.append(("open-mode", "append"))
    options.append(("output", output))
    if array_size is not None:
        options.append(("array", f"0-{array_size - 1}"))
    options.append(("export", ",".join(spec.environment.secrets) or "NONE"))
    return options


def _components(spec: JobSpec, left_out: Sequence[str]) -> list[list[tuple[str, str | None]]]:
    """The sbatch options of each component of a heterogeneous job except the first, without the options that Slurm
    copies from the first."""
    kept = {"time", "time-min", *(name.replace("_", "-") for name in ComponentSlurmSection.model_fields)}
    jobs_own = {name.replace("_", "-") for name in SlurmSection.model_fields} - kept
    found = []
    for name in spec.components:
        options = [option for option in _nodes(spec.of_component(name), left_out) if option[0] not in jobs_own]
        # Without --export, Slurm would store the submitter's whole environment with each component, including secrets.
        # A component's processes get their environment from the batch script, as the ranks do.
        found.append([*options, _requeue(spec), ("export", "NONE")])
    return found


def _nodes(spec: JobSpec, left_out: Sequence[str]) -> list[tuple[str, str | None]]:
    exclude = ",".join([*([spec.slurm.exclude] if spec.slurm.exclude else []), *left_out])
    return spec.with_spare_nodes().slurm.model_copy(update={"exclude": exclude or None}).flags()


def _requeue(spec: JobSpec) -> tuple[str, str | None]:
    if not spec.resilience.requeue or spec.resilience.chain:
        return "no-requeue", None
    return "requeue", "expedite" if spec.resilience.requeue == "expedite" else None


def _refuse_variables_of_bash(names: list[str]) -> None:
    problems = [
        f"environment variable {name}: bash sets it itself; use another name"
        for name in names
        if name in VARIABLES_OF_BASH
    ]
    problems += [
        f"environment variable {name}: the prefix hpcaccel_ is reserved for the batch script; use another name"
        for name in names
        if name.startswith("hpcaccel_")
    ]
    if problems:
        raise SpecError(problems)


_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+-]+", re.ASCII)
"""Values that need no quotes on an ``#SBATCH`` line."""


def checked(value: object) -> str:
    """Convert a value to text that fits on one line.

    Raises:
        SpecError: the value contains a line break, NUL or invalid Unicode, or is neither text nor a number.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise SpecError(
            f"{value!r} cannot be written into a batch script: only strings and numbers can. Test other values with a "
            "condition such as {% if spec.workdir %}, and write the fields of a section one by one"
        )
    text = str(value)
    found = re.search(r"[\0\n\r\ud800-\udfff]", text)
    if found is None:
        return text
    what = {"\0": "a NUL character", "\n": "a line break", "\r": "a carriage return"}.get(found[0], "invalid Unicode")
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    raise SpecError(f"{shown!r} contains {what}, which is not allowed in a batch script: remove it")


def shell(value: object) -> str:
    """Quote a value as one shell word."""
    return shlex.quote(checked(value))


def directive(value: object) -> str:
    """Quote the value of an option on an ``#SBATCH`` line.

    sbatch splits these lines into words itself: quotes preserve blanks and ``#``, a backslash escapes the next
    character, even inside quotes of either kind, and nothing is expanded (tested with Slurm 22.05).
    """
    text = checked(value)
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def comment(value: object) -> str:
    """Text for a comment line, with control characters and line breaks replaced by blanks."""
    text = str(value).encode("utf-8", "replace").decode()
    return re.sub(r"[\0-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)


def pattern(path: str) -> str:
    """Escape a path for ``--output``, where Slurm expands ``%j`` and similar patterns.

    Raises:
        SpecError: the path contains a backslash, which Slurm would remove, or does not fit on one line.
    """
    if "\\" in path:
        raise SpecError(
            f"the run directory {path!r} contains a backslash, which Slurm removes from log paths: choose another one"
        )
    return checked(path).replace("%", "%%")
