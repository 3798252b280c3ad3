"""This process's place among the ranks, the device mesh, and collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator_mixins import SessionMixin
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.states.process_info import ProcessInfo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin
    from hpcaccel.runtime.distributed.world import World
    from hpcaccel.runtime.states.accelerator_state import AcceleratorState

__all__ = ["ProcessMixin"]


class _NotSupported(RuntimeMisuse, NotImplementedError):
    """A property that neither hpcaccel nor Accelerate supports."""


class ProcessMixin(SessionMixin, ProcessInfo):
    _triggered: bool | None = None
    """Whether this process has called ``set_trigger``; None before its first call or check."""

    @property
    def _world(self) -> World:
        return self._setup.session.world

    @property
    def distributed_type(self) -> DistributedType:
        """How the training is distributed: FSDP or DEEPSPEED for these strategies, MULTI_CPU, MULTI_GPU, MULTI_XPU …
        for other groups of ranks, and NO for a single process; or the value that the script has set."""
        return self._setup.session.distributed_type

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes, each with a GPU or another accelerator."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def state(self) -> AcceleratorState:
        """The state of this training, shared by all of its objects."""
        from hpcaccel.runtime.states.accelerator_state import AcceleratorState

        return AcceleratorState(_session=self._setup.session)

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over the ranks (strategy ``fsdp``)."""
        return self._session.settings.strategy == "fsdp"

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The ``DeepSpeedPlugin`` that ``prepare`` uses; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether tensor and context parallelism can be combined with FSDP: True with strategy ``fsdp``."""
        return self.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """The ``parallelism_config`` of this process's first Accelerator; None if it was not given."""
        return self._session.handlers.parallelism

    @property
    def torch_device_mesh(self) -> DeviceMesh:
        """The mesh of ranks, with torch's dimension names. The first read is a collective call of all ranks."""
        return self._session.mesh

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's replica of the model."""
        layout = self._session.layout
        return self.process_index // (layout.shard * layout.per_batch)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard within its replica."""
        layout = self._session.layout
        return self.process_index // layout.per_batch % layout.shard

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this process's part of each tensor-parallel tensor."""
        return self.process_index % self._session.layout.tensor

    @property
    def pipeline_parallel_rank(self) -> int:
        """Not supported.

        Raises:
            RuntimeMisuse, NotImplementedError: always.
        """
        raise _NotSupported(
            'pipeline-parallel training is not supported: use strategy="fsdp" or ParallelismConfig(tp_size=...) to '
            "distribute a model over ranks. For inference, hpcaccel.prepare_pippy divides it"
        )

    @property
    def context_parallel_rank(self) -> int:
        """Index of this process's part of each sequence."""
        layout = self._session.layout
        return self.process_index // layout.tensor % layout.context

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Context of one micro-batch in which each context-parallel rank has its part of the sequences, and
        ``scaled_dot_product_attention`` sees the keys and values of all parts. With ``cp_size`` 1 it changes nothing.

        Run the forward and the backward pass inside the context. Attention is causal or unmasked; masks are not
        supported.

        Args:
            buffers: tensors with a sequence dimension, the same on all ranks of the group: inputs, labels, positions.
                In the block they hold this rank's part: one chunk from each half of the sequence, so that all ranks
                have the same work. Compute labels and positions of tokens before the block.
            buffer_seq_dims: the sequence dimension of each buffer.
            no_restore_buffers: buffers that need not be restored after the block.

        Raises:
            RuntimeMisuse: lengths differ, or are not divisible by the number of ranks; a buffer requires a gradient.
        """
        session = self._session
        if session.layout.context == 1:
            yield
            return
        from hpcaccel.runtime.parallel.context_parallel import context_parallel

        config = session.handlers.parallelism
        with context_parallel(
            session.mesh["cp"],
            strategy=None if config is None or config.cp_handler is None else config.cp_handler.cp_comm_strategy,
            buffers=buffers,
            buffer_seq_dims=buffer_seq_dims,
            no_restore_buffers=no_restore_buffers,
        ):
            yield

    # -- collectives --------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate all ranks' tensors along dimension 0, in rank order, on every rank. Scalars become 1-d tensors.

        Args:
            tensor: tensors, in lists, tuples and dicts of any depth, of the same shapes and types on every rank.

        Returns:
            The same structure. A tensor of shape (n, …) has become one of shape (ranks × n, …).

        Raises:
            RuntimeMisuse: there are several ranks, and a leaf is not a tensor, the process group has been destroyed,
                shapes or types differ, or some ranks do not make this call. Of the calls in which all tensors are on
                GPUs, only the first few are checked, except with ``debug``.
        """
        from hpcaccel.runtime.distributed.collectives.gathering import gather

        return gather(tensor, self._group())

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like ``gather``, but drop samples that the loader in use has repeated to pad its last batch. Lists without
        tensors are concatenated as objects; with several ranks, any other object becomes a list of all ranks' objects.

        Args:
            use_gather_object: gather tensors as objects, too, so that their shapes may differ.

        Raises:
            RuntimeMisuse: shapes or types of tensors differ among the ranks; some ranks do not make this call.

        Example::

            correct = 0
            for inputs, labels in loader:
                guesses, labels = accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
                correct += int((guesses == labels).sum())
        """
        from hpcaccel.runtime.distributed.collectives.padding import gather_for_metrics

        source = self._session.in_use.current
        return gather_for_metrics(input_data, self._group(), source, use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce all ranks' tensors, nested as in ``gather``, on every rank, and multiply by ``scale``.

        Args:
            reduction: ``sum``, ``mean`` or ``max``; with ``none`` each rank keeps its own tensors.

        Returns:
            Tensors of the same shapes.

        Raises:
            RuntimeMisuse: as in ``gather``; ``reduction`` is unknown.
        """
        from hpcaccel.runtime.distributed.collectives.gathering import reduce

        return reduce(tensor, self._group(), reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors, nested as in ``gather``, with ``pad_index`` along ``dim`` to the greatest length on any rank.

        Args:
            dim: the dimension in which the shapes of the ranks' tensors may differ.
            pad_index: the value of the added entries.
            pad_first: whether to add them before the tensor's own entries, not after them.

        Raises:
            RuntimeMisuse: a leaf is not a tensor; types or numbers of dimensions differ; some ranks do not make this
                call.
        """
        from hpcaccel.runtime.distributed.collectives.padding import pad_across_processes

        return pad_across_processes(tensor, self._group(), dim=dim, pad_index=pad_index, pad_first=pad_first)

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """This process's trigger on its device: 1 after ``set_trigger``, 0 after a check; None before the first call of
        either. A script may assign a tensor; a change in place has no effect."""
        return None if self._triggered is None else torch.tensor(int(self._triggered), device=self.device)

    @flag_tensor.setter
    def flag_tensor(self, value: torch.Tensor | None) -> None:
        self._triggered = None if value is None else bool(value)

    def set_trigger(self) -> None:
        """Make the next ``check_trigger`` return True on all ranks. Any rank may call this, at any time.

        Example::

            if accelerator.is_main_process:  # such as: the loss is not finite
                accelerator.set_trigger()
            if accelerator.check_trigger():  # on all ranks
                print("stopping")
        """
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank has called ``set_trigger`` since this method last returned True. All ranks must call this.

        Raises:
            RuntimeMisuse: some ranks do not make this call.
        """
        found = bool(self._group().max_of(int(self._triggered or False), "check_trigger"))
        if found or self._triggered is None:
            self._triggered = False
        return found

    def _group(self) -> Any:
        group = self._session.group
        group.refuse_if_left()
        return group
