"""The files of DeepSpeed's engine in a checkpoint, and whole weights gathered from its shards.

The engine writes its own format, with pickles, into the directory of a save. The manifest lists these files with their
CRCs. The engine reads them only after the CRCs have been checked, and through ``_CheckedFiles``, which lets the pickles
create tensors, plain values and the few classes of DeepSpeed in ``_CLASSES``, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing import export_model
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.settings import Settings

__all__ = ["EngineFiles", "WholeWeights", "whole_state"]

TAG = "deepspeed"
"""Name of the engine's folder in a checkpoint."""
LATEST = "latest"
"""File in which DeepSpeed's own programs find the folder's name."""
_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes whose objects are in the optimizer files of ZeRO."""


class EngineFiles:
    """The files of one engine; see ``hpcaccel.checkpoint.attached_files.AttachedFiles``.

    Raises:
        RuntimeMisuse: the engine writes its checkpoints in the background, so that they cannot be committed.
    """

    def __init__(self, engine: Any, group: RankGroup) -> None:
        self._engine = engine
        self._group = group
        inner = engine.checkpoint_engine
        if getattr(inner, "is_decoupled", bool)():  # older versions do not have it
            raise RuntimeMisuse(
                "the DeepSpeed configuration lets the engine write checkpoints in the background (checkpoint.writer), "
                "which cannot be committed together with hpcaccel's files. Remove the section checkpoint.writer"
            )
        self._files = engine.checkpoint_engine = _CheckedFiles(inner)
        if (copy := getattr(engine, "_copy_recovery_script", None)) is not None:
            engine._copy_recovery_script = lambda path: self._files.attempt(lambda: copy(path))

    @property
    def layout(self) -> dict[str, Any]:
        """Settings that must be equal at the save and the load, for the manifest."""
        return {"zero_stage": int(self._engine.zero_optimization_stage())}

    def save(self, directory: Path) -> Iterable[Path]:
        """Write the engine's checkpoint into ``directory``. Returns the files that this rank wrote."""
        self._files.begin()
        self._engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
        written = self._files.written()
        swapped = directory / TAG / "offloaded_tensors" / f"rank{self._group.rank:02d}"
        written += [path for path in sorted(swapped.rglob("*")) if path.is_file()]
        if self._group.is_main:
            (directory / LATEST).write_text(TAG)
            written += [path for path in sorted(directory.iterdir()) if path.name == LATEST or _is_tool(path)]
        return written

    def refuse(self, content: Mapping[str, Any]) -> None:
        """Check that the engine can load a checkpoint with this manifest.

        Raises:
            CheckpointError: the checkpoint is not the engine's, has another ZeRO stage or was saved by a different
                number of ranks.
        """
        mesh = content.get("mesh") or {}
        if "attached" not in content:
            raise CheckpointError(
                f"the checkpoint was saved with strategy={mesh.get('strategy')!r}, and DeepSpeed's engine cannot load "
                "it. Continue with that strategy; or load only the weights into the model, before prepare(), with "
                "hpcaccel.load_checkpoint_in_model(model, path)"
            )
        stage, now = mesh.get("zero_stage"), self.layout["zero_stage"]
        if stage != now:
            raise CheckpointError(
                f"the checkpoint was saved with ZeRO stage {stage}, and DeepSpeed cannot load it with stage {now}. Set "
                f"zero_stage to {stage}"
            )
        ranks = content.get("world_size")
        if ranks != self._group.world_size:
            raise CheckpointError(
                f"the checkpoint was saved by {ranks} ranks, and DeepSpeed can load it only with {ranks} ranks, not "
                f"with {self._group.world_size}. Continue with {ranks} ranks. The script zero_to_fp32.py in the "
                "checkpoint writes its weights as one state dict, for any number of ranks"
            )

    def check(self, path: Path) -> None:
        """Check that a file with a pickle creates only tensors, plain values and objects of ``_CLASSES``. This is done
        on all ranks before any loads: if one rank failed while loading, the others would wait for it.

        Raises:
            CheckpointError: the file contains anything else.
        """
        if path.suffix != ".pt":
            return
        with torch.serialization.safe_globals(_classes()):
            found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if found:
            raise CheckpointError(f"{path} contains a pickle of {', '.join(found)}, which hpcaccel does not load")

    def load(self, directory: Path) -> None:
        """Restore the engine: weights, optimizer, its scheduler and loss scale.

        Raises:
            CheckpointError: the engine did not find or did not accept its files.
        """
        with torch.serialization.safe_globals(_classes()):
            path, _ = self._engine.load_checkpoint(str(directory), tag=TAG)
        if path is None:
            raise CheckpointError(f"DeepSpeed's engine found no checkpoint in {directory / TAG}")


class _CheckedFiles:
    """Stands in front of the engine's own writer and reader of files, to which it passes everything else.

    It records which files this rank writes. An error while writing is raised after the engine's last barrier, because
    the other ranks would wait there. Files are read without arbitrary pickles.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._written: list[Path] = []
        self._problem: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def begin(self) -> None:
        self._written, self._problem = [], None

    def written(self) -> list[Path]:
        """The files that this rank has written since ``begin``.

        Raises:
            Exception: the first error of a write.
        """
        if self._problem is not None:
            raise self._problem
        return self._written

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(lambda: self._inner.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        self.attempt(lambda: self._inner.save(state_dict, path))
        self._written.append(Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=True)

    def attempt(self, write: Callable[[], Any]) -> None:
        """Call ``write``, and keep its error for ``written``."""
        try:
            write()
        except Exception as error:
            self._problem = self._problem or error


def _is_tool(path: Path) -> bool:
    """Whether this is one of the scripts that the engine copies into a checkpoint."""
    return path.name.startswith("zero_to_") and path.suffix == ".py"


def _classes() -> list[Any]:
    """The classes in ``_CLASSES`` that the installed DeepSpeed has."""
    found = []
    for name in _CLASSES:
        module, _, member = name.rpartition(".")
        kind = getattr(import_module(module), member, None)
        if kind is not None:
            found.append(kind)
    return found


# -- whole weights


def whole_state(engine: Any, group: RankGroup, settings: Settings, call: str) -> dict[str, Any]:
    """The state dict of the engine's model. Under ZeRO-3 all ranks call this: rank 0 gets whole tensors in CPU memory,
    and the other ranks get an empty dict.

    Args:
        call: the script's call, for error messages.

    Raises:
        RuntimeMisuse: the weights are sharded, and some ranks did not make this call.
    """
    if engine.zero_optimization_stage() < 3:
        return export_model.named_state(engine.module)
    export_model.meet_for_shards(group, settings, call)
    return engine._zero3_consolidated_16bit_state_dict() or {}


class WholeWeights(torch.nn.Module):
    """Placeholder for a model whose state dict has been gathered, in calls that write a model's files."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._state
