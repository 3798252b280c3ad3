"""Telling: numbers for the run's metrics and for trackers, and the end of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccel.runtime.accelerator_mixins.session_mixin import Face
from hpcaccel.runtime.training.log_values import tell

__all__ = ["TrackFace"]


class TrackFace(Face):
    _project_config: Any
    project_dir: str | None

    def _begin_tracking(self, log_with: Any) -> None:
        """What the constructor was told."""
        if log_with is not None:
            self._hub().want(log_with, self.logging_dir)

    def _hub(self) -> Any:
        """Made when it is first needed: a training without trackers imports none of this."""
        session = self._session
        if session.tracking is None:
            from hpcaccel.runtime.tracking.hub import Tracking

            run, metrics, is_main = session.place.run, session.loop.metrics, session.group.is_main
            session.tracking = Tracking(
                session.trackers, metrics, is_main=is_main, run_id=None if run is None else run.run_id
            )
        return session.tracking

    @property
    def log_with(self) -> list[Any]:
        """The trackers that were asked for and can work here: members of ``LoggerType``, names, objects."""
        return [] if self._session.tracking is None else list(self._session.tracking.wanted)

    @property
    def trackers(self) -> list[Any]:
        """The trackers that ``init_trackers`` has started; none on ranks other than 0."""
        return self._session.trackers

    @property
    def logging_dir(self) -> str | None:
        """Where trackers that need a directory write: ``project_config``'s ``logging_dir``, ``project_dir``, or the
        run directory's ``trackers``."""
        given: str | None = getattr(self._project_config, "logging_dir", None) or self.project_dir
        run = self._session.place.run
        return given if given is not None or run is None else str(run.trackers)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start what ``log_with`` asked for, on rank 0. Nothing is contacted and no file made before.

        A run that goes on after a requeue goes on in the trackers' runs as well, unless ``init_kwargs`` name others.

        Args:
            project_name: what the trackers call the project, the experiment or the directory.
            config: hyperparameters for them to keep; what is not given is not told.
            init_kwargs: keywords by tracker: ``{"wandb": {"tags": ["a"]}}``.
        """
        self._hub().start(project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name, or with ``unwrap`` its package's own object. On other ranks than 0, and where
        nothing is tracked: an object of which every method can be called and does nothing.

        Raises:
            RuntimeMisuse: trackers have started, but none of this name.
        """
        return self._hub().get(name, unwrap=unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write numbers to the run's metrics and to the trackers, on rank 0.

        Args:
            values: numbers, texts, tensors of one element, dicts of these; for trackers also what they take besides.
            step: default: the optimizer step, between accumulation boundaries the one that is under way. Values of
                the same name and step: metrics and W&B keep the last, TensorBoard all.
            log_kwargs: keywords by tracker: ``{"wandb": {"commit": False}}``.
        """
        tell(self._session, values, step, log_kwargs or {}, self._setup.accumulation)

    def end_training(self) -> None:
        """The training is over: its outcome is written, the group of ranks left, the trackers are finished. Programs
        that just end do so too."""
        from hpcaccel.runtime.distributed.process_states import PartialState
        from hpcaccel.runtime.distributed.world import World

        session = self._setup.session
        try:
            session.end()
        finally:  # after the group is left, where an upload that takes its time keeps nobody waiting
            if session.tracking is not None:
                session.tracking.finish()
        if session.was_reset and World.existing() is not None:  # the group is that of whoever has come after
            PartialState().destroy_process_group()
