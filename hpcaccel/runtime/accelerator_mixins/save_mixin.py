"""Saving and loading."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hpcaccel.runtime.accelerator_mixins.session_mixin import Face

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hpcaccel.runtime.handlers import ProjectConfiguration
    from hpcaccel.runtime.training.counters import Resumed

__all__ = ["SaveFace"]

PathLike = str | os.PathLike[str]


class SaveFace(Face):
    _project_config: ProjectConfiguration | None

    def _begin_saving(self, project_config: Any, project_dir: Any) -> None:
        """What the constructor was told."""
        self._project_config = project_config
        if project_config is not None and project_config.project_dir is None and project_dir is not None:
            project_config.set_directories(project_dir)
        self._project_dir = None if project_dir is None else str(project_dir)

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where checkpoints and logs go; its ``iteration`` may be set."""
        if self._project_config is None:
            from hpcaccel.runtime.handlers import ProjectConfiguration

            self._project_config = ProjectConfiguration(project_dir=self._project_dir)
        return self._project_config

    @property
    def project_dir(self) -> str | None:
        return self._project_dir if self._project_config is None else self._project_config.project_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, where they are numbered."""
        return 0 if self._project_config is None else self._project_config.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes files of its node, in scripts that do so themselves."""
        return self._session.group.env.local_rank == 0

    # -- weights, in files that any program opens -------------------------------------------------------------------

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """``torch.save`` on the main process, or on each node's where the project configuration says so. The file
        appears whole or not at all. Tensors of sharded models are gathered, for which all ranks must call.

        Raises:
            RuntimeMisuse: some ranks did not call, and there are shards.
        """
        from hpcaccel.runtime.checkpointing import export_model

        each = self._project_config is not None and self._project_config.save_on_each_node
        session = self._session
        export_model.save(obj, f, session.group, session.settings, safe=safe_serialization, on_each_node=each)

    def save_model(
        self,
        model: nn.Module,
        save_directory: PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights as Hugging Face's libraries read them. Of a sharded model, for which all ranks must
        call, rank 0 gathers one file after the other.

        Raises:
            RuntimeMisuse: some ranks did not call, and the model is sharded; or it cannot be saved so.
            CheckpointError: on all ranks, when a sharded model could not be written.
        """
        from hpcaccel.runtime.checkpointing.model_weight_files import save_model

        session, directory = self._session, Path(save_directory)
        save_model(
            model, directory, session.group, session.settings, max_shard_size=max_shard_size, safe=safe_serialization
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole, plain tensors by the names that the script's own module gives them (``unwrap=False``: the wrapped
        one). Of a sharded model, for which all ranks must call, rank 0 gets them, and the others an empty dict."""
        from hpcaccel.runtime.checkpointing import export_model

        return export_model.get_state_dict(model, self._session.group, self._session.settings, unwrap=unwrap)

    # -- the whole training -----------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these too: anything with ``state_dict`` and ``load_state_dict``, the same on all ranks."""
        self._session.prepared.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before everything is saved. Models that it takes out
        of either list are not saved by us; what it writes to ``output_dir`` is there when it loads."""
        from hpcaccel.runtime.checkpointing import save_hooks

        return save_hooks.register(self._session.prepared.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before everything is loaded. Models that it takes out of the
        list are not loaded by us."""
        from hpcaccel.runtime.checkpointing import save_hooks

        return save_hooks.register(self._session.prepared.load_hooks, hook)

    def save_state(
        self, output_dir: PathLike | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Save everything prepared and registered now; where to comes back. All ranks call.

        Args:
            output_dir: a directory of the script's, in which nothing is ever deleted; default: the next of the numbered
                ones, where the project configuration asks for numbers, else where the run's checkpoints are.
            safe_serialization: of no effect: a checkpoint never holds pickles.

        Raises:
            RuntimeMisuse: no place to save to; some ranks did not call, and the model is sharded.
            CheckpointError: on all ranks, when it could not be saved on any.
        """
        from hpcaccel.runtime.checkpointing import save_state as saving

        saving.refuse_unknown("save_state()", save_model_func_kwargs)
        directory = None if output_dir is None else Path(output_dir).expanduser().absolute()
        return str(saving.save_state(self._session, directory, saving.numbered(self._session, self._project_config)))

    def load_state(
        self,
        input_dir: PathLike | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Resumed:
        """Restore a checkpoint, or the newest one in a directory; without a path the newest there is. All ranks call.

        A loader that was in the middle of an epoch goes on there by itself; ``skip_first_batches`` over as many batches
        then skips nothing more.

        Raises:
            RuntimeMisuse: nothing to load; some ranks did not call.
            CheckpointError: it is not there, is damaged, or belongs to something else.
        """
        from hpcaccel.runtime.checkpointing import save_state as saving

        saving.refuse_unknown("load_state()", {**(load_kwargs or {}), **load_model_func_kwargs})
        directory = None if input_dir is None else Path(input_dir).expanduser().absolute()
        return saving.load_state(self._session, directory, saving.numbered(self._session, self._project_config))
