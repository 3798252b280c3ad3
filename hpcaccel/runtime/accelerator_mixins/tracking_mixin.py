"""Methods that log values to the run's metrics and trackers, and that end the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccel.runtime.accelerator_mixins import SessionMixin

__all__ = ["TrackingMixin"]


class TrackingMixin(SessionMixin):
    _project_config: Any
    project_dir: str | None

    def _select_trackers(self, log_with: Any) -> None:
        """Select the trackers of the constructor's ``log_with``."""
        if log_with is not None:
            self._hub().want(log_with, self.logging_dir)

    def _hub(self) -> Any:
        """The trackers of the session, created at first use: a training without trackers does not import them."""
        session = self._session
        if session.tracking is None:
            from hpcaccel.runtime.tracking.hub import Tracking

            run, metrics, is_main = session.place.run, session.loop.context.metrics, session.group.is_main
            session.tracking = Tracking(
                session.trackers, metrics, is_main=is_main, run_id=None if run is None else run.run_id
            )
        return session.tracking

    @property
    def log_with(self) -> list[Any]:
        """The selected trackers that can be used, each as a member of ``LoggerType``, a name or an object."""
        return [] if self._session.tracking is None else list(self._session.tracking.wanted)

    @property
    def trackers(self) -> list[Any]:
        """The trackers that ``init_trackers`` has started; empty on ranks other than 0."""
        return self._session.trackers

    @property
    def logging_dir(self) -> str | None:
        """Directory for trackers that write files. The first of these that is set: ``logging_dir`` of
        ``project_config``, ``project_dir``, the folder ``trackers`` in the run directory."""
        given: str | None = getattr(self._project_config, "logging_dir", None) or self.project_dir
        run = self._session.place.run
        return given if given is not None or run is None else str(run.trackers)

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start the trackers of ``log_with`` on rank 0, after finishing those of an earlier call. Before this call they
        neither connect nor write files.

        After a requeue most trackers continue the runs that they had started (see the trackers' classes), unless
        ``init_kwargs`` select other runs.

        Args:
            project_name: name of the trackers' project, experiment or directory.
            config: hyperparameters to store.
            init_kwargs: keyword arguments by tracker, such as ``{"wandb": {"tags": ["a"]}}``. Unknown names are
                ignored with a warning.
        """
        self._hub().start(project_name, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker ``name``. On ranks other than 0, if no tracker has started, or if this tracker cannot be used,
        returns an object whose methods do nothing.

        Args:
            unwrap: whether to return the object of the tracker's own package instead, such as a W&B run.

        Raises:
            RuntimeMisuse: trackers have started, and no selected tracker has this name.
        """
        return self._hub().get(name, unwrap=unwrap)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Log values to the run's metrics and the trackers, on rank 0.

        Args:
            values: numbers, strings, tensors of one element, or dicts of these. Other objects go to trackers only.
            step: step to log the values for. By default the number of completed optimizer steps, plus one between
                accumulation boundaries, but not less than the largest step logged before. If a name has several values
                at one step, the last value counts in the metrics and in W&B; TensorBoard shows all values.
            log_kwargs: keyword arguments by tracker, such as ``{"wandb": {"commit": False}}``.

        Example::

            accelerator.log({"loss": 0.5, "eval": {"accuracy": 0.9}}, step=1)
        """
        from hpcaccel.runtime.training.metrics_writer import log_values

        log_values(self._session, values, step, log_kwargs or {}, self._setup.accumulation)

    def end_training(self) -> None:
        """End the training: write its outcome, leave the process group, and finish the trackers. At the normal end of a
        program hpcaccel does the same, but only flushes the trackers. All ranks must call this.

        If the script uses ``resume``, ``epochs``, ``steps`` or ``checkpoint``, steps that are not saved yet are saved.

        Raises:
            CheckpointError: these steps could not be saved.
        """
        from hpcaccel.runtime.distributed.world import World
        from hpcaccel.runtime.states.partial_state import PartialState

        session = self._setup.session
        try:
            session.end()
        finally:  # after leaving the group, so that other ranks do not wait for a slow upload
            if session.tracking is not None:
                session.tracking.finish()
        if session.was_reset and World.existing() is not None:  # the group belongs to a later Accelerator
            PartialState().destroy_process_group()
