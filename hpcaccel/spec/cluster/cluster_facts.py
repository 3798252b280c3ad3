"""Cluster facts: the description of a cluster that ``hpcaccel cluster probe`` collects.

A profile has the user's defaults for a cluster; the facts describe the cluster itself. The facts are stored beside the
profile in ``$XDG_CONFIG_HOME/hpcaccel/clusters/<name>.facts/facts.yaml``. This file is for reading, not for editing,
because a new probe replaces it. ``unknown`` lists the facts that could not be determined, with the reasons.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from hpcaccel.core.durable_files import PRIVATE_MODE, atomic_write
from hpcaccel.errors import SpecError
from hpcaccel.spec.cluster.cluster_profile import is_profile_name, profiles_directory
from hpcaccel.spec.cluster.facts_sections import Account, Containers, NodeType, Partition, Qos, Quota, SiteConfig
from hpcaccel.spec.job.fields import Natural, Positive, Section, Text, Word, text_list
from hpcaccel.spec.loading.canonical import write_yaml
from hpcaccel.spec.loading.layers import Layer, read_document
from hpcaccel.spec.loading.problems import describe, report
from hpcaccel.spec.yaml12 import PlainScalar

__all__ = [
    "FACTS_VERSION",
    "Account",
    "Containers",
    "NodeType",
    "Partition",
    "Qos",
    "Quota",
    "SiteConfig",
    "SiteFacts",
    "facts_path",
    "format_age",
    "load_facts",
    "store_facts",
]

FACTS_VERSION = 1
"""Incremented when the format becomes incompatible with the previous version."""


def format_age(seconds: float) -> str:
    """An age as text for messages, in the largest suitable unit: ``3 days``, ``5 minutes``."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"


class SiteFacts(Section):
    """The facts that one probe collected about a cluster."""

    version: Natural = Field(default=FACTS_VERSION, description="Version of the file format.")
    name: Word = Field(description="Name of the cluster profile.")
    host: Word | None = Field(
        default=None, description="Login node through which the facts were read; null: the probe ran on the cluster."
    )
    probed_at: Positive = Field(description="Time of the probe, in seconds since 1970 (UTC).")
    slurm_version: Text = Field(description="Version of Slurm, such as 23.11.4.")
    user: Text = Field(default="", description="The user whose accounts, groups and quotas are listed.")
    groups: list[Word] = text_list("The user's Unix groups, for AllowGroups of partitions.")
    config: SiteConfig = Field(default_factory=SiteConfig, description="Slurm configuration of the cluster.")
    partitions: list[Partition] = Field(default_factory=list, description="Partitions that the user may see.")
    node_types: list[NodeType] = Field(default_factory=list, description="Node types.")
    accounts: list[Account] = Field(
        default_factory=list, description="Accounts of the user; empty without accounting, or if not reported."
    )
    qos: list[Qos] = Field(default_factory=list, description="QOS of the cluster.")
    containers: Containers = Field(default_factory=Containers, description="Container runtimes.")
    quota: list[Quota] = Field(default_factory=list, description="Quotas on the relevant file systems.")
    home: Text | None = Field(default=None, description="The user's home directory on the cluster.")
    scratch: list[Word] = text_list("The user's directories for large files, from variables such as $SCRATCH.")
    python: Text | None = Field(default=None, description="Version of the python3 that the login shell finds.")
    hpcaccel: Text | None = Field(default=None, description="Version of hpcaccel on the cluster; null: not found.")
    unknown: list[Text] = Field(default_factory=list, description="What could not be determined, and why.")

    def age_seconds(self, now: float | None = None) -> float:
        """Seconds since the probe; 0 if the probe's time is in the future because the clocks of two machines differ."""
        return max((time.time() if now is None else now) - self.probed_at, 0.0)

    def age_text(self, now: float | None = None) -> str:
        """The facts' age as text for messages: ``3 days``, ``5 minutes``."""
        return format_age(self.age_seconds(now))

    def partition(self, name: str) -> Partition | None:
        return next((one for one in self.partitions if one.name == name), None)

    @property
    def default_partition(self) -> Partition | None:
        """The default partition, or None if Slurm has none."""
        return next((one for one in self.partitions if one.default), None)

    def node_types_of(self, partitions: Sequence[str]) -> list[NodeType]:
        """The node types in the named partitions, without duplicates."""
        wanted = {name for one in self.partitions if one.name in partitions for name in one.node_types}
        return [kind for kind in self.node_types if kind.name in wanted]

    def qos_named(self, name: str) -> Qos | None:
        return next((one for one in self.qos if one.name == name), None)


def facts_path(name: str) -> Path:
    """The path of the facts file of the profile ``name``, whether or not it exists.

    Raises:
        SpecError: the name is not valid for a profile.
    """
    if not is_profile_name(name):
        raise SpecError(
            f"{name!r} is not a valid profile name: use at most 64 letters, digits, '.', '_' and '-', starting with a "
            "letter or digit"
        )
    return profiles_directory() / f"{name}.facts" / "facts.yaml"


def load_facts(name: str) -> SiteFacts | None:
    """Load the facts of a profile's cluster; None if the cluster has not been probed.

    Raises:
        SpecError: the profile name is not valid, or the file cannot be read, is damaged, or was written by a newer
            hpcaccel.
    """
    path = facts_path(name)
    if not os.path.lexists(path):
        return None
    again = f"run `hpcaccel cluster probe {name}` to write it again"
    try:
        document = read_document(path, str(path))
    except SpecError as error:
        raise _invalid(error.problems, again) from None
    _check_version(document.value.get("version"), path, again)
    layer = Layer(document.value, document.places)
    try:
        facts = SiteFacts.model_validate(document.value)
    except ValidationError as error:
        problems = report([*document.problems, *describe(error, SiteFacts, layer, str(path))])
        raise _invalid(problems, again) from None
    if document.problems:
        raise _invalid(report(document.problems), again)
    return facts


def _invalid(problems: Sequence[str], again: str) -> SpecError:
    more = [f"and {len(problems) - 3} more"] if len(problems) > 3 else []
    return SpecError([*problems[:3], *more, again])


def _check_version(given: Any, path: Path, again: str) -> None:
    version = given.value if isinstance(given, PlainScalar) else given
    if isinstance(version, int) and version > FACTS_VERSION:
        raise SpecError(
            f"{path} was written by a newer hpcaccel (format version {version}; this version reads up to "
            f"{FACTS_VERSION}): upgrade hpcaccel here, or {again}"
        )


def store_facts(facts: SiteFacts) -> Path:
    """Write the facts to ``facts_path``, replacing older facts. Returns the path.

    Only the user can read the file, because it contains accounts and limits.
    """
    path = facts_path(facts.name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write(path, facts_text(facts), mode=PRIVATE_MODE)
    return path


def facts_text(facts: SiteFacts) -> str:
    """The facts as YAML text, without default values."""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(facts.probed_at))
    where = f" through {facts.host}" if facts.host else ""
    head = (
        f"# Created on {made} by `hpcaccel cluster probe {facts.name}`{where}.\n"
        "# Do not edit: the next probe replaces this file. Defaults (mostly: no limit, unknown, none) are omitted.\n"
    )
    values = {"version": facts.version, **facts.model_dump(mode="json", exclude_defaults=True)}
    return head + write_yaml(values, compact=True)
