"""What every group of methods of the Accelerator stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup
    from hpcaccel.runtime.training_session import Session

__all__ = ["Face"]


class Face:
    _setup: Setup
    """This Accelerator's own settings."""

    @property
    def _session(self) -> Session:
        """What this process's Accelerators share.

        Raises:
            AttributeError: ``AcceleratorState._reset_state()`` has been called since the Accelerator was made.
        """
        session = self._setup.session
        if session.was_reset:
            raise AttributeError(
                "`AcceleratorState` object has no attribute that this Accelerator needs: it has been reset. "
                "This happens if `AcceleratorState._reset_state()` was called after the Accelerator was made. Make "
                "another Accelerator()"
            )
        return session

    def _begun(self) -> Setup:
        """This Accelerator's setup, in a training that has not ended: after the end of one, the next begins here. All
        ranks call."""
        session = self._session
        if session.has_ended or not session.group.is_alive:
            self._setup.begin_again()
        return self._setup
