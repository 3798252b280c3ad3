"""Cluster profiles: the settings of a site, kept out of job specs so that job specs stay portable.

A profile is the file ``$XDG_CONFIG_HOME/hpcaccel/clusters/<name>.yaml``. The profile ``local`` always exists: it runs
jobs on this machine, without Slurm.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, WithJsonSchema

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.errors import SpecError
from hpcaccel.spec.job.environment_fields import EnvironmentSection
from hpcaccel.spec.job.fields import Conflict, Flag, PathText, Section, Text, Variable, Word, section_field, text_list
from hpcaccel.spec.job.notify_fields import NotifySection
from hpcaccel.spec.job.sharing_field import Sharing, sharing_field
from hpcaccel.spec.job.slurm import SlurmSection
from hpcaccel.spec.loading.canonical import write_yaml
from hpcaccel.spec.loading.expand import expand
from hpcaccel.spec.loading.layers import Layer, read_document
from hpcaccel.spec.loading.problems import conflicts, describe, report
from hpcaccel.spec.yaml12 import KeyPath, PlainScalar, Problem, SourceLocation

__all__ = ["ClusterProfile", "is_profile_name", "load_profile", "profile_names", "profiles_directory"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_HOST = re.compile(
    r"(?:[\w.][\w.+-]*@)?(?:[A-Za-z0-9_][\w.-]*(?::[0-9]{1,5})?|\[[0-9a-fA-F:.]+\](?::[0-9]{1,5})?)", re.ASCII
)
_NODES = re.compile(r"[A-Za-z0-9][\w.,\[\]-]*", re.ASCII)


def _login(value: Any) -> str:
    if not (isinstance(value, str) and _HOST.fullmatch(value)):
        raise ValueError("is not a valid login: write user@host, or a host name from ~/.ssh/config")
    return value


def _node(value: Any) -> str:
    text = str(value) if isinstance(value, str | PlainScalar) else ""
    if not _NODES.fullmatch(text):
        raise ValueError("is neither a node name nor a node list such as n[01-03]")
    return text


Login = Annotated[str, BeforeValidator(_login), WithJsonSchema({"type": "string", "minLength": 1})]
NodeName = Annotated[str, BeforeValidator(_node), WithJsonSchema({"type": "string", "minLength": 1})]


class ClusterProfile(Section):
    """The defaults for a cluster. Settings of the job spec take precedence."""

    name: Word = Field(description="Name of the profile, equal to the name of its file.")
    backend: Literal["slurm", "local"] = Field(
        default="slurm", description="slurm: jobs go to Slurm. local: they run on this machine, without a queue."
    )
    host: Login | None = Field(
        default=None,
        description="Login node for submitting over SSH from another machine: user@host, or a host name from "
        "~/.ssh/config; null: this machine can reach Slurm directly.",
    )
    hpcaccel: PathText | None = Field(
        default=None,
        description="The hpcaccel program on the cluster, as set up by `hpcaccel cluster install`. Default: the "
        "one that a login shell finds.",
    )
    default: Flag = Field(default=False, description="Use this profile if --cluster is not given.")
    runs_dir: PathText | None = Field(
        default=None, description="Where run directories are created, on a file system shared by all nodes."
    )
    slurm: SlurmSection = section_field("Defaults for the spec's slurm section.")
    environment: EnvironmentSection = section_field("Defaults for the spec's environment section.")
    notify: NotifySection = section_field("Defaults for the spec's notify section.")
    sharing: Sharing = sharing_field("Default for the spec's key sharing")
    env: dict[Variable, Text] = Field(
        default_factory=dict,
        description="Environment variables that the site needs in every job, such as NCCL_SOCKET_IFNAME.",
    )
    exclude: list[NodeName] = text_list("Nodes that no job of this profile may use: [n07, 'n[20-23]'].")
    templates: PathText | None = Field(
        default=None,
        description="A Jinja template that replaces or extends hpcaccel's own, or a folder that contains sbatch.j2.",
    )

    _source: Path | None = PrivateAttr(default=None)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        if values.get("host") is None:
            return found
        if values.get("backend") == "local":
            found.append(Conflict("host", "cannot be combined with backend: local, which runs jobs on this machine"))
        for key in ("runs_dir", "hpcaccel", "templates"):
            if values.get(key) is not None and not str(values[key]).startswith(("/", "~/", "${env:")):
                advice = "is a path on the login node: it must start with /, ~/ or ${env:NAME}"
                found.append(Conflict(key, f"{str(values[key])!r} {advice}"))
        return found

    @property
    def source(self) -> Path | None:
        """The file that this profile was loaded from, or None for a built-in profile."""
        return self._source

    def for_login_node(self) -> str:
        """The profile as YAML text for the profile directory on the login node, without ``host``, ``hpcaccel`` and
        ``default``.

        A profile with a host keeps ``~/`` and ``${env:NAME}`` unexpanded, because they are expanded on the cluster.
        """
        values = self.model_dump(mode="json", exclude_unset=True, exclude={"host", "hpcaccel", "default"})
        return write_yaml(values)

    def defaults(self) -> Layer:
        """The defaults that this profile sets for job specs, as a layer."""
        set_values = self.model_dump(
            mode="json", include={"slurm", "environment", "notify", "sharing"}, exclude_unset=True
        )
        place = SourceLocation(str(self._source or f"cluster profile {self.name}"))
        places: dict[KeyPath, SourceLocation] = {
            (section, key): place for section, values in set_values.items() for key in values or ()
        }
        return Layer(set_values, places)


def is_profile_name(name: str) -> bool:
    """Whether ``name`` is valid as the name of a profile and of its file."""
    return _NAME.fullmatch(name) is not None


def profiles_directory() -> Path:
    if sent := os.environ.get("HPCACCEL_PROFILES"):  # set for a command that another machine sends over SSH
        return Path(sent)
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "hpcaccel" / "clusters"


def profile_names() -> list[str]:
    """The names of all profiles, including ``local``."""
    return sorted({"local", *(path.stem for path in _files())})


def load_profile(name: str | None = None) -> ClusterProfile | None:
    """Load the profile ``name``. Without a name, load the default profile; returns None if there is no default profile.

    Raises:
        SpecError: no profile has this name, several profiles are the default, or a file is invalid or unreadable.
    """
    if name is None:
        return _default()
    path = profiles_directory() / f"{name}.yaml"
    if _NAME.fullmatch(name) and path.is_file():
        return _load(path)
    if name == "local":
        return ClusterProfile(name="local", backend="local")
    names = profile_names()
    hint = did_you_mean(name, names, cutoff=0.6)
    raise SpecError(f"no cluster profile {name!r} (available: {', '.join(names)}) in {profiles_directory()}{hint}")


def _default() -> ClusterProfile | None:
    defaults = [profile for profile in map(_load, _files()) if profile.default]
    if len(defaults) > 1:
        names = ", ".join(profile.name for profile in defaults)
        raise SpecError(
            f"more than one cluster profile in {profiles_directory()} has default: true ({names}): keep it in one of "
            f"them"
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
    if layer.values.get("host") is None:  # a remote profile's paths are expanded on the cluster
        layer, found = expand(layer, path.parent)
        problems += found
    name = layer.values.setdefault("name", path.stem)
    if str(name) != path.stem:
        problems.append(
            Problem(layer.places[("name",)], f"name {str(name)!r} must be equal to the file name ({path.stem!r})")
        )
    try:
        profile = ClusterProfile.model_validate(layer.values)
    except ValidationError as error:
        problems += describe(error, ClusterProfile, layer, str(path))
        problems += conflicts(ClusterProfile, layer, str(path))
    if problems:
        raise SpecError(report(problems))
    profile._source = path
    return profile
