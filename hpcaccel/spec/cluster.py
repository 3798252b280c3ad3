"""Cluster profiles: what is true for a site, so that a job spec stays portable.

A profile is ``$XDG_CONFIG_HOME/hpcaccel/clusters/<name>.yaml``. The profile ``local`` is always there: it runs jobs on
this machine, without Slurm.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr, ValidationError

from hpcaccel.errors import SpecError
from hpcaccel.spec.environment import Environment
from hpcaccel.spec.expand import expand
from hpcaccel.spec.fields import Flag, PathText, Section, Text, Variable, Word
from hpcaccel.spec.files import read_document
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.problems import conflicts, describe, report
from hpcaccel.spec.slurm import Slurm
from hpcaccel.spec.yaml12 import KeyPath, Place, Problem

__all__ = ["ClusterProfile", "load_profile", "profile_names", "profiles_directory"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class ClusterProfile(Section):
    """Defaults of one cluster. They lie under the job spec: what a spec sets wins."""

    name: Word = Field(description="The profile's name: that of its file.")
    backend: Literal["slurm", "local"] = Field(
        default="slurm", description="slurm: jobs go to Slurm. local: they run on this machine, without a queue."
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
    templates: PathText | None = Field(
        default=None,
        description="A Jinja template that replaces or extends hpcaccel's own, or a folder with an sbatch.j2 in it.",
    )

    _source: Path | None = PrivateAttr(default=None)

    @property
    def source(self) -> Path | None:
        """The file that this profile was loaded from, None for a built-in one."""
        return self._source

    def defaults(self) -> Layer:
        """The sections that lie under a job spec, as far as the profile sets them."""
        set_values = self.model_dump(mode="json", include={"slurm", "environment"}, exclude_unset=True)
        place = Place(str(self._source or f"cluster profile {self.name}"))
        places: dict[KeyPath, Place] = {
            (section, key): place for section, values in set_values.items() for key in values
        }
        return Layer(set_values, places)


def profiles_directory() -> Path:
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
    layer, found = expand(Layer(document.value, document.places), path.parent)
    problems = [*document.problems, *found]
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
