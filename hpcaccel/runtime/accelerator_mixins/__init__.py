"""The Accelerator's methods, grouped into mixins, and ``SessionMixin``, the base class of the mixins.

The methods delegate to the other packages of the runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup
    from hpcaccel.runtime.training_session import TrainingSession

__all__ = ["SessionMixin"]


class SessionMixin:
    """Access to the session that all Accelerators of a process share."""

    _setup: Setup
    """Settings, handlers and gradient accumulation of this Accelerator."""

    @property
    def _session(self) -> TrainingSession:
        """The session that all Accelerators of this process share.

        Raises:
            AttributeError: ``AcceleratorState._reset_state()`` was called after the Accelerator was created.
        """
        session = self._setup.session
        if session.was_reset:
            raise AttributeError(
                "`AcceleratorState` object has no attributes any more, so this Accelerator can no longer be used for "
                "training. This happens if `AcceleratorState._reset_state()` was called after the Accelerator was "
                "created. Create another Accelerator()"
            )
        return session

    def _begun(self) -> Setup:
        """The setup of this Accelerator. If the training has ended, start another; all ranks must call this."""
        session = self._session
        if session.has_ended or not session.group.is_alive:
            self._setup.begin_again()
        return self._setup
