"""Checkpoints: sharded, committed whole, verified when they are loaded, resharded when the world has changed.

From the bottom: ``tree`` (Python state as typed JSON), ``rank_agreement`` (an error on one rank is an error on all),
``manifest_writer`` and ``dcp_storage`` (the files on the disk), ``dcp_planners`` (which rank writes and reads what),
``commit`` (how a checkpoint appears and disappears), ``training_state`` and ``optimizer_state`` (what a training
consists of), ``collect`` and ``restore`` (taken apart, put together), ``engine`` (save, find, load). Saves in the
background: ``snapshot_memory`` (the memory), ``background`` (the rank's side) and ``writer`` (a process without torch,
so what is below is imported when it is first used).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.checkpoint.engine import CheckpointEngine as CheckpointEngine
    from hpcaccel.checkpoint.loading import Guarantee as Guarantee
    from hpcaccel.checkpoint.loading import LoadedCheckpoint as LoadedCheckpoint
    from hpcaccel.checkpoint.rng import capture_rng as capture_rng
    from hpcaccel.checkpoint.rng import restore_rng as restore_rng
    from hpcaccel.checkpoint.training_state import Stateful as Stateful
    from hpcaccel.checkpoint.training_state import TrainingState as TrainingState

_NAMES = {
    "engine": "CheckpointEngine",
    "loading": "Guarantee LoadedCheckpoint",
    "rng": "capture_rng restore_rng",
    "training_state": "Stateful TrainingState",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpcaccel.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"hpcaccel.checkpoint.{_HOME[name]}"), name)
    globals()[name] = value
    return value
