"""Where this process stands among the ranks: what ``Standing`` says, and how the ranks are arranged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator_mixins.session_mixin import Face
from hpcaccel.runtime.distributed.process_info import Standing, distributed_type
from hpcaccel.runtime.enums import DistributedType

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpcaccel.runtime.distributed.process_states import AcceleratorState
    from hpcaccel.runtime.distributed.world import World

__all__ = ["PlaceFace"]


class PlaceFace(Face, Standing):
    @property
    def _world(self) -> World:
        return self._setup.session.world

    @property
    def distributed_type(self) -> DistributedType:
        """NO, MULTI_CPU or MULTI_GPU; FSDP where models are sharded."""
        return distributed_type(self._world, self._setup.session)

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes with a GPU each."""
        return self.use_distributed and self.device.type == "cuda"

    @property
    def state(self) -> AcceleratorState:
        from hpcaccel.runtime.distributed.process_states import AcceleratorState

        return AcceleratorState(_session=self._setup.session)

    @property
    def is_fsdp2(self) -> bool:
        return self._session.settings.strategy == "fsdp"

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        return self.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """What the constructor was told; None where it was told nothing."""
        return self._session.handlers.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh:
        """How the ranks are arranged, with torch's names. All of them must ask for the first time together."""
        return self._session.mesh

    @property
    def data_parallel_rank(self) -> int:
        """Which replica of the model this process belongs to."""
        layout = self._session.layout
        return self.process_index // (layout.shard * layout.tensor)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which shard of its replica this process holds."""
        layout = self._session.layout
        return self.process_index // layout.tensor % layout.shard

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each shared tensor this process holds."""
        return self.process_index % self._session.layout.tensor

    @property
    def pipeline_parallel_rank(self) -> int:
        """
        Raises:
            RuntimeMisuse: always; there is no pipeline parallelism here.
        """
        raise RuntimeMisuse('pipeline parallelism is not here: strategy="fsdp" and ParallelismConfig share a model out')

    @property
    def context_parallel_rank(self) -> int:
        """
        Raises:
            RuntimeMisuse: always; sequences are not split over ranks here.
        """
        raise RuntimeMisuse("context parallelism is not here: use ParallelismConfig(dp_shard_size=..., tp_size=...)")
