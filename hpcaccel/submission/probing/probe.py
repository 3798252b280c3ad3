"""All that can be found out of a cluster, in some fifteen questions; nothing is submitted, nothing is changed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hpcaccel
from hpcaccel.errors import ClusterError, HpcaccelError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.states import PartitionInfo
from hpcaccel.spec import ClusterProfile
from hpcaccel.spec.site import Containers, NodeType, SiteFacts
from hpcaccel.submission.probing import parse_facts
from hpcaccel.submission.probing.machine import Machine, Run, ask

__all__ = ["probe"]

T = TypeVar("T")


def probe(profile: ClusterProfile, run: Run = subprocess.run, *, now: float | None = None) -> SiteFacts:
    """What the cluster of ``profile`` is like. Facts that it does not tell are in ``unknown``, with the reason.

    Args:
        run: starts the programs that answer: ``subprocess.run``, or the ``runner`` of a connection to a login node.

    Raises:
        ClusterError: there is no Slurm there, or the profile is of the local backend.
        SlurmCommandError: the controller does not answer.
    """
    if profile.backend == "local":
        raise ClusterError(f"profile {profile.name!r} runs jobs on this machine, without Slurm: nothing to probe")
    run = _there(profile.host, run)
    asked = _Asked(Slurm(run))
    slurm = asked.slurm
    version = slurm.version()
    machine = ask(run, program=_program(profile), paths=[profile.runs_dir] if profile.runs_dir else [])
    settings = parse_facts.config(slurm.config())
    kinds = _kinds(asked)
    names: list[dict[str, str]] = asked.of("scontrol show partition", slurm.partition_records, [])
    accounts = _accounts(asked, machine.user, settings.accounting)
    qos = asked.of("sacctmgr show qos", slurm.qos_table, None) if settings.accounting is not False else None
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
            pyxis=asked.of("srun --help", slurm.has_pyxis, None),
            enroot=machine.enroot,
            apptainer=machine.apptainer,
            singularity=machine.singularity,
        ),
        quota=machine.quota,
        home=machine.home or None,
        scratch=machine.scratch,
        python=machine.python,
        hpcaccel=hpcaccel.__version__ if profile.host is None else machine.hpcaccel,
        unknown=[*asked.unknown, *_gaps(machine, settings.accounting, empty=accounts == [])],
    )


def _there(host: str | None, run: Run) -> Run:
    """A program that is missing is missing on the login node, not here."""
    if host is None:
        return run

    def asking(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        try:
            return run(command, **options)
        except FileNotFoundError:
            raise ClusterError(
                f"there is no {command[0]} on {host}: a login shell there must find Slurm's programs. Is it a login "
                "node? A line such as `module load slurm` in ~/.bash_profile there may be missing"
            ) from None

    return asking


class _Asked:
    """Questions that may stay without an answer."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self.unknown: list[str] = []

    def of(self, what: str, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except HpcaccelError as error:
            reason = " ".join(str(error).split())
            self.unknown.append(f"{what}: {reason[:300]}")
            return otherwise


def _program(profile: ClusterProfile) -> str:
    return profile.hpcaccel or "hpcaccel"


def _accounts(asked: _Asked, user: str, accounting: bool | None) -> list[dict[str, str]] | None:
    if accounting is False or not user:
        return None
    return asked.of("sacctmgr show user", lambda: asked.slurm.association_table(user), None)


def _kinds(asked: _Asked) -> list[NodeType]:
    """From the nodes themselves; where a site does not show them, what sinfo says of each partition."""
    rows: list[dict[str, str]] = asked.of("scontrol show node", asked.slurm.node_records, [])
    if rows:
        return parse_facts.node_types(rows)
    partitions: list[PartitionInfo] = asked.of("sinfo", asked.slurm.partitions, [])
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
        found.append("accounts and QOS: this cluster keeps no accounts (AccountingStorageType is none)")
    elif empty:
        found.append(f"accounts: sacctmgr shows none for {machine.user}")
    if not any(one.source != "df" for one in machine.quota):
        found.append("your own quota: neither `lfs quota` nor `quota` tells one; the numbers are of whole file systems")
    return found
