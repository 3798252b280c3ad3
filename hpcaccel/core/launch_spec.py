"""How the ranks of a run are started: the ``launch`` section of ``spec.json``.

The submission builds and stores a :class:`LaunchSpec`; the batch step, the ranks, ``status`` and the sweeps read it
back. :func:`read_launch` also reads the user's sections ``resilience`` and ``notify``, which ``spec.json`` stores
separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpcaccel.core.durable_files import read_json, refuse_newer
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError

__all__ = [
    "LaunchComponent",
    "LaunchContainer",
    "LaunchSpec",
    "LaunchStage",
    "LaunchWatch",
    "NoticePolicy",
    "RestartPolicy",
    "find_launch",
    "launch_of",
    "read_launch",
]

R = TypeVar("R")

SPEC_JSON_VERSION = 1
"""Version of ``spec.json`` and ``sweep.json``."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """The ``resilience`` section of the spec; see ``spec.job.resilience_fields.ResilienceSection`` for the fields.

    A field that is missing from a stored section takes its default here: older releases had no ``preflight``.
    """

    requeue: bool | str = True
    """``expedite`` stands for Slurm's ``--requeue=expedite``."""
    warning_seconds: int = 120
    stop_timeout_seconds: int = 300
    max_failures: int = 3
    max_preemptions: int | None = None
    restart_in_place: int = 2
    spare_nodes: int = 0
    on_node_loss: str = "requeue"
    warm_restart: str = "off"
    preflight: str = "off"
    exclude_hours: float = 24.0
    max_excluded: int = 0
    hang_timeout_seconds: int | None = None
    chain: int | None = None
    chain_ahead: int = 2

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job is submitted with --no-kill, so that it continues without a node that fails."""
        return self.spare_nodes > 0 or self.on_node_loss == "shrink"


@dataclass(frozen=True, kw_only=True)
class NoticePolicy:
    """The ``notify`` section of the spec, except for mail, which Slurm sends; see ``spec.job.notify_fields``."""

    events: list[str] = field(default_factory=list)
    webhook: bool | None = None
    """None: yes if one of the next two is set."""
    webhook_env: str | None = None
    """Environment variable that holds the URL."""
    webhook_file: str | None = None
    """File that holds the URL. Default: ``~/.config/hpcaccel/webhook``."""

    @property
    def sends(self) -> bool:
        """Whether the batch step sends notices to a webhook."""
        named = self.webhook_env is not None or self.webhook_file is not None
        return bool(self.events) and (named if self.webhook is None else self.webhook)


@dataclass(frozen=True, kw_only=True)
class LaunchContainer:
    """The container that the ranks run in."""

    image: str
    """A path, or an image in a registry as a URL such as ``docker://pytorch/pytorch:2.9``."""
    runtime: str
    mounts: list[str]
    """``SRC:DST`` or ``SRC:DST:ro``: the user's mounts and those that the ranks need."""
    workdir: str
    gpus: bool
    env: dict[str, str] = field(default_factory=dict)
    images: str = ""
    """Directory of imported images."""
    key: str = ""
    """Identifies the content of an image from a registry: its digest if the registry returned one, else its name."""

    @property
    def is_file(self) -> bool:
        return self.image.startswith("/")


@dataclass(frozen=True, kw_only=True)
class LaunchStage:
    """User data that each node copies to its own disk before the ranks start."""

    sources: list[str]
    directory: str | None = None
    keep: bool = False


@dataclass(frozen=True, kw_only=True)
class LaunchWatch:
    """Where the program saves checkpoints of its own; see ``spec.job.watch_fields.WatchSection``."""

    glob: str
    """An absolute pattern; ``{run_dir}`` stands for the run's directory."""
    complete: str | None
    step: str


