"""Methods that save and load checkpoints and model files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hpcaccel.runtime.accelerator_mixins import SessionMixin

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from hpcaccel.runtime.handlers import ProjectConfiguration
    from hpcaccel.runtime.training.resumption import ResumedCounters

__all__ = ["SaveMixin"]

PathLike = str | os.PathLike[str]


class SaveMixin(SessionMixin):
    _project_config: ProjectConfiguration | None

    def _set_directories(self, project_config: Any, project_dir: Any) -> Any:
        """Store the constructor's directory arguments.

        Returns:
            The project directory, which either argument may set.
        """
        if project_config is not None and project_dir is None:
            project_dir = project_config.project_dir
        self._project_config = project_config
        if project_config is not None and project_config.project_dir is None and project_dir is not None:
            project_config.set_directories(project_dir)
        self._project_dir = None if project_dir is None else str(project_dir)
        return project_dir

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Directories of checkpoints and logs. Scripts may set ``project_configuration.iteration``."""
        if self._project_config is None:
            from hpcaccel.runtime.handlers import ProjectConfiguration

            self._project_config = ProjectConfiguration(project_dir=self._project_dir)
        return self._project_config

    @property
    def project_dir(self) -> str | None:
        """Folder for checkpoints and logs outside of a run, as given to the constructor; None if none was given."""
        return self._project_dir if self._project_config is None else self._project_config.project_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint, if checkpoints are numbered."""
        return 0 if self._project_config is None else self._project_config.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this is the first process of its node. Scripts use it to write files once per node."""
        return self._session.group.env.local_rank == 0

    # -- model files -------------------------------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write ``obj`` with ``torch.save`` on the main process or, if the project configuration sets
        ``save_on_each_node``, on the first process of each node. If ``obj`` contains shards, they are gathered, and all
        ranks must call this.

        Args:
            obj: any object that ``torch.save`` can write; a state dict rather than a module.
            f: a path, or a file object if ``safe_serialization`` is False. A file at the path is replaced atomically.
            safe_serialization: whether to write a safetensors file instead; ``obj`` must then be a dict of tensors by
                name.

        Raises:
            RuntimeMisuse: ``obj`` contains shards, and some ranks did not make this call; ``obj`` is a sharded module;
                or ``safe_serialization`` is True, and ``obj`` is not a dict of tensors or safetensors is not installed.
        """
        from hpcaccel.runtime.checkpointing import export_model

        each = self._project_config is not None and self._project_config.save_on_each_node
        session = self._session
        if session.engine is not None:
            session.engine.refuse_shards(obj)
        export_model.save(obj, f, session.group, session.settings, safe=safe_serialization, on_each_node=each)

    def save_model(
        self,
        model: nn.Module,
        save_directory: PathLike,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights in the layout of Hugging Face's libraries. For a sharded model all ranks must call
        this; rank 0 gathers the weights of one file at a time.

        Args:
            max_shard_size: maximum size of a file in bytes, or a string such as ``"10GB"``; a larger tensor gets its
                own file.
            safe_serialization: whether to write safetensors files. If False, the files are written by ``torch.save``.

        Raises:
            RuntimeMisuse: the model is sharded, and some ranks did not make this call; the model's state dict contains
                an object that is not a tensor, or a tensor without values; ``save_directory`` is a file; safetensors is
                not installed.
            CheckpointError: on all ranks, if a sharded model could not be written.
        """
        from hpcaccel.runtime.checkpointing.model_weight_files import save_model

        session, directory = self._session, Path(save_directory)
        if (engine := self._engine_of(model)) is not None:
            from hpcaccel.runtime.deepspeed.engine_checkpoint import WholeWeights, whole_state

            model = WholeWeights(whole_state(engine, session.group, session.settings, "save_model()"))
        save_model(
            model, directory, session.group, session.settings, max_shard_size=max_shard_size, safe=safe_serialization
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's full, unsharded state dict. For a sharded model all ranks must call this: rank 0 gets the state
        dict, with tensors in CPU memory, and the other ranks get an empty dict.

        Args:
            unwrap: whether to use the parameter names of the model without wrappers.

        Raises:
            RuntimeMisuse: the model is sharded, and some ranks did not make this call.
        """
        from hpcaccel.runtime.checkpointing import export_model

        if (engine := self._engine_of(model)) is not None:
            from hpcaccel.runtime.deepspeed.engine_checkpoint import whole_state

            return whole_state(engine, self._session.group, self._session.settings, "get_state_dict()")
        return export_model.get_state_dict(model, self._session.group, self._session.settings, unwrap=unwrap)

    def _engine_of(self, model: nn.Module) -> Any:
        """DeepSpeed's engine of ``model``; None with other strategies."""
        from hpcaccel.runtime.parallel import ddp

        if ddp.is_engine(model):
            return model
        wrapper = self._session.engine
        return None if wrapper is None or wrapper.engine.module is not model else wrapper.engine

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects with ``state_dict`` and ``load_state_dict`` in checkpoints. All ranks pass the same objects.

        Raises:
            RuntimeMisuse: an object lacks one of these methods.
        """
        self._session.prepared.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank that saves, before each save. Models that the hook
        removes from either list are not saved by hpcaccel. ``output_dir`` is the directory that the script passed to
        ``save_state``, else a directory whose files become part of the checkpoint.

        Args:
            hook: gets a list of models, a list of their state dicts, and ``output_dir``.

        Returns:
            A handle, whose ``remove()`` removes the hook.
        """
        from hpcaccel.runtime.checkpointing.prepared_objects import add_hook

        return add_hook(self._session.prepared.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before each load. Models that the hook removes from the list
        are not loaded by hpcaccel.

        Returns:
            A handle, whose ``remove()`` removes the hook.
        """
        from hpcaccel.runtime.checkpointing.prepared_objects import add_hook

        return add_hook(self._session.prepared.load_hooks, hook)

    def save_state(
        self, output_dir: PathLike | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> str:
        """Save all prepared and registered objects now. All ranks call this.

        Args:
            output_dir: directory to save in; older checkpoints in it are not deleted. By default, the run's checkpoint
                directory. If the project configuration numbers checkpoints, the next numbered directory is always used.
            safe_serialization: ignored: hpcaccel's checkpoint format contains no pickles.

        Returns:
            The checkpoint's directory.

        Raises:
            RuntimeMisuse: there is no directory; a keyword is unknown; rank 0 did not make this call; the model is
                sharded, and another rank did not make this call.
            CheckpointError: on all ranks that made this call, if saving failed on any of them, or if the numbered
                directory already exists.
        """
        from hpcaccel.runtime import save_state as saving

        saving.refuse_unknown("save_state()", save_model_func_kwargs)
        directory = None if output_dir is None else Path(output_dir).expanduser().absolute()
        return str(saving.save_state(self._session, directory, saving.numbered(self._session, self._project_config)))

    def load_state(
        self,
        input_dir: PathLike | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> ResumedCounters:
        """Restore a checkpoint. All ranks call this.

        A loader that was in the middle of an epoch continues there; ``skip_first_batches`` with the same number of
        batches then skips nothing further.

        Args:
            input_dir: a checkpoint, or a directory of checkpoints, of which the newest is used. By default, this
                training's newest checkpoint is used.
            load_kwargs, load_model_func_kwargs: ``map_location`` and ``weights_only`` are ignored; others are errors.

        Returns:
            An object with the attributes ``step``, ``epoch`` and ``path`` of the checkpoint.

        Raises:
            RuntimeMisuse: ``input_dir`` is not given, and this training has no checkpoint; a keyword is unknown; some
                ranks did not make this call.
            CheckpointError: the checkpoint is missing, damaged, or belongs to other objects.
        """
        from hpcaccel.runtime import save_state as saving

        saving.refuse_unknown("load_state()", {**(load_kwargs or {}), **load_model_func_kwargs})
        directory = None if input_dir is None else Path(input_dir).expanduser().absolute()
        return saving.load_state(self._session, directory, saving.numbered(self._session, self._project_config))
