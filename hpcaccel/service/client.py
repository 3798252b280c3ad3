"""``hpcaccel.Client``: the verbs of the service's REST for Python programs, over a port or a Unix socket."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from hpcaccel.service.client_answers import LogText, RunPage, Submission
from hpcaccel.service.client_connection import TIMEOUT_SECONDS, ServiceConnection, ServiceError, ServiceSpecError
from hpcaccel.service.client_requests import overview_of, path_part
from hpcaccel.service.client_run_reads import RunReads
from hpcaccel.service.client_specs import SpecCalls
from hpcaccel.service.json_values import from_json

if TYPE_CHECKING:
    from hpcaccel.view.sweep_view import SweepView

__all__ = ["Client", "LogText", "RunPage", "ServiceError", "ServiceSpecError", "Submission"]


class Client(RunReads, SpecCalls):
    """Client of ``hpcaccel serve``: reads, submits, stops and resumes the runs and sweeps of the service's user.

    Use each client in one thread at a time. The first request opens the connection.

    Methods take a run or a sweep as ``run_id``: an id, a unique prefix of one, a name (its latest run), a job id, or
    ``CLUSTER:RUN`` for a run on a cluster behind SSH. All of them raise ``RunNotFound`` if there is no such run,
    ``RunBusy`` if the run is in a state that does not allow the action (HTTP status 409), ``ServiceSpecError`` if an
    argument or a spec is not valid (422), and ``ServiceError`` for other refusals, or with ``status`` 0 if the service
    cannot be reached. These classes are in ``hpcaccel.errors`` and ``hpcaccel.service.client``.

    Args:
        url: the link that the service printed, whose token is used, or the address without a token. For a Unix socket:
            the base path only, or nothing.
        token: the token; default: that of the link, else ``HPCACCEL_SERVICE_TOKEN``.
        socket: path of the service's Unix socket, instead of a port.
        timeout_seconds: maximum time to wait for each answer.

    Raises:
        UserError: ``url`` is not an HTTP or HTTPS address.

    Example::

        with hpcaccel.Client("http://127.0.0.1:40123/?token=…") as client:
            for run in client.runs(state="running").runs:
                print(run.name, run.step)
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1",
        token: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._connection = ServiceConnection(url, token, socket, timeout_seconds=timeout_seconds)

    def __repr__(self) -> str:
        return f"Client({str(self._connection)!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next request opens a new one."""
        self._connection.close()

    # -- actions --------------------------------------------------------------------------------------------------

    def stop(
        self, run_id: str, then: Literal["pause", "requeue", "finish"] = "pause", *, idempotency_key: str | None = None
    ) -> None:
        """Request that a run save a checkpoint and stop. Returns before the ranks have stopped.

        Args:
            then: ``pause``: the run stays stopped until :meth:`resume`; ``requeue``: it returns to the queue;
                ``finish``: the code after the training loop runs, and the run ends.
            idempotency_key: 8 to 64 letters, digits, ``-`` and ``_``. A repeated call with the same key has no second
                effect.

        Raises:
            ServiceError: the run has ended; it is in the queue, and ``then`` is not ``pause``; its program is stopped
                by signals, and ``then`` is ``finish``.
        """
        self._post(f"runs/{path_part(run_id)}/stop", {"then": then}, key=idempotency_key)

    def save(self, run_id: str) -> None:
        """Request that a running training save a checkpoint and continue. Returns before the save.

        Raises:
            ServiceError: no training of the run is running, or its program is stopped by signals and decides itself
                when to save.
        """
        self._post(f"runs/{path_part(run_id)}/save")

    def profile(self, run_id: str, steps: int = 5, *, ranks: Sequence[int] = (0,)) -> None:
        """Request that ranks of a running training record their next steps with torch's profiler, and continue.

        :meth:`profiles` lists the traces, and :meth:`trace` downloads one.

        Args:
            steps: number of optimizer steps, 1 to 50.
            ranks: the ranks that record, at most 16.

        Raises:
            ServiceError: no training is running, there is no such rank, another request is open, or the program does
                not report its steps to hpcaccel.
        """
        self._post(f"runs/{path_part(run_id)}/profile", {"steps": steps, "ranks": list(ranks)})

    def cancel(self, run_id: str, *, idempotency_key: str | None = None) -> None:
        """Cancel a run now, without a requeue. :meth:`resume` continues it from its newest checkpoint.

        Args:
            idempotency_key: as in :meth:`stop`.

        Raises:
            ServiceError: the run has ended, and none of its jobs is left in the queue; with ``status`` 503, Slurm did
                not respond.
        """
        self._post(f"runs/{path_part(run_id)}/cancel", key=idempotency_key)

    def resume(self, run_id: str) -> str:
        """Continue a run that is paused, failed, cancelled or lost in a new job; for an array, all such tasks.

        The new job starts from the newest checkpoint.

        Returns:
            The id of the new job.

        Raises:
            RunBusy: the run has not ended, or will be requeued.
            ServiceError: the run is completed, or the cluster refused the job; with ``status`` 503, Slurm did not
                respond.
        """
        return str(self._post(f"runs/{path_part(run_id)}/resume")["job_id"])

    # -- sweeps ---------------------------------------------------------------------------------------------------

    def sweeps(self, *, limit: int = 50, offset: int = 0) -> RunPage:
        """A page of the list of sweeps, newest first.

        Args:
            limit: maximum number of rows, 1 to 1,000.
            offset: number of sweeps to skip.

        Returns:
            The rows, and the number of all sweeps.
        """
        answer = self._get("sweeps", {"limit": limit, "offset": offset})
        return RunPage(runs=[overview_of(one) for one in answer["sweeps"]], total=answer["total"])

    def sweep(self, run_id: str, *, rows: bool = True) -> SweepView:
        """State, results and plots of a sweep.

        Args:
            rows: whether to include a row for each trial.

        Raises:
            ServiceError: it is a run, not a sweep.
        """
        from hpcaccel.view.sweep_view import SweepView

        query = {"rows": "true" if rows else "false"}
        return from_json(SweepView, self._get(f"sweeps/{path_part(run_id)}", query))

    def trials(self, run_id: str) -> list[dict[str, Any]]:
        """A row for each trial of a sweep: ``trial``, ``state``, metrics, parameters, ``step``, ``seconds``,
        ``gpu_seconds``, ``worker`` and ``attempts``. Unknown values are None."""
        return list(self._get(f"sweeps/{path_part(run_id)}/trials"))

    def best(self, run_id: str, *, trial: int | None = None, metric: str | None = None) -> str:
        """The spec of a sweep's best trial as YAML text, which can be submitted as a run.

        Args:
            trial: number of a trial to select instead of the best one.
            metric: the metric to rank by; required if the sweep has several and ``trial`` is not given.

        Raises:
            ServiceError: no trial is complete, or there is no such trial or metric.
        """
        return self._text(f"sweeps/{path_part(run_id)}/best", query={"trial": trial, "metric": metric})

    def stop_sweep(self, run_id: str) -> None:
        """Request that the running trials save and stop; :meth:`resume_sweep` continues them.

        Raises:
            ServiceError: the sweep has ended.
        """
        self._post(f"sweeps/{path_part(run_id)}/stop")

    def cancel_sweep(self, run_id: str) -> None:
        """End the workers now; :meth:`resume_sweep` continues the trials from their checkpoints.

        Raises:
            ServiceError: the sweep has ended.
        """
        self._post(f"sweeps/{path_part(run_id)}/cancel")

    def resume_sweep(self, run_id: str, *, overrides: Sequence[str] = ()) -> None:
        """Continue a sweep with new workers.

        Args:
            overrides: changes of the sweep, such as ``sweep.max_trials=200``.

        Raises:
            RunBusy: a worker is running or queued.
            ServiceSpecError: an override is not valid, or changes a key that may not change.
            ServiceError: all trials are finished, or the budget is used up.
        """
        self._post(f"sweeps/{path_part(run_id)}/resume", {"overrides": list(overrides)})

    def clusters(self) -> list[dict[str, Any]]:
        """The clusters for which the service's user has a profile.

        Returns:
            For each cluster: ``name``, ``backend``, ``host`` (the login node behind SSH, else None), ``default``,
            ``slurm_version``, ``facts_age_seconds`` (None if it was not probed), ``partitions``, and ``problem`` (why
            the profile, its facts or its list of runs cannot be read; else "").
        """
        return list(self._get("clusters"))
