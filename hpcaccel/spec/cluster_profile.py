"""Cluster profiles: what is true for a site, so that a job spec stays portable.

A profile is ``$XDG_CONFIG_HOME/hpcaccel/clusters/<name>.yaml``. The profile ``local`` is always there: it runs jobs on
this machine, without Slurm.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, WithJsonSchema

from hpcaccel.errors import SpecError
from hpcaccel.spec.canonical import write_yaml
from hpcaccel.spec.environment_fields import Environment
from hpcaccel.spec.expand import expand
from hpcaccel.spec.fields import Conflict, Flag, PathText, Section, Text, Variable, Word, words
from hpcaccel.spec.files import read_document
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.problems import conflicts, describe, report
from hpcaccel.spec.slurm import Slurm
from hpcaccel.spec.yaml12 import KeyPath, Place, Plain, Problem

__all__ = ["ClusterProfile", "is_profile_name", "load_profile", "profile_names", "profiles_directory"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_HOST = re.compile(
    r"(?:[\w.][\w.+-]*@)?(?:[A-Za-z0-9_][\w.-]*(?::[0-9]{1,5})?|\[[0-9a-fA-F:.]+\](?::[0-9]{1,5})?)", re.ASCII
)
_NODES = re.compile(r"[A-Za-z0-9][\w.,\[\]-]*", re.ASCII)


def _login(value: Any) -> str:
    if not (isinstance(value, str) and _HOST.fullmatch(value)):
        raise ValueError("is no login: write user@host, or the name that host has in ~/.ssh/config")
    return value


def _node(value: Any) -> str:
    text = str(value) if isinstance(value, str | Plain) else ""
    if not _NODES.fullmatch(text):
        raise ValueError("is no node's name, and no list of them such as n[01-03]")
    return text


Login = Annotated[str, BeforeValidator(_login), WithJsonSchema({"type": "string", "minLength": 1})]
NodeName = Annotated[str, BeforeValidator(_node), WithJsonSchema({"type": "string", "minLength": 1})]


class ClusterProfile(Section):
    """Defaults of one cluster. They lie under the job spec: what a spec sets wins."""

    name: Word = Field(description="The profile's name: that of its file.")
    backend: Literal["slurm", "local"] = Field(
        default="slurm", description="slurm: jobs go to Slurm. local: they run on this machine, without a queue."
    )
    host: Login | None = Field(
        default=None,
        description="The login node, user@login or a name of ~/.ssh/config, where the jobs are submitted from another "
        "machine over ssh; null: Slurm is reached from this machine.",
    )
    hpcaccel: PathText | None = Field(
        default=None,
        description="The hpcaccel program on the cluster, as `hpcaccel cluster install` has set it up. Default: the "
        "one that a login shell finds.",
    )
    default: Flag = Field(default=False, description="Take this profile where no --cluster is given.")
    runs_dir: PathText | None = Field(
        default=None, description="Where run directories are made; on a file system that all nodes see."
    )
    slurm: Slurm = Field(default_factory=Slurm, description="Defaults for the spec's slurm section.")
    environment: Environment = Field(
        default_factory=Environment, description="Defaults for the spec's environment section."
    )
    env: dict[Variable, Text] = Field(
        default_factory=dict, description="Variables that the site needs in every job, such as NCCL_SOCKET_IFNAME."
    )
    exclude: list[NodeName] = words("Nodes that no job of this profile may use: [n07, 'n[20-23]'].")
    templates: PathText | None = Field(
        default=None,
        description="A Jinja template that replaces or extends hpcaccel's own, or a folder with an sbatch.j2 in it.",
    )

    _source: Path | None = PrivateAttr(default=None)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("host") is None:
            return found
        if values.get("backend") == "local":
            found.append(Conflict("host", "has no meaning beside backend: local, whose jobs run on this machine"))
        for key in ("runs_dir", "hpcaccel", "templates"):
            if values.get(key) is not None and not str(values[key]).startswith(("/", "~/", "${env:")):
                found.append(
                    Conflict(key, f"{str(values[key])!r} is a path on the login node: let it begin with / or ~/")
                )
        return found

    @property
    def source(self) -> Path | None:
        """The file that this profile was loaded from, None for a built-in one."""
        return self._source

    def for_login_node(self) -> str:
        """The profile as a YAML file for the login node's own profile directory: without ``host`` and ``hpcaccel``.

        A profile with a host keeps ``~/`` and ``${env:NAME}`` as they are written, for they are the cluster's.
        """
        values = self.model_dump(mode="json", exclude_unset=True, exclude={"host", "hpcaccel", "default"})
        return write_yaml(values)

    def defaults(self) -> Layer:
        """The sections that lie under a job spec, as far as the profile sets them."""
        set_values = self.model_dump(mode="json", include={"slurm", "environment"}, exclude_unset=True)
        place = Place(str(self._source or f"cluster profile {self.name}"))
        places: dict[KeyPath, Place] = {
            (section, key): place for section, values in set_values.items() for key in values
        }
        return Layer(set_values, places)


def is_profile_name(name: str) -> bool:
    """Whether a profile may be called so: its name is that of a file."""
    return _NAME.fullmatch(name) is not None


def profiles_directory() -> Path:
    if sent := os.environ.get("HPCACCEL_PROFILES"):  # for one command that another machine has sent
        return Path(sent)
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "hpcaccel" / "clusters"


def profile_names() -> list[str]:
    """The names that ``--cluster`` takes, ``local`` included."""
    return sorted({"local", *(path.stem for path in _files())})


def load_profile(name: str | None = None) -> ClusterProfile | None:
    """The profile ``name``; without a name the default profile, or None where there is none.

    Raises:
        SpecError: no such profile, more than one default, or a file that cannot be read or is wrong.
    """
    if name is None:
        return _default()
    path = profiles_directory() / f"{name}.yaml"
    if _NAME.fullmatch(name) and path.is_file():
        return _load(path)
    if name == "local":
        return ClusterProfile(name="local", backend="local")
    names = profile_names()
    match = difflib.get_close_matches(name, names, n=1)
    hint = f". Did you mean {match[0]!r}?" if match else ""
    raise SpecError(f"no cluster profile {name!r} (has: {', '.join(names)}; in {profiles_directory()}){hint}")


def _default() -> ClusterProfile | None:
    defaults = [profile for profile in map(_load, _files()) if profile.default]
    if len(defaults) > 1:
        names = ", ".join(profile.name for profile in defaults)
        raise SpecError(
            f"more than one cluster profile in {profiles_directory()} has default: true ({names}): leave one"
        )
    return defaults[0] if defaults else None


def _files() -> list[Path]:
    try:
        return sorted(path for path in profiles_directory().iterdir() if path.suffix == ".yaml" and path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SpecError(f"{profiles_directory()} cannot be read: {error.strerror}") from None


def _load(path: Path) -> ClusterProfile:
    document = read_document(path, str(path))
    layer, problems = Layer(document.value, document.places), list(document.problems)
    if layer.values.get("host") is None:  # the paths of a remote profile are expanded where they are
        layer, found = expand(layer, path.parent)
        problems += found
    name = layer.values.setdefault("name", path.stem)
    if str(name) != path.stem:
        problems.append(Problem(layer.places[("name",)], f"name {str(name)!r} is not that of the file ({path.stem})"))
    try:
        profile = ClusterProfile.model_validate(layer.values)
    except ValidationError as error:
        problems += describe(error, ClusterProfile, layer, str(path))
        problems += conflicts(ClusterProfile, layer, str(path))
    if problems:
        raise SpecError(report(problems))
    profile._source = path
    return profile
