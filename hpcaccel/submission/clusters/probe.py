"""Probing a cluster, and writing a first profile from the result.

A probe runs about fifteen read-only commands. Nothing is submitted or changed on the cluster.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

import hpcaccel
from hpcaccel.core.durable_files import PRIVATE_MODE, atomic_write
from hpcaccel.errors import ClusterError, HpcaccelError, SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import PartitionInfo
from hpcaccel.spec import ClusterProfile
from hpcaccel.spec.cluster.cluster_facts import Containers, NodeType, SiteFacts
from hpcaccel.spec.cluster.cluster_profile import is_profile_name, profiles_directory
from hpcaccel.spec.loading.canonical import write_yaml
from hpcaccel.spec.loading.layers import Layer
from hpcaccel.spec.loading.problems import describe, report
from hpcaccel.spec.yaml12 import PlainScalar, SourceLocation, parse_value
from hpcaccel.submission.clusters import parse_facts
from hpcaccel.submission.clusters.machine import Machine, Run, ask

__all__ = ["completed", "new_profile", "probe", "profile_path", "set_program", "write_profile"]


T = TypeVar("T")


def probe(profile: ClusterProfile, run: Run = subprocess.run, *, now: float | None = None) -> SiteFacts:
    """Collect the facts of a profile's cluster. Unavailable facts are listed in ``unknown``, with the reason.

    Args:
        run: the function that runs programs: ``subprocess.run``, or the ``runner`` of a ``RemoteCluster``.

    Raises:
        ClusterError: the machine has no Slurm or does not respond in time, or the profile is for the local backend.
        SlurmCommandError: the controller does not respond.
    """
    if profile.backend == "local":
        raise ClusterError(f"profile {profile.name!r} uses the local backend, without Slurm: there is nothing to probe")
    run = _naming_host(profile.host, run)
    queries = _Queries(Slurm(run))
    slurm = queries.slurm
    version = slurm.version()
    machine = ask(run, program=_program(profile), paths=[profile.runs_dir] if profile.runs_dir else [])
    settings = parse_facts.config(slurm.config())
    kinds = _kinds(queries)
    names: list[dict[str, str]] = queries.of("scontrol show partition", slurm.partition_records, [])
    accounts = _accounts(queries, machine.user, settings.accounting)
    qos = queries.of("sacctmgr show qos", slurm.qos_table, None) if settings.accounting is not False else None
    return SiteFacts(
        name=profile.name,
        host=profile.host,
        probed_at=time.time() if now is None else now,
        slurm_version=version,
        user=machine.user,
        groups=machine.groups,
        config=settings,
        partitions=parse_facts.partitions(names, kinds),
        node_types=kinds,
        accounts=parse_facts.accounts(accounts or [], settings.cluster_name),
        qos=parse_facts.qos(qos or []),
        containers=Containers(
            pyxis=queries.of("srun --help", slurm.has_pyxis, None),
            enroot=machine.enroot,
            apptainer=machine.apptainer,
            singularity=machine.singularity,
        ),
        quota=machine.quota,
        home=machine.home or None,
        scratch=machine.scratch,
        python=machine.python,
        hpcaccel=hpcaccel.__version__ if profile.host is None else machine.hpcaccel,
        unknown=[*queries.unknown, *_gaps(machine, settings.accounting, empty=accounts == [])],
    )


def _naming_host(host: str | None, run: Run) -> Run:
    """Wrap ``run`` so that the error for a missing program names the login node ``host``."""
    if host is None:
        return run

    def run_there(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        try:
            return run(command, **options)
        except FileNotFoundError:
            raise ClusterError(
                f"{command[0]} was not found on {host!r}. The host must be a login node, and Slurm's commands must be "
                "on PATH in a login shell: if they are in a module, add `module load slurm` to ~/.bash_profile there"
            ) from None

    return run_there


class _Queries:
    """Runs queries that may fail, and collects the failures."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self.unknown: list[str] = []

    def of(self, what: str, query: Callable[[], T], default: T) -> T:
        try:
            return query()
        except HpcaccelError as error:
            reason = " ".join(str(error).split())
            self.unknown.append(f"{what}: {reason[:300]}")
            return default


def _program(profile: ClusterProfile) -> str:
    return profile.hpcaccel or "hpcaccel"


def _accounts(queries: _Queries, user: str, accounting: bool | None) -> list[dict[str, str]] | None:
    if accounting is False or not user:
        return None
    return queries.of("sacctmgr show user", lambda: queries.slurm.association_table(user), None)


def _kinds(queries: _Queries) -> list[NodeType]:
    """The node types, from the records of the nodes, or from sinfo's partitions if the site hides its nodes."""
    rows: list[dict[str, str]] = queries.of("scontrol show node", queries.slurm.node_records, [])
    if rows:
        return parse_facts.node_types(rows)
    partitions: list[PartitionInfo] = queries.of("sinfo", queries.slurm.partitions, [])
    return [_kind_of(one) for one in partitions if one.nodes]


def _kind_of(partition: PartitionInfo) -> NodeType:
    kinds = partition.gpu_types
    gpus = {kinds[0] if len(kinds) == 1 else "gpu": partition.gpus_per_node} if partition.gpus_per_node else {}
    return NodeType(
        name=f"nodes-of-{partition.name}",
        gpus=gpus,
        cpus=partition.cpus_per_node,
        memory_mb=partition.memory_mb_per_node,
        count=partition.nodes,
    )


