"""The client's methods that send a spec: submit, check, render, plan, start a sweep; and the files to send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccel.service.client_answers import Submission
from hpcaccel.service.client_requests import ClientRequests
from hpcaccel.service.json_values import from_json

__all__ = ["SpecCalls"]


class SpecCalls(ClientRequests):
    """Methods that send specs. Their ``options`` are those of :meth:`submit`."""

    def submit(self, spec: str | Mapping[str, Any], **options: Any) -> Submission:
        """Submit a spec as a run, or with ``grid`` as an array.

        Args:
            spec: YAML text, or the values.
            options: any of these:

                - ``overrides``: list of ``key.sub=value``, as on the command line.
                - ``cluster``: a profile, ``local`` or ``slurm``. Default: the service's default profile, else Slurm.
                - ``directory``: absolute path on the service's machine, to which relative paths in the spec refer.
                  Default: where the service was started.
                - ``grid``: list of ``key=a,b,c``; the run is an array with a task for each combination.
                - ``from_run``: the checkpoint of the first attempt: ``RUN``, ``RUN@STEP`` or a path.
                - ``after``: runs that must end first.
                - ``idempotency_key``: 8 to 64 letters, digits, ``-`` and ``_``. A repeated call with the same key
                  returns the run of the first one; ``repeated`` is then True.

        Raises:
            ServiceSpecError: the spec or an option is not valid. ``details`` has an item for each problem.
            RunNotFound: ``from_run`` names no run.
            ServiceError: the cluster refused the job; with ``status`` 503, Slurm did not respond. After the latter, or
                a lost connection (``status`` 0), repeat the call with the same key.

        Example::

            made = client.submit(open("job.yaml").read(), cluster="alps", idempotency_key="tuesday-0001")
            print(made.run_id, made.job_id)
        """
        return from_json(Submission, self._post("runs", _spec_body(spec, options)))

    def check(self, spec: str | Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Check a spec, also against the stored facts about its cluster; nothing is submitted.

        Args:
            spec: YAML text, or the values.
            options: as in :meth:`submit`.

        Returns:
            ``valid`` (True), ``hash``, ``spec`` (all values, with defaults), ``warnings`` (a list of sentences) and
            ``facts_age_seconds`` (None if no facts are stored).

        Raises:
            ServiceSpecError: the spec or an option is not valid, or contradicts the facts.
        """
        return dict(self._post("check", _spec_body(spec, options)))

    def render(self, spec: str | Mapping[str, Any], **options: Any) -> str:
        """The batch script that would be submitted for a spec. Arguments and errors are those of :meth:`check`."""
        return self._text("render", _spec_body(spec, options))

    def plan(self, spec: str | Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
        """Compare when a job would start in several partitions and with several numbers of nodes.

        Args:
            spec: YAML text, or the values.
            options: as in :meth:`submit`; and ``partitions`` and ``nodes``, lists of strings of which all combinations
                are compared. Default: those of the spec.

        Returns:
            A dict for each combination, sorted by start time: ``partition``, ``nodes``, ``gpus``, ``time_seconds``,
            ``start_time`` (seconds since the epoch; None if unknown), ``waits_seconds``, ``node_hours``, ``gpu_hours``
            and ``problem`` (why the job would not start, or ""). Hours assume that the job uses its whole time limit.

        Raises:
            ServiceSpecError: the spec or an option is not valid.
            ServiceError: the cluster has no queue (``local``), there are too many combinations, or Slurm did not
                respond.
        """
        return list(self._post("plan", _spec_body(spec, options)))

    def start_sweep(self, spec: str | Mapping[str, Any], **options: Any) -> Submission:
        """Start a sweep from a spec with a section ``sweep``.

        Args:
            spec: YAML text, or the values.
            options: ``overrides``, ``cluster``, ``directory`` and ``idempotency_key``, as in :meth:`submit`.

        Returns:
            The sweep; ``tasks`` is the number of its workers.

        Raises:
            ServiceSpecError, ServiceError: as in :meth:`submit`.
        """
        return from_json(Submission, self._post("sweeps", _spec_body(spec, options)))

    def schema(self, *, sweep: bool = False) -> dict[str, Any]:
        """The JSON Schema of specs; with ``sweep``, that of specs with a section ``sweep``."""
        return dict(self._get("schema", {"sweep": "true" if sweep else "false"}))

    def spec_files(self) -> list[str]:
        """Paths of at most 200 spec files, relative to the directory in which the service was started."""
        return list(self._get("spec-files"))

    def spec_file(self, name: str) -> tuple[str, str]:
        """The content of a spec file.

        Args:
            name: one of :meth:`spec_files`.

        Returns:
            The YAML text, and the directory to which its relative paths refer (``directory`` of :meth:`submit`).

        Raises:
            RunNotFound: there is no such file.
        """
        found = self._get("spec-file", {"name": name})
        return found["yaml"], found["directory"]


def _spec_body(spec: str | Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in options.items() if value is not None}
    return {**given, **({"yaml": spec} if isinstance(spec, str) else {"spec": dict(spec)})}
