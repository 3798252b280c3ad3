from __future__ import annotations

import pytest

from hpcaccel.spec import spec_from_values


@pytest.mark.parametrize(
    ("time", "wanted", "seconds"), [("10", 120, 120), ("2", 120, 60), ("1", 20, 20), ("UNLIMITED", 120, 120)]
)
def test_warning_seconds_are_capped_for_a_short_time_limit(time: str, wanted: int, seconds: int) -> None:
    values = {"name": "x", "entrypoint": {"command": ["true"]}, "slurm": {"time": time}}
    spec = spec_from_values({**values, "resilience": {"warning_seconds": wanted}})
    assert spec.warning_seconds == seconds
