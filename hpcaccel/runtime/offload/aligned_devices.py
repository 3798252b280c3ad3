"""The hook that gives a module its weights during its ``forward``, on the device where it computes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpcaccel.runtime.compat.introspection import named_module_tensors
from hpcaccel.runtime.distributed.collectives.nested_ops import find_device, send_to_device
from hpcaccel.runtime.offload.device_memory import as_device
from hpcaccel.runtime.offload.mapped_tensors import OffloadError, warm
from hpcaccel.runtime.offload.module_hooks import ModelHook, SequentialHook, outside_compiled_code
from hpcaccel.runtime.offload.quantized_tensors import bits_of, forget_state, scales_in, with_scales
from hpcaccel.runtime.offload.read_ahead import ReadAhead
from hpcaccel.runtime.offload.tensor_placement import TiedTensors, clear_cache_of, like, set_module_tensor_to_device
from hpcaccel.runtime.offload.weight_store import OffloadedWeightsLoader, PrefixedDataset

__all__ = [
    "AlignDevicesHook",
    "align_module_device",
    "has_offloaded_params",
    "offload_hook",
]


class AlignDevicesHook(ModelHook):
    """Moves a module's inputs to a device, and gives the module its weights there during its ``forward``.

    Args:
        execution_device: where the module computes; None means where its inputs and weights are.
        offload: whether the module has its weights only inside ``forward``.
        io_same_device: whether outputs are moved to the device of the inputs.
        weights_map: the weights by name; default: the present ones, in CPU memory.
        offload_buffers: whether persistent buffers are offloaded, too. If not, they are on ``execution_device``.
        place_submodules: whether the hook is for the weights of submodules, too.
        skip_keys: keyword arguments that are not moved.
        tied_params_map: tied tensors by key and device, so that a device holds one copy. An offloaded tied tensor must
            have its key in it.
    """

    def __init__(
        self,
        execution_device: Any = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self.bytes = 0
        self.takes_time = False
        self.read_ahead: ReadAhead | None = None
        self.clears_cache = True
        """Whether ``init_hook`` releases cached memory at its end. A function that attaches many hooks does so once."""
        self.ties: dict[str, Hashable] = {}
        """Keys in ``tied_params_map`` of this module's tied tensors, by name."""
        self._resting: dict[str, torch.Tensor] = {}
        """The module's placeholders outside of ``forward``: tensors on the meta device."""
        self._lent: list[tuple[Hashable, torch.device]] = []
        """Tied tensors that this module brought to a device, and takes away again."""

    def __repr__(self) -> str:
        names = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def target(self) -> torch.device | None:
        return None if self.execution_device is None else as_device(self.execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        target = self.target()
        if target is not None and target.type == "meta":
            self.tied_params_map = None
        present = dict(named_module_tensors(module, recurse=self.place_submodules))
        if not self.offload:
            self._place(module, target, present)
            return module
        weights = self.weights_map
        slots = [slot for slot in self._slots(module) if weights is None or slot[0] in weights]
        self.original_devices = {name: tensors[key].device for name, tensors, key in slots}
        if self.weights_map is None:
            held_here = {name: tensors[key] for name, tensors, key in slots} | scales_in(module)
            self.weights_map = {name: one.detach().to("cpu") for name, one in held_here.items()}
        for name, tensors, key in slots:
            held = tensors[key]
            if not held.is_meta and self.tied_params_map and held.data_ptr() in self.tied_params_map:
                self.ties.setdefault(name, held.data_ptr())
            tensors[key] = self._resting[name] = held if held.is_meta else like(held, held.detach().to("meta"))
        forget_state(module)
        self.bytes = sum(one.numel() * one.element_size() for one in self._resting.values())
        self.takes_time = any(self._takes_time(name, target) for name in self._resting)
        stay = {name: one for name, one in present.items() if name not in self._resting and target is not None}
        self.original_devices |= {name: tensor.device for name, tensor in stay.items()}
        self._place(module, target, stay)
        return module

    def _place(self, module: nn.Module, target: torch.device | None, names: Iterable[str]) -> None:
        """Move tensors to the device, where they stay."""
        for name in names if target is not None else ():
            set_module_tensor_to_device(module, name, target, tied_params_map=self.tied_params_map, clear_cache=False)
        if self.clears_cache:
            clear_cache_of(target)

    def _slots(self, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
        """For each offloaded tensor: its name, and where the module has it: the dictionary and its key."""
        for prefix, part in module.named_modules() if self.place_submodules else [("", module)]:
            dot = f"{prefix}." if prefix else ""
            held: list[tuple[dict[str, Any], set[str]]] = [(part._parameters, set())]
            if self.offload_buffers:
                held.append((part._buffers, part._non_persistent_buffers_set))
            for tensors, left_out in held:
                for key, one in tensors.items():
                    if one is not None and key not in left_out:
                        yield dot + key, tensors, key

    def _source(self, name: str) -> tuple[Any, str]:
        """The mapping that holds a weight, and its name there, without the prefixes."""
        weights: Any = self.weights_map
        while isinstance(weights, PrefixedDataset):
            name, weights = weights.prefix + name, weights.dataset
        return weights, name

    def _takes_time(self, name: str, target: torch.device | None) -> bool:
        weights, key = self._source(name)
        is_file = isinstance(weights, OffloadedWeightsLoader) and key not in weights.state_dict
        return is_file or (target is not None and target.type != "cpu")

    def warm(self) -> None:
        """Read the files of the weights into the page cache."""
        for name in list(self._resting):
            weights, key = self._source(name)
            if isinstance(weights, OffloadedWeightsLoader) and key not in weights.state_dict:
                warm(weights.stored(key))

    def read(self) -> dict[str, torch.Tensor]:
        """The weights by name, on the device, except tied ones that are there already."""
        target = self.target()
        return {name: self._fetch(name, target) for name in list(self._resting) if self._shared(name, target) is None}

    def _fetch(self, name: str, target: torch.device | None) -> torch.Tensor:
        assert self.weights_map is not None
        value, rest = self.weights_map[name], self._resting[name]
        if value.shape != rest.shape:
            raise OffloadError(
                f"the offloaded weight {name} has the shape {tuple(value.shape)}, but {tuple(rest.shape)} in the model"
            )
        found = value.detach().to(target or value.device, rest.dtype)
        return with_scales(found, self.weights_map, name) if bits_of(rest) == 8 else found

    def _shared(self, name: str, target: torch.device | None) -> torch.Tensor | None:
        key = self.ties.get(name)
        if key is None or target is None or not self.tied_params_map:
            return None
        return self.tied_params_map.get(key, {}).get(target)

    @outside_compiled_code
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._bring(module)
        if self.execution_device is None:
            return args, kwargs
        target = self.target()
        return send_to_device(args, target), send_to_device(kwargs, target, skip_keys=self.skip_keys)

    def _bring(self, module: nn.Module) -> None:
        arrived = self.read_ahead.take(self) if self.read_ahead is not None else {}
        target = self.target()
        for name, tensors, key in list(self._slots(module)):
            if name not in self._resting:
                continue  # not offloaded, or added to the module since
            new = self._shared(name, target)
            if new is None:
                new = like(self._resting[name], arrived[name] if name in arrived else self._fetch(name, target))
                if (tie := self.ties.get(name)) is not None and self.tied_params_map is not None:
                    self.tied_params_map.setdefault(tie, {})[new.device] = new
                    self._lent.append((tie, new.device))
            tensors[key] = new
        if self.read_ahead is not None:
            self.read_ahead.start(self)

    @outside_compiled_code
    def undo_pre_forward(self, module: nn.Module) -> None:
        for name, tensors, key in list(self._slots(module)) if self.offload else ():
            if name in self._resting:
                tensors[key] = self._resting[name]
                if bits_of(tensors[key]) == 8:
                    forget_state(module)
        while self._lent:
            tie, device = self._lent.pop()
            (self.tied_params_map or {}).get(tie, {}).pop(device, None)

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.undo_pre_forward(module)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the module's weights on their original devices. Tied weights are tied again."""
        for name, device in self.original_devices.items() if self.offload else ():
            if device.type == "meta":
                continue
            value = None
            if name in self._resting:
                value = self._shared(name, device)
                value = self._fetch(name, device) if value is None else value
            owner, _, key = name.rpartition(".")
            part = module.get_submodule(owner)
            if value is not None and isinstance(value, nn.Parameter):
                part._parameters[key] = value
                continue
            set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)
            tie = self.ties.get(name)
            if tie is not None and self.tied_params_map is not None and key in part._parameters:
                self.tied_params_map.setdefault(tie, {})[device] = part.get_parameter(key)
        clear_cache_of(*self.original_devices.values() if self.offload else ())
        return module


def offload_hook(module: nn.Module) -> AlignDevicesHook | None:
    """The hook that offloads the weights of this module itself; None if they are not offloaded."""
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    return next((one for one in hooks if isinstance(one, AlignDevicesHook) and one.offload), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether the weights of this module itself are offloaded."""
    return offload_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Any = None) -> Iterator[None]:
    """Context in which this module's own parameters are on a device, offloaded or not.

    Args:
        execution_device: default: the device of the module's hook; without an offloading hook, nothing is moved.
    """
    hook = offload_hook(module)
    if hook is not None:
        before, ahead = hook.execution_device, hook.read_ahead
        hook.execution_device = before if execution_device is None else execution_device
        hook.read_ahead = None
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device, hook.read_ahead = before, ahead
        return
    devices = {}
    if execution_device is not None:
        devices = {name: one.device for name, one in module.named_parameters(recurse=False)}
    try:
        for name in devices:
            set_module_tensor_to_device(module, name, execution_device, clear_cache=False)
        yield
    finally:
        for name, device in devices.items():
            set_module_tensor_to_device(module, name, device, clear_cache=False)
        clear_cache_of(*devices.values(), execution_device if devices else None)
