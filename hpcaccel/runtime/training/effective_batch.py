"""How many samples an optimizer step sees: what a learning rate must fit, and what nobody writes down."""

from __future__ import annotations

from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.training.accumulation import Accumulation

__all__ = ["effective_batch"]


def effective_batch(accumulation: Accumulation, group: Group) -> str | None:
    """In words for the log, by the loader that feeds the training; None where that does not say."""
    loader = accumulation.loaders.current
    try:
        total = getattr(loader, "total_batch_size", None)
    except TypeError:  # batches of no fixed size
        return None
    if total is None:
        size = getattr(loader, "batch_size", None)
        if size is None:
            size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        total = size * group.data_size if isinstance(size, int) else None
    if not isinstance(total, int) or total < 1:
        return None
    ranks, steps = group.data_size, accumulation.steps
    parts = [f"{total // ranks}"]
    if ranks > 1:
        parts.append(f"{ranks} ranks")
    if steps > 1:
        parts.append(f"{steps} micro-batches")
    made = f" ({' × '.join(parts)})" if len(parts) > 1 else ""
    return f"a step sees {total * steps} samples{made}"
