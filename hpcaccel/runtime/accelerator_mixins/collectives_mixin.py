"""What all ranks do together."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.accelerator_mixins.session_mixin import Face

__all__ = ["TogetherFace"]


class TogetherFace(Face):
    _triggered = False

    def gather(self, tensor: Any) -> Any:
        """All ranks' tensors, in lists, tuples and dictionaries of any depth, concatenated along dimension 0 in rank
        order, on every rank. A tensor without dimensions becomes one with one.

        Raises:
            RuntimeMisuse: something else than tensors; shapes or types differ among the ranks, or some do not come.
        """
        from hpcaccel.runtime.distributed.collectives import ops

        return ops.gather(tensor, self._group())

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``gather``, without the samples that the loader in use has repeated to fill up its last batch. Lists without
        tensors are joined as objects; of anything else one item a rank comes back.

        Args:
            use_gather_object: treat tensors as objects, too, so that their shapes may differ.

        Raises:
            RuntimeMisuse: as ``gather``.
        """
        from hpcaccel.runtime.distributed.collectives.gather_for_metrics import gather_for_metrics

        source = self._session.in_use.current
        return gather_for_metrics(input_data, self._group(), source, use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The ``sum``, ``mean`` or ``max`` of all ranks' tensors, nested as in ``gather``, times ``scale``, on every
        rank; ``none``: this rank's own.

        Raises:
            RuntimeMisuse: as ``gather``; an unknown reduction.
        """
        from hpcaccel.runtime.distributed.collectives import ops

        return ops.reduce(tensor, self._group(), reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors, nested as in ``gather``, lengthened with ``pad_index`` along ``dim`` to the longest of any rank.

        Raises:
            RuntimeMisuse: as ``gather``; lengths along other dimensions are not compared.
        """
        from hpcaccel.runtime.distributed.collectives import ops

        return ops.pad_across_processes(tensor, self._group(), dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Make the next ``check_trigger`` true on all ranks."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank has called ``set_trigger`` since the last time, which all ranks ask together.

        Raises:
            RuntimeMisuse: some ranks do not ask.
        """
        found = bool(self._group().max_of(int(self._triggered), "check_trigger"))
        if found:
            self._triggered = False
        return found

    def _group(self) -> Any:
        group = self._session.group
        group.refuse_if_left()
        return group