@dataclass(frozen=True, kw_only=True)
class LaunchComponent:
    """A program that runs alongside the ranks, from ``components`` in the spec."""

    name: str
    program: list[str] = field(default_factory=list)
    nodes: int = 1
    processes_per_node: int = 1
    srun: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How the ranks are started. All fields except ``resilience`` and ``notify`` are stored under their own names."""

    kind: Literal["program", "callable"]
    program: list[str]
    """A rank's command; ``{python}`` stands for the ranks' interpreter, ``{run_dir}`` for the run's directory. Empty
    for a callable."""
    python: str | None = None
    """The ranks' interpreter. None means the first Python on the node's PATH once modules, conda or venv are set up."""
    pythonpath: list[str] = field(default_factory=list)
    workdir: str
    backend: Literal["slurm", "local"]
    nodes: int
    """Number of nodes of the ranks; the smallest one if there are ``node_sizes``."""
    node_sizes: list[list[int]] = field(default_factory=list)
    """With ``on_node_loss: shrink``, the numbers of nodes that the ranks may use, as ranges ``[low, high, step]``; else
    empty."""
    ranks_per_node: int
    stop: Literal["cooperative", "signals"]
    stop_is_default: bool = False
    """Whether the submission chose ``stop``, because the spec does not set it."""
    loader_shield: str | None = None
    """A folder for the ranks' PYTHONPATH: it keeps data-loader workers alive when all processes receive SIGTERM."""
    bridge: str | None = None
    """A folder for the ranks' PYTHONPATH: it adds hpcaccel's callback to the trainer that ``runtime.bridge`` names."""
    srun: list[str] = field(default_factory=list)
    share_gpus: bool = False
    """Make all GPUs of a node visible to all its ranks, although Slurm assigns GPUs to each rank."""
    setup_per_node: list[str] = field(default_factory=list)
    time_limit_seconds: int | None = None
    warning_seconds: int | None = None
    """Overrides ``resilience.warning_seconds``."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """With ``torchrun``, srun starts one task per node, which starts the ranks of its node."""
    container: LaunchContainer | None = None
    components: list[LaunchComponent] = field(default_factory=list)
    after: list[dict[str, str]] = field(default_factory=list)
    """Runs that must end first: ``kind`` (afterok, …) and ``run``, a directory."""
    stage: LaunchStage | None = None
    snapshots: bool = False
    """Whether the ranks keep snapshots in the memory of their nodes."""
    watch: LaunchWatch | None = None
    resume_args: list[str] = field(default_factory=list)
    """Arguments that follow ``program`` if there is a checkpoint; ``{newest}`` and ``{step}`` stand for its path and
    step."""
    resilience: RestartPolicy = field(default_factory=RestartPolicy)
    notify: NoticePolicy = field(default_factory=NoticePolicy)

    @property
    def callable(self) -> bool:
        return self.kind == "callable"

    @property
    def local(self) -> bool:
        return self.backend == "local"

    @property
    def cooperative(self) -> bool:
        return self.stop == "cooperative"

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def size_for(self, count: int) -> int | None:
        """How many of ``count`` nodes the ranks use; None if these are too few."""
        sizes = self.node_sizes or [[self.nodes, self.nodes, 1]]
        fitting = [low + (min(high, count) - low) // step * step for low, high, step in sizes if low <= count]
        return max(fitting, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The ``launch`` section as it is stored."""
        return {key: value for key, value in asdict(self).items() if key not in ("resilience", "notify")}


def launch_of(document: Mapping[str, Any], *, source: Path) -> LaunchSpec:
    """The launch spec in the content of a ``spec.json`` or ``sweep.json``.

    Args:
        source: the file, for error messages.

    Raises:
        RunDirectoryError: an incompatible or newer version wrote the file.
    """
    refuse_newer(document, SPEC_JSON_VERSION, source)
    try:
        launch = dict(document["launch"])
        resilience = dict(document.get("spec", {}).get("resilience") or {})
        notify = _read(NoticePolicy, document.get("spec", {}).get("notify") or {})
        if launch.get("warning_seconds") is not None:
            resilience["warning_seconds"] = launch["warning_seconds"]
        if launch.get("container") is not None:
            launch["container"] = _read(LaunchContainer, launch["container"])
        if launch.get("stage") is not None:
            launch["stage"] = _read(LaunchStage, launch["stage"])
        if launch.get("watch") is not None:
            launch["watch"] = _read(LaunchWatch, launch["watch"])
        launch["components"] = [_read(LaunchComponent, one) for one in launch.get("components", [])]
        return _read(LaunchSpec, {**launch, "resilience": _read(RestartPolicy, resilience), "notify": notify})
    except (KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{source} was written by an incompatible version of hpcaccel ({error!r}): "
            "use the version named in record.json in the same directory, or submit again"
        ) from None


def _read(kind: type[R], value: Mapping[str, Any]) -> R:
    """Build ``kind`` from ``value``, ignoring keys that are not fields in this version. Raises KeyError if a required
    field is missing."""
    known = fields(kind)  # type: ignore[arg-type]
    for one in known:
        if one.default is MISSING and one.default_factory is MISSING and one.name not in value:
            raise KeyError(one.name)
    return kind(**{one.name: value[one.name] for one in known if one.name in value})


def find_launch(run: RunDir) -> LaunchSpec | None:
    """The launch spec of a run; None if there is no ``spec.json``.

    Raises:
        RunDirectoryError: the file is not a JSON object, or an incompatible version wrote it.
    """
    document = read_json(run.spec)
    return None if document is None else launch_of(document, source=run.spec)


def read_launch(run: RunDir) -> LaunchSpec:
    """The launch spec of a run.

    Raises:
        RunDirectoryError: ``spec.json`` is missing or not a JSON object, or an incompatible version wrote it.
    """
    launch = find_launch(run)
    if launch is None:
        raise RunDirectoryError(f"{run.spec} is missing: {run.path} is not the directory of a submitted run")
    return launch
