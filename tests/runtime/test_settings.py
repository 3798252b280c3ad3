"""Settings of a rank, and the precedence of script, spec and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.core.rank_protocol import PROTOCOL
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError, RuntimeMisuse
from hpcaccel.runtime.settings import OutputLocation, Settings, load, locate
from tests.runtime.ranks import make_run


def test_settings_come_from_script_then_spec_then_defaults(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        runtime={"strategy": "fsdp", "mixed_precision": "bf16", "fsdp": {"wrap": ["Block"]}, "seed": 3},
        checkpoint={"every_steps": 50, "resume": "never"},
    )
    found = load(OutputLocation(run, 1), mixed_precision="no", strategy=None)
    assert found == Settings(
        strategy="fsdp", mixed_precision="no", seed=3, fsdp_wrap=("Block",), every_steps=50, resume="never"
    )


def test_a_newer_batch_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = OutputLocation(make_run(tmp_path / "run"), 1)
    monkeypatch.setenv("HPCACCEL_PROTOCOL", str(PROTOCOL))
    assert load(place).seed == 7
    monkeypatch.setenv("HPCACCEL_PROTOCOL", str(PROTOCOL + 1))
    with pytest.raises(RankEnvironmentError, match="submitted by a newer hpcaccel than the one that its ranks import"):
        load(place)


def test_defaults_apply_without_a_run() -> None:
    assert load(OutputLocation(), gradient_accumulation_steps=4) == Settings(gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "fsdp1"}, r"strategy='fsdp1' is not a valid value \(allowed: ddp, fsdp, deepspeed\)"),
        ({"mixed_precision": "int8"}, r"mixed_precision='int8' is not a valid value \(allowed: no, fp16, bf16, fp8\)"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        load(OutputLocation(), **given)


def test_run_directory_takes_precedence_over_project_directory(tmp_path: Path) -> None:
    place = locate(tmp_path / "project", {"HPCACCEL_RUN_DIR": str(tmp_path / "run"), "HPCACCEL_ATTEMPT": "3"})
    assert (place.checkpoints, place.attempt) == (RunDir(tmp_path / "run").checkpoints, 3)
    alone = locate(tmp_path / "project", {})
    assert (alone.run, alone.checkpoints) == (None, tmp_path / "project" / "checkpoints")
    assert locate(None, {}).checkpoints is None