def _gaps(machine: Machine, accounting: bool | None, *, empty: bool) -> list[str]:
    found = []
    if accounting is False:
        found.append("accounts and QOS: this cluster has no accounting (AccountingStorageType is none)")
    elif empty:
        found.append(f"accounts: sacctmgr lists none for user {machine.user!r}")
    if not any(one.source != "df" for one in machine.quota):
        found.append(
            "your own quota: neither `lfs quota` nor `quota` reports one; the values are for whole file systems"
        )
    return found


RESERVED = ("local", "slurm")
"""Values of --cluster that need no profile."""


def profile_path(name: str) -> Path:
    return profiles_directory() / f"{name}.yaml"


def new_profile(name: str, *, host: str | None, default: bool, settings: Sequence[str]) -> dict[str, Any]:
    """The values of a new profile.

    Args:
        settings: ``key=value`` texts with keys of a profile: ``slurm.account=abc``, ``env.NCCL_DEBUG=WARN``.

    Raises:
        SpecError: the name is taken or not allowed, or a setting is invalid.
    """
    if not is_profile_name(name) or name in RESERVED:
        raise SpecError(
            f"{name!r} is not a valid profile name: use at most 64 letters, digits, '.', '_' and '-', starting with a "
            f"letter or digit, and not {' or '.join(map(repr, RESERVED))}"
        )
    if profile_path(name).exists():
        raise SpecError(f"profile {name!r} already exists: edit {profile_path(name)}, or delete it first")
    values: dict[str, Any] = {"host": host} if host is not None else {}
    if default:
        values["default"] = True
    for setting in settings:
        _put(values, setting)
    validated(name, values)
    return values


def validated(name: str, values: dict[str, Any]) -> ClusterProfile:
    """Build and validate a profile. Raises SpecError with one line per problem."""
    try:
        return ClusterProfile.model_validate({"name": name, **values})
    except ValidationError as error:
        raise SpecError(report(describe(error, ClusterProfile, Layer(values), "--set"))) from None


def _put(values: dict[str, Any], setting: str) -> None:
    dotted, equals, text = setting.partition("=")
    section, dot, key = dotted.partition(".")
    if not equals or not section or (dot and not key):
        raise SpecError(
            f"--set {setting!r} is not of the form key=value (such as slurm.account=abc or runs_dir=/scratch/me)"
        )
    document = parse_value(text, SourceLocation(f"--set {setting}"))
    if document.problems:
        raise SpecError([str(problem) for problem in document.problems])
    if not dot:
        values[section] = _plain(document.value)
        return
    inside = values.setdefault(section, {})
    if section == "environment" and key.startswith("env.") and isinstance(inside, dict):
        section, inside, key = "environment.env", inside.setdefault("env", {}), key.removeprefix("env.")
    if not isinstance(inside, dict):
        raise SpecError(
            f"--set {setting!r}: {section} is already set to {inside!r}, which has no keys: remove one of the two"
        )
    inside[key] = _plain(document.value)


def _plain(value: Any) -> Any:
    """The value to write: a number whose spelling would change (0123) stays text."""
    if isinstance(value, PlainScalar):
        return value.value if str(value.value) == value.text or isinstance(value.value, bool) else value.text
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def completed(values: dict[str, Any], facts: SiteFacts) -> tuple[dict[str, Any], list[str]]:
    """Add missing values from the facts. Returns all values, and a note for each added value."""
    filled = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    notes = []
    if "runs_dir" not in filled and facts.scratch:
        filled["runs_dir"] = f"{facts.scratch[0]}/hpcaccel-runs"
        notes.append(f"runs_dir: {filled['runs_dir']} (in your scratch directory)")
    elif "runs_dir" not in filled and "host" in filled:
        filled["runs_dir"] = "~/hpcaccel-runs"
        notes.append(
            "runs_dir: ~/hpcaccel-runs (no scratch directory was found: check the space in your home directory)"
        )
    names = sorted({account.account for account in facts.accounts})
    slurm = filled.get("slurm", {})
    if "account" not in slurm and len(names) == 1 and not any(account.default for account in facts.accounts):
        filled["slurm"] = {**slurm, "account": names[0]}
        notes.append(f"slurm.account: {names[0]} (your only account)")
    return filled, notes


def write_profile(name: str, values: dict[str, Any]) -> Path:
    """Write the file of a new profile, readable by the user only: a profile may contain private paths and variables."""
    path = profile_path(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    head = (
        f"# Cluster profile {name}: site defaults, which job specs override. `hpcaccel cluster check {name}` compares\n"
        "# it with the stored facts about the cluster. Keys: backend, default, host, hpcaccel, runs_dir, slurm,\n"
        "# environment, env, exclude, templates.\n"
    )
    atomic_write(path, head + (write_yaml(values) if values else f"name: {name}\n"), mode=PRIVATE_MODE)
    return path


def set_program(profile: ClusterProfile, program: str) -> bool:
    """Record the path of hpcaccel in a profile that has none. Returns whether ``program`` is now recorded."""
    if profile.hpcaccel is not None or profile.source is None:
        return profile.hpcaccel == program
    text = profile.source.read_text(encoding="utf-8")
    atomic_write(profile.source, f"{text.rstrip()}\n{write_yaml({'hpcaccel': program})}", mode=PRIVATE_MODE)
    return True
