"""Trackers of services that keep runs of their own: each attempt of a training goes on in the same one."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from hpcaccel.runtime.tracking.general_tracker import GeneralTracker

__all__ = ["ContinuingTracker"]


class ContinuingTracker(GeneralTracker):
    """
    Args:
        run_name: the service's project.
        kwargs: of the service's own function that begins a run.
    """

    requires_logging_directory = False
    own_words: ClassVar[frozenset[str]] = frozenset()
    """Those of ``kwargs`` by which a script chooses the run itself."""
    own_variables: ClassVar[tuple[str, ...]] = ()
    """Variables of the environment that do so."""

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs

    @property
    def goes_on_in(self) -> str | None:
        """The id of the run that every attempt shares; None where there is none, or where somebody has chosen."""
        chosen = self.own_words & set(self.init_kwargs) or any(map(os.environ.get, self.own_variables))
        return None if chosen else self.continued_run
