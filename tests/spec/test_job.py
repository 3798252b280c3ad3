from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec, spec_from_values

Load = Callable[..., JobSpec]


@pytest.mark.parametrize(
    ("time", "wanted", "seconds"), [("10", 120, 120), ("2", 120, 60), ("1", 20, 20), ("UNLIMITED", 120, 120)]
)
def test_warning_seconds_are_capped_for_a_short_time_limit(time: str, wanted: int, seconds: int) -> None:
    values = {"name": "x", "entrypoint": {"command": ["true"]}, "slurm": {"time": time}}
    spec = spec_from_values({**values, "resilience": {"warning_seconds": wanted}})
    assert spec.warning_seconds == seconds


@pytest.mark.parametrize(
    ("text", "every", "replicas"),
    [
        ("{}", None, 0),
        ("{snapshot_every_steps: null}", None, 0),
        ("{snapshot_every_steps: 5, snapshot_replicas: 1}", 5, 1),
        ("{snapshot_every_steps: auto}", "auto", 0),
    ],
)
def test_snapshots_in_memory(load: Load, text: str, every: int | str | None, replicas: int) -> None:
    section = load(f"checkpoint: {text}").checkpoint
    assert (section.snapshot_every_steps, section.snapshot_replicas) == (every, replicas)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("snapshot_every_steps: 0", "snapshot_every_steps"),
        ("snapshot_every_steps: often", "snapshot_every_steps"),
        ("snapshot_replicas: 2", "snapshot_replicas 2 must be 0 or 1"),
    ],
)
def test_other_values_for_snapshots_are_refused(load: Load, text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        load(f"checkpoint: {{{text}}}")
