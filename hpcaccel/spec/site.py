"""What is known of a cluster: facts that ``hpcaccel cluster probe`` found, kept beside the profile.

A profile says what a user wants of a cluster, the facts say what the cluster is. They are
``$XDG_CONFIG_HOME/hpcaccel/clusters/<name>.facts/facts.yaml``, readable, never edited: a new probe replaces them.
``unknown`` says in words what could not be found out, and why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from hpcaccel.core.run_dir import PRIVATE_MODE, atomic_write
from hpcaccel.errors import SpecError
from hpcaccel.spec.canonical import write_yaml
from hpcaccel.spec.cluster_profile import is_profile_name, profiles_directory
from hpcaccel.spec.fields import Natural, Positive, Section, Text, Word, words
from hpcaccel.spec.files import read_document
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.problems import describe, report
from hpcaccel.spec.site_parts import Account, Containers, NodeType, Partition, Qos, Quota, SiteConfig
from hpcaccel.spec.yaml12 import Plain

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
    "age_in_words",
    "facts_path",
    "load_facts",
    "store_facts",
]

FACTS_VERSION = 1
"""Raised when a file of this version can no longer be read as one of the version before."""


def age_in_words(seconds: float) -> str:
    """``3 days``, ``5 minutes``."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"


class SiteFacts(Section):
    """All that one probe found of one cluster."""

    version: Natural = Field(default=FACTS_VERSION, description="Of this file's form.")
    name: Word = Field(description="The profile that they belong to.")
    host: Word | None = Field(default=None, description="Over which login they were read; null: on the machine itself.")
    probed_at: Positive = Field(description="When, in seconds since 1970 (UTC).")
    slurm_version: Text = Field(description="Such as 23.11.4.")
    user: Text = Field(default="", description="Whose accounts and rights these are.")
    groups: list[Word] = words("The user's Unix groups, which AllowGroups of a partition asks for.")
    config: SiteConfig = Field(default_factory=SiteConfig, description="The cluster's own settings.")
    partitions: list[Partition] = Field(default_factory=list, description="Partitions that the user may see.")
    node_types: list[NodeType] = Field(default_factory=list, description="Kinds of nodes.")
    accounts: list[Account] = Field(
        default_factory=list, description="Accounts of the user; empty without accounting, or where it is not told."
    )
    qos: list[Qos] = Field(default_factory=list, description="QOS of the cluster.")
    containers: Containers = Field(default_factory=Containers, description="Container programs.")
    quota: list[Quota] = Field(default_factory=list, description="Room on the file systems that matter.")
    home: Text | None = Field(default=None, description="The user's home directory there.")
    scratch: list[Word] = words("Directories of the user's for large files, from variables such as $SCRATCH.")
    python: Text | None = Field(default=None, description="Version of the python3 that the login shell finds.")
    hpcaccel: Text | None = Field(default=None, description="Version of hpcaccel there; null: it is not found.")
    unknown: list[Text] = Field(default_factory=list, description="What could not be found out, and why.")

    def age_seconds(self, now: float | None = None) -> float:
        """Seconds since the probe; never negative, whatever the clocks say."""
        return max((time.time() if now is None else now) - self.probed_at, 0.0)

    def age_text(self, now: float | None = None) -> str:
        """``3 days``, ``5 minutes``."""
        return age_in_words(self.age_seconds(now))

    def partition(self, name: str) -> Partition | None:
        return next((one for one in self.partitions if one.name == name), None)

    @property
    def default_partition(self) -> Partition | None:
        """The partition of jobs that name none; None where Slurm has no such."""
        return next((one for one in self.partitions if one.default), None)

    def node_types_of(self, partitions: Sequence[str]) -> list[NodeType]:
        """The kinds of nodes in these partitions, each once."""
        wanted = {name for one in self.partitions if one.name in partitions for name in one.node_types}
        return [kind for kind in self.node_types if kind.name in wanted]

    def qos_named(self, name: str) -> Qos | None:
        return next((one for one in self.qos if one.name == name), None)


def facts_path(name: str) -> Path:
    """Where the facts of the profile ``name`` are kept, whether or not there are any.

    Raises:
        SpecError: no profile can have this name.
    """
    if not is_profile_name(name):
        raise SpecError(f"{name!r} can be no profile's name: letters, digits, '.', '_' and '-', at most 64")
    return profiles_directory() / f"{name}.facts" / "facts.yaml"


def load_facts(name: str) -> SiteFacts | None:
    """The newest facts of a profile's cluster; None where nobody has probed it.

    Raises:
        SpecError: the file cannot be read, is damaged, or was written by a newer hpcaccel.
    """
    path = facts_path(name)
    if not os.path.lexists(path):
        return None
    again = f"`hpcaccel cluster probe {name}` writes it anew"
    try:
        document = read_document(path, str(path))
    except SpecError as error:
        raise SpecError([*error.problems[:3], again]) from None
    _check_version(document.value.get("version"), path, again)
    layer = Layer(document.value, document.places)
    try:
        facts = SiteFacts.model_validate(document.value)
    except ValidationError as error:
        problems = report([*document.problems, *describe(error, SiteFacts, layer, str(path))])
        raise SpecError([*problems[:3], again]) from None
    if document.problems:
        raise SpecError([*report(document.problems)[:3], again])
    return facts


def _check_version(given: Any, path: Path, again: str) -> None:
    version = given.value if isinstance(given, Plain) else given
    if isinstance(version, int) and version > FACTS_VERSION:
        raise SpecError(
            f"{path} was written by a newer hpcaccel (version {version} of its form; this one reads up to "
            f"{FACTS_VERSION}): upgrade hpcaccel here, or {again}"
        )


def store_facts(facts: SiteFacts) -> Path:
    """Write the facts where ``load_facts`` finds them, in place of older ones; returns the path.

    Only the user may read them: they name accounts and limits.
    """
    path = facts_path(facts.name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write(path, facts_text(facts), mode=PRIVATE_MODE)
    return path


def facts_text(facts: SiteFacts) -> str:
    """The facts as a YAML file: what is as by default is left out."""
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(facts.probed_at))
    where = f" over {facts.host}" if facts.host else ""
    head = (
        f"# Made on {made} by `hpcaccel cluster probe {facts.name}`{where}.\n"
        "# Not to be edited: the next probe replaces it. What is left out is as by default: no limit, or unknown.\n"
    )
    values = {"version": facts.version, **facts.model_dump(mode="json", exclude_defaults=True)}
    return head + write_yaml(values, compact=True)
