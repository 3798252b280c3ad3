"""Selection of a model's blocks that are sharded, recomputed or compiled one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from hpcaccel.errors import RuntimeMisuse

__all__ = ["blocks", "owned_alone", "repeated_blocks"]


def blocks(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """The modules whose class is in ``names``, inner modules first; without names, the model's repeated blocks.

    Raises:
        RuntimeMisuse: a named class does not occur in the model.
    """
    if not names:
        return repeated_blocks(model)
    present = {type(module).__name__ for module in model.modules()}
    if missing := sorted(set(names) - present):
        raise RuntimeMisuse(
            f"fsdp.wrap or transformer_cls_names_to_wrap lists {', '.join(missing)}, which the model does not contain "
            f"(has: {', '.join(sorted(present))})"
        )
    found = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    return found[::-1]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks, such as the layers of a transformer or the stages of a convolutional network:
    modules in a ModuleList, ModuleDict or Sequential that have children, parameters and a sibling of the same class.
    Modules inside a block are left out."""
    found: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and module not in inside:
            members = list(module.children())
            counts = Counter(type(child) for child in members)
            chosen = [child for child in members if counts[type(child)] > 1 and _is_composed(child)]
            found.update(dict.fromkeys(chosen))
            inside.update(inner for child in chosen for inner in child.modules())
    return list(found)


def _is_composed(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def owned_alone(model: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules in ``chosen`` that share no parameter with a module outside themselves. A shared parameter, such as a
    tied embedding, must be handled together with all modules that use it."""
    uses: Counter[int] = Counter()
    for module in model.modules():
        uses.update(id(parameter) for parameter in module._parameters.values() if parameter is not None)
    kept = []
    for module in chosen:
        own: Counter[int] = Counter()
        for inner in module.modules():
            own.update(id(parameter) for parameter in inner._parameters.values() if parameter is not None)
        if all(uses[key] == count for key, count in own.items()):
            kept.append(module)
    return kept
