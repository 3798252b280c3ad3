"""The job spec: a frozen model of a spec file. The field descriptions are the documentation.

A spec can have dependencies on other runs (``after: [prepare, afterany:clean]``).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, WithJsonSchema

from hpcaccel.core.run_dir import RUN_DIR
from hpcaccel.spec.job.component_fields import ComponentName, ComponentSection
from hpcaccel.spec.job.entrypoint import EntrypointSection
from hpcaccel.spec.job.environment_fields import CodeSection, ContainerSection, EnvironmentSection, StageSection
from hpcaccel.spec.job.fields import Conflict, PathText, Section, checked_text, empty_list, part_of, section_field
from hpcaccel.spec.job.node_counts import more_nodes, node_sizes
from hpcaccel.spec.job.notify_fields import NotifySection, mail_conflicts
from hpcaccel.spec.job.resilience_fields import ResilienceSection, node_loss_conflicts
from hpcaccel.spec.job.sharing_field import Sharing, sharing_field
from hpcaccel.spec.job.slurm import SlurmSection, SrunSection
from hpcaccel.spec.job.training_fields import CheckpointSection, RuntimeSection
from hpcaccel.spec.job.watch_fields import pattern_of
from hpcaccel.spec.yaml12 import PlainScalar

if TYPE_CHECKING:
    from hpcaccel.core.launch_spec import LaunchWatch

__all__ = [
    "KINDS",
    "After",
    "Dependency",
    "JobSpec",
    "parse_dependency",
]


Kind = Literal["afterok", "afterany", "afternotok"]
KINDS: tuple[Kind, ...] = ("afterok", "afterany", "afternotok")
"""The conditions of ``sbatch --dependency``: the other run succeeded; it ended; it ended without success."""

_TOKEN = re.compile(r"[A-Za-z0-9/~.][^\s:,?]*")


class Dependency(NamedTuple):
    """A run to wait for, identified by its name, run ID, job ID or directory."""

    kind: Kind
    run: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.run}"


def parse_dependency(text: str) -> Dependency:
    """Parse ``KIND:RUN``, where ``KIND`` is one of ``KINDS``, or ``RUN``, which is short for ``afterok:RUN``.

    Raises:
        ValueError: ``text`` is not a dependency. The message completes a sentence that begins with the key and value.
    """
    kind, colon, run = text.partition(":")
    if not colon:
        kind, run = "afterok", text
    if kind not in KINDS:
        raise ValueError(f"is not a dependency: {kind!r} must be one of {', '.join(KINDS)}")
    if not _TOKEN.fullmatch(checked_text(run)):
        raise ValueError("is not a dependency: write the name of a run, or afterany:NAME")
    return Dependency(kind, run)


def _dependency(value: Any) -> str:
    text = value.text if isinstance(value, PlainScalar) else value
    if not isinstance(text, str | int) or isinstance(text, bool):
        raise ValueError("must be a run: NAME, or KIND:NAME such as afterany:NAME")
    return str(parse_dependency(str(text)))


After = Annotated[str, BeforeValidator(_dependency), WithJsonSchema({"type": ["string", "integer"], "minLength": 1})]
"""A dependency as text, normalized to ``KIND:RUN``."""


_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


def _name(value: Any) -> str:
    text = value.text if isinstance(value, PlainScalar) else value
    if not isinstance(text, str) or not re.fullmatch(_NAME, text):
        raise ValueError(
            "is not a valid name: use at most 64 letters, digits, '.', '_' and '-', starting with a letter or digit. "
            "It becomes a directory name"
        )
    return text


def _watch_conflicts(values: dict[str, Any]) -> list[Conflict]:
    """Conflicts of the settings for programs with checkpoints of their own."""
    checkpoint, entrypoint = part_of(values, "checkpoint"), part_of(values, "entrypoint")
    found = []
    if checkpoint.get("resume", "auto") not in ("auto", "never") and (
        entrypoint.get("resume_args") or part_of(values, "runtime").get("bridge")
    ):
        advice = "must be auto or never with resume_args or runtime.bridge: name the first checkpoint in args"
        found.append(Conflict("checkpoint.resume", advice))
    if checkpoint.get("watch") is None:
        return found
    try:
        place = pattern_of(checkpoint["watch"], entrypoint.get("args")).glob
    except ValidationError:
        return found  # reported for the section itself
    except ValueError as error:
        return [*found, Conflict("checkpoint.watch", str(error))]
    if values.get("container") is not None and not place.startswith(RUN_DIR):
        advice = f"must be below {RUN_DIR} with a container: other paths differ inside and outside of it"
        found.append(Conflict("checkpoint.watch", advice))
    return found


class JobSpec(Section):
    """A training job: what runs, where, with which resources, and what happens after preemptions and failures."""

    model_config = ConfigDict(defer_build=False)

    moved: ClassVar[dict[str, str]] = {
        "sweep": "is for `hpcaccel sweep start`, which runs many trials of this file: use that command, or remove the "
        "section",
        "extends": "is allowed only at the top level of a spec file",
        "spec_version": "is allowed only at the top level of a spec file",
        "jobs": "works only with `hpcaccel submit`, `validate`, `render` and `plan`, at the top level of a spec file",
    }

    name: Annotated[
        str, BeforeValidator(_name), WithJsonSchema({"type": ["string", "integer"], "pattern": f"^{_NAME}$"})
    ] = Field(description="A short name, used for the Slurm job and for the directory of its runs.", examples=["gpt"])
    entrypoint: EntrypointSection = Field(description="The program that the ranks run.")
    slurm: SlurmSection = section_field("Resources and queue, by sbatch's option names.")
    srun: SrunSection = section_field("Additional flags for srun.")
    components: dict[ComponentName, ComponentSection] = Field(
        default_factory=dict,
        description="Additional programs, each on its own nodes, in one heterogeneous Slurm job with the ranks. Every "
        "process gets the nodes of component `data` in HPCACCEL_NODES_DATA and those of the ranks in HPCACCEL_NODES.",
        examples=[{"data": {"entrypoint": {"script": "serve.py"}, "slurm": {"partition": "cpu", "nodes": 2}}}],
    )
    environment: EnvironmentSection = section_field(
        "Modules, Python environment, setup commands and variables of the ranks.",
    )
    launcher: Literal["srun", "torchrun"] = Field(
        default="srun",
        description="srun: Slurm starts every rank. torchrun: Slurm starts one torchrun on each node, which starts the "
        "node's ranks. Environment, logs, signals and failure handling are the same.",
    )
    container: ContainerSection | None = Field(default=None, description="A container image for the ranks.")
    stage: StageSection | None = Field(default=None, description="Data to copy to node-local disks.")
    after: list[After] = Field(
        default_factory=empty_list,
        description="Runs that must end before this one starts, by name, run ID or job ID: NAME or afterok:NAME (the "
        "run succeeded), afterany:NAME (it ended), afternotok:NAME (it ended without success). A requeue is not the "
        "end of a run.",
        examples=[["prepare", "afterany:clean"]],
    )
    code: CodeSection = section_field("The copy of the code in the run directory.")
    workdir: PathText | None = Field(
        default=None, description="Working directory of the ranks. Default: the directory in which submit was called."
    )
    sharing: Sharing = sharing_field("Who else may look at the run, stop it and continue it")
    runtime: RuntimeSection = section_field("Settings of hpcaccel.Accelerator.")
    checkpoint: CheckpointSection = section_field("When to save and what to start from.")
    resilience: ResilienceSection = section_field("What happens after preemptions and failures.")
    notify: NotifySection = section_field("Which events are sent by mail or to a webhook.")

    _source: Path | None = PrivateAttr(default=None)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        """Conflicts between ``values``, which may not be validated yet. Values of a wrong type are ignored."""
        found = super().conflicts(values)
        components = values.get("components")
        if isinstance(components, Mapping) and components and part_of(values, "resilience").get("chain") is not None:
            advice = (
                "cannot be combined with components: a chain does not support heterogeneous jobs. Remove one of them"
            )
            found.append(Conflict("resilience.chain", advice))
        found += node_loss_conflicts(values)
        found += _watch_conflicts(values)
        found += mail_conflicts(values)
        if values.get("container") is None:
            return found
        environment, srun, entrypoint = (part_of(values, key) for key in ("environment", "srun", "entrypoint"))
        for key in ("conda", "venv"):
            if environment.get(key) is not None:
                advice = (
                    "cannot be combined with container: the image has its own Python, which environment.python "
                    "can select"
                )
                found.append(Conflict(f"environment.{key}", advice))
        for index, word in enumerate(srun.get("extra") or []):
            if str(word).startswith(("--container", "--no-container")):
                found.append(
                    Conflict(f"srun.extra.{index}", f"{str(word)!r} is not allowed: use the section container")
                )
        if entrypoint.get("function") is not None:
            found.append(
                Conflict(
                    "container",
                    "supports only scripts, modules and commands: a Python function would need submitit in the image",
                )
            )
        return found

    @property
    def source(self) -> Path | None:
        """The file from which this spec was loaded, or None. The file is part of neither the model nor the hash."""
        return self._source

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each node: ``slurm.ntasks_per_node``, else one per GPU, else 1."""
        return self.slurm.ranks_per_node

    @property
    def node_sizes(self) -> list[list[int]]:
        """With ``on_node_loss: shrink``, how many nodes the ranks may use, as ranges ``[low, high, step]``; else []."""
        return node_sizes(self.slurm.nodes) if self.resilience.on_node_loss == "shrink" else []

    def with_spare_nodes(self) -> "JobSpec":
        """This spec with the nodes that Slurm is asked for: those of the ranks and ``resilience.spare_nodes``."""
        spare = self.resilience.spare_nodes
        if not spare:
            return self
        slurm = self.slurm.model_copy(update={"nodes": more_nodes(self.slurm.nodes, spare)})
        resilience = self.resilience.model_copy(update={"spare_nodes": 0})
        return self.model_copy(update={"slurm": slurm, "resilience": resilience})

    def of_component(self, name: str) -> "JobSpec":
        """This spec reduced to the component ``name``: the component's entrypoint and resources replace the job's."""
        own = self.components[name]
        inherited = {
            key: getattr(own.slurm, key) or getattr(self.slurm, key)
            for key in ("account", "partition", "qos", "reservation")
        }
        fields = {**dict(own.slurm), **inherited, "ntasks_per_node": own.slurm.ranks_per_node}
        slurm = self.slurm.model_copy(update=fields)
        return self.model_copy(update={"entrypoint": own.entrypoint, "slurm": slurm, "components": {}})

    @property
    def total_gpus(self) -> int:
        """Number of GPUs of the job and its components if it starts with the minimum number of nodes."""
        parts = [self.with_spare_nodes(), *(self.of_component(name) for name in self.components)]
        return sum(one.slurm.min_nodes * one.slurm.node_gpus for one in parts)

    @property
    def total_nodes(self) -> int:
        """The smallest number of nodes of the job, including its components."""
        own = self.slurm.min_nodes + self.resilience.spare_nodes
        return own + sum(one.slurm.min_nodes for one in self.components.values())

    @property
    def stop_mode(self) -> Literal["cooperative", "signals"]:
        """How the ranks are stopped: ``runtime.stop``, by default ``signals`` for commands, else ``cooperative``.

        With ``runtime.bridge`` the default is always ``cooperative``. Otherwise, if ``runtime.stop`` is not set,
        submission also uses ``signals`` for scripts and modules whose source uses none of ``Accelerator``,
        ``HpcaccelCallback``, ``stop_gate`` and ``should_stop``.
        """
        signals = self.entrypoint.kind == "command" and self.runtime.bridge is None
        return self.runtime.stop or ("signals" if signals else "cooperative")

    @property
    def warning_seconds(self) -> int:
        """How many seconds before the time limit the ranks are requested to stop.

        This is ``resilience.warning_seconds``, but at most half of the time limit.
        """
        limit = self.slurm.time_seconds
        wanted = self.resilience.warning_seconds
        return wanted if limit is None else max(1, min(wanted, limit // 2))

    def launch_watch(self, workdir: str) -> "LaunchWatch | None":
        """Where the program saves checkpoints of its own; None if ``checkpoint.watch`` is not set.

        Args:
            workdir: working directory of the ranks.
        """
        watch = self.checkpoint.watch
        return None if watch is None else watch.located(self.entrypoint.args, workdir)

    def resume_arguments(self) -> list[str]:
        """The words of ``entrypoint.resume_args``; none with ``checkpoint.resume: never``."""
        return [] if self.checkpoint.resume == "never" else self.entrypoint.resume_arguments()

    def arguments(self) -> list[str]:
        """The command-line arguments of the program on every rank."""
        return self.entrypoint.arguments()

    def __eq__(self, other: object) -> bool:
        """Compare all settings. The source file is ignored."""
        return isinstance(other, JobSpec) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())
