"""Between the training loop and the checkpoint engine: what is saved, where, and under which guarantee."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer

from hpcaccel.core.run_dir import append_line, make_folder
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.checkpointing.save_hooks import load_hooks_keep, save_hooks_keep
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.parallel.dtensors import is_dtensor
from hpcaccel.runtime.settings import Place, Settings

if TYPE_CHECKING:
    # Half a second of imports that a program needs only when it saves or loads for the first time.
    from hpcaccel.checkpoint import CheckpointEngine, LoadedCheckpoint, TrainingState
    from hpcaccel.checkpoint.background import Progress
    from hpcaccel.core.records import Save

__all__ = ["Prepared", "Saver", "Stateful"]


class Stateful(Protocol):
    """What can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass
class Prepared:
    """What the script has prepared, in order: wrapped models, the user's own optimizers and schedulers, loaders."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Stateful] = field(default_factory=list)
    loaders: list[Stateful] = field(default_factory=list)
    registered: list[Stateful] = field(default_factory=list)
    scaler: Stateful | None = None
    mesh: dict[str, Any] = field(default_factory=dict)
    """How the ranks are arranged, see ``TrainingState``."""
    # Torch's handles hold these weakly, which a plain dict does not allow.
    save_hooks: dict[int, Callable[..., Any]] = field(default_factory=OrderedDict)
    load_hooks: dict[int, Callable[..., Any]] = field(default_factory=OrderedDict)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds but a part, so that none can save or load without the others."""
        return any(is_dtensor(parameter) for model in self.models for parameter in model.parameters())

    def register(self, objects: Iterable[Any]) -> None:
        """Save and restore these too, each once.

        Raises:
            RuntimeMisuse: objects without ``state_dict`` and ``load_state_dict``; all of them are named.
        """
        objects = list(objects)
        wrong = [
            f"item {index} is a {type(item).__qualname__}"
            for index, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if wrong:
            raise RuntimeMisuse(
                "register_for_checkpointing() takes objects with state_dict() and load_state_dict(), and "
                + ", ".join(wrong)
            )
        known = {id(item) for item in self.registered}
        for item in objects:
            if id(item) not in known:
                known.add(id(item))
                self.registered.append(item)

    def as_state(self, counters: Stateful, per_rank: dict[str, Any]) -> TrainingState:
        from hpcaccel.checkpoint import TrainingState

        objects: dict[str, Stateful] = {"loop": counters}
        objects |= {f"loader.{index}": loader for index, loader in enumerate(self.loaders)}
        objects |= {f"registered.{index}": item for index, item in enumerate(self.registered)}
        return TrainingState(
            models=self.models,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            scaler=self.scaler,
            objects=objects,
            per_rank=per_rank,
            mesh=self.mesh,
        )


class Saver:
    """Saves and loads everything that was prepared, with the counters of the loop. All ranks call together."""

    def __init__(self, place: Place, group: Group, settings: Settings, prepared: Prepared) -> None:
        self._group = group
        self._settings = settings
        self._prepared = prepared
        self._attempt = place.attempt
        self._directory = place.checkpoints
        self._run = place.run
        self.in_flight = False
        """Whether a save is under way in the background, of which not all ranks know yet how it went."""

    @property
    def directory(self) -> Path | None:
        return self._directory

    @property
    def has_place(self) -> bool:
        return self._directory is not None

    @cached_property
    def _engine(self) -> CheckpointEngine | None:
        return None if self._directory is None else self._make_engine(self._directory, self._settings.keep)

    def save(
        self,
        counters: Stateful,
        *,
        step: int,
        epoch: int,
        reason: str,
        doubts: Sequence[str],
        directory: Path | None = None,
        missing: Sequence[int] = (),
        background: bool = False,
    ) -> Path:
        """Save into ``directory``, or where this run's checkpoints are.

        Hooks of the script get ``directory``, or else a place whose content becomes part of the checkpoint.

        Args:
            doubts: what speaks against calling the checkpoint bit-exact.
            missing: ranks that do not take part; then this is rank 0 alone.
            background: come back when a snapshot is taken; see ``in_flight``.

        Raises:
            CheckpointError: on all ranks, when it could not be saved on any, or the one before in the background.
        """
        from hpcaccel.checkpoint import capture_rng

        state = self._prepared.as_state(counters, {"rng": capture_rng(self._group.device)})
        hooks = self._prepared.save_hooks

        def run_hooks(extra: Path) -> None:
            place = directory or extra
            make_folder(place)
            state.without = save_hooks_keep(hooks, state.models, str(place))

        engine = self._in(directory)
        with self._noting(engine):
            return engine.save(
                state,
                step=step,
                epoch=epoch,
                reason=reason,
                guarantee="state-exact" if doubts or missing else "bit-exact",
                guarantee_reasons=doubts,
                missing=missing,
                fill=run_hooks if hooks else None,
                background=background,
            )

    def progress(self) -> Progress:
        """How far this rank is with the save in the background."""
        assert self._engine is not None
        return self._engine.progress()

    def settle(self, *, failed: bool) -> None:
        """See ``CheckpointEngine.settle``."""
        assert self._engine is not None
        with self._noting(self._engine):
            self._engine.settle(failed=failed)

    def drain(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: on all ranks, when it failed on any.
        """
        if self.in_flight:
            assert self._engine is not None
            with self._noting(self._engine):
                self._engine.drain()

    def close(self) -> None:
        """This rank saves no more."""
        if "_engine" in self.__dict__ and self._engine is not None:
            self._engine.close()
            self.in_flight = False

    @contextmanager
    def _noting(self, engine: CheckpointEngine) -> Iterator[None]:
        """Whatever comes of it: note whether a save is under way then. Asked once a step, so it must cost nothing."""
        try:
            yield
        finally:
            if engine is self._engine:
                self.in_flight = engine.in_flight is not None

    def _write_down(self, save: Save) -> None:
        if self._run is not None:
            path = self._run.saves(self._attempt)
            make_folder(path.parent)
            from hpcaccel.core.records import to_dict

            append_line(path, to_dict(save))

    def find(self) -> Path | None:
        """The checkpoint to start from, the same on every rank, by the setting ``checkpoint.resume``: a named one
        counts only until the run has one of its own."""
        wish = self._settings.resume
        if self._engine is None or wish == "never":
            return None
        own = self._engine.find("auto")
        return own if own is not None or wish == "auto" else self._engine.find(wish)

    def has_made(self, path: Path) -> bool:
        """Whether this very process group has saved ``path``, as rank 0 knows."""
        return bool(self._group.from_main(self._in(path.parent).has_made(path)))

    def find_in(self, directory: Path) -> Path | None:
        """The checkpoint ``directory``, or the newest good one in it."""
        return self._in(directory).find(directory)

    def load(
        self, path: Path, counters: Stateful, *, given: Path | None = None, fall_back: bool = True
    ) -> LoadedCheckpoint:
        """
        Args:
            given: the directory that the script named, which its hooks get if they have saved there.
            fall_back: load an older one of the same directory where this one is damaged.

        Raises:
            CheckpointError: on all ranks, when it is damaged or belongs to something else.
        """
        state = self._prepared.as_state(counters, {})
        state.without = self._run_load_hooks(path, given)
        loaded = self._in(path.parent).load(path, state, fall_back=fall_back)
        if loaded.path != path:
            self._run_load_hooks(loaded.path, given)  # that one was damaged, and so may be what the hooks took from it
        if self._settings.deterministic or loaded.guarantee == "state-exact":
            return loaded
        return replace(loaded, guarantee="state-exact", differences=("runtime.deterministic is off now",))

    def _run_load_hooks(self, path: Path, given: Path | None) -> frozenset[int]:
        from hpcaccel.checkpoint import commit
        from hpcaccel.checkpoint.rank_agreement import Ranks

        hooks = self._prepared.load_hooks
        if not hooks:
            return frozenset()
        # What hooks have saved lies in the checkpoint, or beside it where the script has named the directory.
        directory = given if given is not None and not commit.has_adopted(path) else path
        ranks = Ranks(rank=self._group.rank, world_size=self._group.world_size, group=self._group.control)
        return ranks.run(
            f"what the script saved itself in {directory} cannot be loaded",
            lambda: load_hooks_keep(hooks, self._prepared.models, str(directory)),
        )

    def random_state(self, loaded: LoadedCheckpoint) -> dict[str, Any]:
        """What this rank's generators go on with: what it had of its own then; for what it had not, what follows from
        seed, data rank and step."""
        from hpcaccel.checkpoint.rng import fresh_rng
        from hpcaccel.runtime.training.determinism import mix

        own = (loaded.per_rank or {}).get("rng") or {}
        seed = mix(self._settings.seed or 0, self._group.data_rank, loaded.step)
        return {**fresh_rng(seed, self._group.device), **own}

    def restore_rng(self, rng: Any) -> None:
        from hpcaccel.checkpoint import restore_rng

        restore_rng(rng, self._group.device)

    def _in(self, directory: Path | None) -> CheckpointEngine:
        if self._engine is not None and directory in (None, self._engine.directory):
            return self._engine
        assert directory is not None, "the caller has checked that there is a place to save"
        return self._make_engine(directory, None)

    def _make_engine(self, directory: Path, keep: int | None) -> CheckpointEngine:
        from hpcaccel.checkpoint import CheckpointEngine

        return CheckpointEngine(
            directory,
            rank=self._group.rank,
            world_size=self._group.world_size,
            group=self._group.control,
            attempt=self._attempt,
            keep=keep,
            keep_every=self._settings.keep_every_steps,
            local_world_size=self._group.env.local_world_size,
            on_saved=self._write_down,
        )
