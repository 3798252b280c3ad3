"""``__getattr__`` of the pages with Accelerate's aids for tests, of which a few are here."""

from __future__ import annotations

from typing import Any

from hpcaccel.runtime.compat.unsupported import refuse_all

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    refuse_all(
        name,
        "It serves Accelerate's own tests. In a script's, pytest.mark.skipif, subprocess.run and "
        "torch.cuda.is_available() do the same",
    )
