"""The names that a template may use, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcaccel.core.run_dir import RunDir, SweepDir
from hpcaccel.errors import SpecError
from hpcaccel.render.quoting import pattern
from hpcaccel.spec.component_fields import ComponentSlurm
from hpcaccel.spec.slurm import Slurm

if TYPE_CHECKING:
    from hpcaccel.spec.cluster_profile import ClusterProfile
    from hpcaccel.spec.job import JobSpec

__all__ = ["VARIABLES_OF_BASH", "template_names"]

VARIABLES_OF_BASH = frozenset(
    """
    BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_LINENO BASH_REMATCH
    BASH_SOURCE BASH_SUBSHELL BASH_VERSINFO DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD LINENO
    OLDPWD OPTIND PIPESTATUS PPID PWD RANDOM SECONDS SHELLOPTS SHLVL SRANDOM UID _
    """.split()  # noqa: SIM905
)
"""Variables that bash sets by itself or does not let anybody set."""


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
    """Every name that a template sees.

    Raises:
        SpecError: a value that bash or Slurm could not be given.
    """
    slurm = backend == "slurm"
    environment = spec.environment
    _refuse_variables_of_bash([*environment.env, *environment.secrets, *(profile.env if profile else {})])
    return {
        "spec": spec,
        "profile": profile,
        "slurm": slurm,  # False on the local backend
        "array": array_size is not None,
        "sweep": isinstance(run_dir, SweepDir),  # an array too, of workers
        "header": [f"hpcaccel job {spec.name}", *(f"{key}: {value}" for key, value in header.items())],
        "directives": _directives(spec, run_dir, array_size, profile.exclude if profile else []) if slurm else [],
        "components": _components(spec, profile.exclude if profile else []) if slurm else [],
        "expedite": slurm and _requeue(spec) == ("requeue", "expedite"),
        "run_dir": str(run_dir.path),  # of an array or a sweep: the parent folder
        "python": python,
        "workdir": workdir,
        "modules": environment.modules,
        "conda": environment.conda,
        "venv": environment.venv,
        "setup": environment.setup,
        "env": list(environment.env.items()),
        "site_env": list(profile.env.items()) if profile else [],
        "secrets": environment.secrets,
        "cpus_per_task": spec.slurm.cpus_per_task,
        "threads": spec.slurm.cpus_per_task or 1,
    }


def _directives(
    spec: JobSpec, run_dir: RunDir, array_size: int | None, left_out: Sequence[str]
) -> list[tuple[str, str | None]]:
    """sbatch's long options and their values; None for an option without one.

    Args:
        left_out: nodes that no job of the site's profile may use.
    """
    log = run_dir.slurm_log if array_size is None else run_dir.tasks / "ARRAY" / run_dir.slurm_log.name
    output = pattern(str(log)) if array_size is None else pattern(str(log.parent.parent)) + f"/%a/{log.name}"
    options: list[tuple[str, str | None]] = [("job-name", spec.name), *_nodes(spec, left_out)]
    options.append(_requeue(spec))
    options.append(("signal", f"B:USR2@{spec.warning_seconds}"))
    options.append(("open-mode", "append"))
    options.append(("output", output))
    if array_size is not None:
        options.append(("array", f"0-{array_size - 1}"))
    options.append(("export", ",".join(spec.environment.secrets) or "NONE"))
    return options


def _components(spec: JobSpec, left_out: Sequence[str]) -> list[list[tuple[str, str | None]]]:
    """The same for each further component of a heterogeneous job: what Slurm does not take over from the first."""
    kept = {"time", "time-min", *(name.replace("_", "-") for name in ComponentSlurm.model_fields)}
    jobs_own = {name.replace("_", "-") for name in Slurm.model_fields} - kept
    found = []
    for name in spec.components:
        options = [option for option in _nodes(spec.of_component(name), left_out) if option[0] not in jobs_own]
        # Without --export Slurm would keep all of the submitter's environment with each component, secrets too. What
        # its processes get comes from the batch script, as with the ranks.
        found.append([*options, _requeue(spec), ("export", "NONE")])
    return found


def _nodes(spec: JobSpec, left_out: Sequence[str]) -> list[tuple[str, str | None]]:
    exclude = ",".join([*([spec.slurm.exclude] if spec.slurm.exclude else []), *left_out])
    return spec.slurm.model_copy(update={"exclude": exclude or None}).flags()


def _requeue(spec: JobSpec) -> tuple[str, str | None]:
    if not spec.resilience.requeue or spec.resilience.chain:
        return "no-requeue", None
    return "requeue", "expedite" if spec.resilience.requeue == "expedite" else None


def _refuse_variables_of_bash(names: list[str]) -> None:
    problems = [
        f"environment.env.{name}: bash sets {name} itself: use another name"
        for name in names
        if name in VARIABLES_OF_BASH
    ]
    problems += [
        f"environment.env.{name}: is used by the batch script" for name in names if name.startswith("hpcaccel_")
    ]
    if problems:
        raise SpecError(problems)
