"""Checkpoints: sharded, committed whole, verified when they are loaded, resharded when the world has changed.

From the bottom: ``tree`` (Python state as typed JSON), ``ranks`` (agreeing on errors), ``manifest`` and ``storage``
(what lies on the disk), ``planning`` (who writes and reads what), ``commit`` (how it appears and disappears),
``state`` and ``optimizer`` (what a training consists of), ``collect`` and ``restore`` (taken apart, put together),
``engine`` (save, find, load).
"""

from hpcaccel.checkpoint.engine import CheckpointEngine, Guarantee, LoadedCheckpoint
from hpcaccel.checkpoint.rng import capture_rng, restore_rng
from hpcaccel.checkpoint.state import Stateful, TrainingState

__all__ = [
    "CheckpointEngine",
    "Guarantee",
    "LoadedCheckpoint",
    "Stateful",
    "TrainingState",
    "capture_rng",
    "restore_rng",
]
