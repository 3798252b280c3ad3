"""Numbers that batch step and ranks agree on, apart from the records, whose classes a rank need not import to start."""

from __future__ import annotations

__all__ = ["EXIT_CONTINUED", "PROTOCOL"]

PROTOCOL = 1
"""Version of the protocol between the batch step and the ranks, in ``HPCACCEL_PROTOCOL``."""

EXIT_CONTINUED = 85
"""Exit code of a process that stopped and is to be continued."""
