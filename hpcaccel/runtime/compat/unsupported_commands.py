"""``__getattr__`` of the pages with Accelerate's commands, of which none is here."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.compat.unsupported import refuse_all

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    refuse_all(
        name,
        "Accelerate's commands are not here: `hpcaccel submit job.yaml`, srun or torchrun start ranks (launch), a spec "
        "and a cluster profile say where and how (config), `hpcaccel cluster probe` shows what there is (env), "
        "`hpcaccel checkpoint` looks into checkpoints and converts them (merge-weights)",
    )
