"""Sharded checkpoints: committed as a whole, verified when they are loaded, resharded if the ranks have changed.

Start reading in ``commit``: it describes how a checkpoint appears on the disk, and what remains after a kill.

- ``engine``: ``CheckpointEngine``, which saves, finds and loads; ``saving``: one save; ``loading``: one resume.
- ``training_state``, ``optimizer_state``, ``tree``, ``save_plan``, ``restore``: conversion of training state to tensors
  and back.
- ``dcp_storage``, ``shard_files``, ``manifest_writer``: the files, behind the interfaces of DCP
  (``torch.distributed.checkpoint``).
- ``chunk_reading``, ``chunk_targets``, ``stored_file``: reading with several threads; ``node_sharing``: the ranks of a
  node read each byte once.
- ``background``, ``snapshot_memory``, ``writer``: background saves, written by a process without torch. This
  package imports its modules on first use, so that the writer process need not import torch.
- ``node_snapshots``: snapshots in the memory of the nodes, from which crashed ranks resume; ``snapshot_parts``: their
  files.
- ``rank_agreement``: collective steps, in which an error on one rank is raised on all ranks.
- ``formats``: conversion to and from other programs' files.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.checkpoint.engine import CheckpointEngine as CheckpointEngine
    from hpcaccel.checkpoint.guarantees import Guarantee as Guarantee
    from hpcaccel.checkpoint.loading import LoadedCheckpoint as LoadedCheckpoint
    from hpcaccel.checkpoint.training_state import Stateful as Stateful
    from hpcaccel.checkpoint.training_state import TrainingState as TrainingState
    from hpcaccel.checkpoint.training_state import capture_rng as capture_rng
    from hpcaccel.checkpoint.training_state import restore_rng as restore_rng

_NAMES = {
    "engine": "CheckpointEngine",
    "guarantees": "Guarantee",
    "loading": "LoadedCheckpoint",
    "training_state": "Stateful TrainingState capture_rng restore_rng",
}
_HOME = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpcaccel.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"hpcaccel.checkpoint.{_HOME[name]}"), name)
    globals()[name] = value
    return value
