"""One model on many ranks: where its parts are."""

from __future__ import annotations

from hpcaccel.runtime.gradient_sync import no_sync, trigger_sync_in_backward
from hpcaccel.runtime.unwrapping import unwrap

__all__ = ["no_sync", "trigger_sync_in_backward", "unwrap"]
