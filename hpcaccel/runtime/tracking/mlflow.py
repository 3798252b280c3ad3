"""Tracker for MLflow. Tested with mlflow-skinny and a file store."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

from hpcaccel.runtime.tracking.general_tracker import (
    GeneralTracker,
    is_number,
    leave_out,
    on_main_process,
    plain_values,
)

__all__ = ["MLflowTracker"]

RUN_TAG = "hpcaccel.run"
"""Tag of an MLflow run; its value is the run directory's id."""
PARAMETERS_AT_ONCE = 100
"""MLflow's maximum number of parameters in one request."""
PARAMETER_CHARACTERS = 6000
"""MLflow's maximum length of a parameter's value. Older servers accept less and return an error."""


class MLflowTracker(GeneralTracker):
    """All attempts of a run log to the MLflow run whose tag ``hpcaccel.run`` is the id of the run directory, unless
    ``run_id`` or ``MLFLOW_RUN_ID`` selects another run.

    Args:
        experiment_name: MLflow experiment, created if missing; ``MLFLOW_EXPERIMENT_NAME`` overrides it.
        logging_dir: artifact location of a new experiment.
        run_id: MLflow run to continue; ``MLFLOW_RUN_ID`` overrides it.
        tags: a dict, or a JSON object as text; ``MLFLOW_TAGS`` overrides it.
        nested_run: make the run a child of the active run; ``MLFLOW_NESTED_RUN`` overrides it.
        run_name: name of a new run.
        description: description of the run.
    """

    name = "mlflow"
    requires_logging_directory = False
    packages = ("mlflow",)

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = os.environ.get("MLFLOW_RUN_ID", run_id)
        tags = os.environ.get("MLFLOW_TAGS", tags)
        self.tags: dict[str, Any] = dict(json.loads(tags) if isinstance(tags, str) else tags or {})
        nested = os.environ.get("MLFLOW_NESTED_RUN")
        self.nested_run = nested_run if nested is None else nested.lower() in ("1", "true", "yes", "on", "y", "t")
        self.run_name = run_name
        self.description = description

    @on_main_process
    def start(self) -> None:
        import mlflow

        experiment = mlflow.get_experiment_by_name(self.experiment_name)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            where = None if self.logging_dir is None else os.fspath(self.logging_dir)
            number = mlflow.create_experiment(self.experiment_name, artifact_location=where, tags=self.tags or None)
        tags = dict(self.tags)
        if self.continued_run and self.run_id is None:
            tags[RUN_TAG] = self.continued_run
            same = f"tags.`{RUN_TAG}` = '{self.continued_run}'"
            found = mlflow.search_runs([number], filter_string=same, max_results=1, output_format="list")
            self.run_id = found[0].info.run_id if found else None
        self.active_run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=number,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=tags or None,
            description=self.description,
        )

    @property
    def tracker(self) -> Any:
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log parameters. MLflow never changes a parameter, so a resumed run keeps those of its first attempt."""
        import mlflow

        known = mlflow.get_run(self.active_run.info.run_id).data.params if self.run_id else {}
        left = iter(_parameters(self.name, values, known))
        while part := dict(islice(left, PARAMETERS_AT_ONCE)):
            mlflow.log_params(part)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values by name; see ``GeneralTracker.log``.

        Args:
            values: numbers by name. The numbers of a dict are logged as ``name/part``.
            kwargs: passed to ``mlflow.log_metrics``.
        """
        import mlflow

        numbers = {}
        for name, value in plain_values(values).items():
            if is_number(value):
                numbers[name] = value
            elif isinstance(value, dict):
                numbers.update({f"{name}/{part}": number for part, number in value.items()})
            else:
                leave_out(self.name, name, value, "numbers and dicts of numbers")
        mlflow.log_metrics(numbers, step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        import mlflow

        mlflow.log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        import mlflow

        mlflow.log_artifact(local_path, artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        import mlflow

        mlflow.log_artifacts(local_dir, artifact_path)

    @on_main_process
    def finish(self) -> None:
        import mlflow

        mlflow.end_run()


def _parameters(tracker: str, values: Mapping[str, Any], known: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Pairs (name, value) of the parameters to log: not those that the run already has, nor those with too long a
    value."""
    taken = []
    for name, value in values.items():
        if len(str(value)) > PARAMETER_CHARACTERS:
            leave_out(tracker, name, value, f"values of up to {PARAMETER_CHARACTERS} characters")
        elif name not in known:
            taken.append((name, value))
    return taken
