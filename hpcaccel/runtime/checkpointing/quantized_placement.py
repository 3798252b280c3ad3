"""Loading weights of bitsandbytes' layers: floating-point weights, which are quantised, and quantised ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.weight_placement import StoredWeight, WeightPlacement, check_shape
from hpcaccel.runtime.offload.device_memory import as_device
from hpcaccel.runtime.offload.model_parts import device_of
from hpcaccel.runtime.offload.quantized_tensors import bits_of, original_shape
from hpcaccel.runtime.offload.tensor_placement import set_module_tensor_to_device
from hpcaccel.runtime.offload.weight_store import offload_weight

__all__ = ["QuantizedPlacement"]


class QuantizedPlacement(WeightPlacement):
    """``WeightPlacement`` for a model with layers of bitsandbytes. A weight is quantised before it is written to the
    offload folder. Weights that are quantised in the checkpoint wait in memory until their statistics are read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._quantized = {name: tensor for name, tensor in self.tensors.items() if bits_of(tensor)}
        self._numbers: dict[str, torch.Tensor] = {}
        self._statistics: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        """By the names of the weights, then by their own names, without the layer's."""
        for name in [name for name in self.tensors if self._owner_of(name) is not None]:
            del self.tensors[name]

    def take(self, weight: StoredWeight, *, offload_buffers: bool) -> bool:
        """Place a tensor. Returns whether it belongs to the model."""
        if (owner := self._owner_of(weight.name)) is not None:
            self._statistics[owner][weight.name.removeprefix(owner.removesuffix("weight"))] = weight.read()
            return True
        present = self._quantized.get(weight.name)
        if present is None:
            return super().take(weight, offload_buffers=offload_buffers)
        self.loaded.add(weight.name)
        value = weight.read()
        if value.is_floating_point():
            check_shape(weight.name, value.shape, original_shape(present))
            self._put(weight.name, value)
        else:
            self._numbers[weight.name] = value
        return True

    def finish(self) -> None:
        """Place the weights that are quantised in the checkpoint.

        Raises:
            CheckpointError: statistics are missing; the weight was quantised to a different number of bits, or has
                another shape.
        """
        for name, numbers in self._numbers.items():
            bits, statistics = bits_of(self._quantized[name]), self._statistics.pop(name, {})
            if bits == 8 and numbers.dtype == torch.int8 and "SCB" in statistics:
                check_shape(name, numbers.shape, self._quantized[name].shape)
                self._put(name, numbers, scales=statistics["SCB"])
            elif bits == 4 and "weight.absmax" in statistics:
                self._put_packed(name, numbers, statistics)
            else:
                raise CheckpointError(
                    f"{name} is not a {bits}-bit weight of bitsandbytes in the checkpoint: it has {numbers.dtype} and "
                    f"{', '.join(sorted(statistics)) or 'no statistics'}. Use the configuration with which the "
                    "checkpoint was quantised"
                )
        self._numbers.clear()

    def _owner_of(self, name: str) -> str | None:
        """The weight that the statistics ``name`` belong to; None if it names no statistics."""
        layer, _, last = name.rpartition(".")
        eight = f"{layer}.weight" if layer else "weight"
        if last in ("SCB", "weight_format") and bits_of(self._quantized.get(eight)) == 8:
            return eight
        four = f"{f'.{name}'.rpartition('.weight.')[0]}.weight".removeprefix(".")
        return four if name.startswith(f"{four}.") and bits_of(self._quantized.get(four)) == 4 else None

    def _put(self, name: str, value: torch.Tensor, *, scales: torch.Tensor | None = None) -> None:
        device = device_of(name, self.map)
        set_module_tensor_to_device(
            self.model,
            name,
            "cpu" if device == "disk" else device,
            value=value,
            dtype=self._dtype(name),
            fp16_statistics=scales,
            clear_cache=False,
        )
        if device == "disk":
            self._write(name)

    def _put_packed(self, name: str, numbers: torch.Tensor, statistics: dict[str, torch.Tensor]) -> None:
        """Place a weight that is quantised to 4 bits in the checkpoint."""
        device, present = device_of(name, self.map), self._quantized[name]
        layer: Any = self.model.get_submodule(name.rpartition(".")[0])
        target = as_device("cpu" if device == "disk" else device)
        made = type(present).from_prequantized(numbers, statistics, device=target, module=layer)  # type: ignore[attr-defined]
        check_shape(name, original_shape(made), original_shape(present))
        layer.weight = made
        if device == "disk":
            self._write(name)

    def _write(self, name: str) -> None:
        """Move a quantised weight to the offload folder."""
        assert self.folder is not None
        weight: Any = self.model.get_parameter(name)
        offload_weight(weight, name, self.folder, self.index)
        if bits_of(weight) == 8:
            offload_weight(weight.SCB, f"{name.removesuffix('weight')}SCB", self.folder, self.index)
        set_module_tensor_to_device(self.model, name, "meta", clear_cache=False)

    def _dtype(self, name: str) -> torch.dtype | None:
        return torch.float32 if self.dtype is not None and self._is_kept(name) else self.dtype
