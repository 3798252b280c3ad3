"""Training with DeepSpeed's own engine on two ranks on the CPU (gloo); `make trainers` installs it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.checkpoint_files.verify import verify
from tests.runtime.ranks import Ended, make_run, run_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "jobs" / "zero"
PROGRAM = str(Path(__file__).parent / "programs" / "train_zero.py")
COMMON = {"micro_batches": 2, "clip": 1.0, "epochs": 2}
STAGES = (1, 2, 3)


def train(size: int = 2, **how: Any) -> Ended:
    options = {name: how.pop(name) for name in ("run", "attempt", "launcher") if name in how}
    return run_ranks(PROGRAM, [json.dumps({**COMMON, **how})], size=size, preload=("deepspeed",), **options)


def result(ended: Ended) -> dict[str, Any]:
    assert set(ended.codes) == {0}, "\n".join(ended.outputs)
    return ended.result()


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_stage": stage, "gradient_clipping": 1.0, **more}


@pytest.fixture(scope="module")
def ddp() -> dict[str, Any]:
    return result(train())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Uninterrupted trainings, by ZeRO stage; they export their models."""
    folder = tmp_path_factory.mktemp("exports")
    found = {}
    for stage in STAGES:
        found[stage] = result(train(plugin=zero(stage), export=str(folder / f"zero{stage}")))
        found[stage]["export"] = folder / f"zero{stage}"
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_zero_trains_like_ddp(ddp: dict[str, Any], whole: dict[int, dict[str, Any]], stage: int) -> None:
    """Accumulation, clipping and the schedule included: the engine does each of them once."""
    found = whole[stage]
    assert found["type"] == "DEEPSPEED"
    assert found["model"] == "Net"
    assert found["rates"] == ddp["rates"]
    assert found["losses"].keys() == ddp["losses"].keys()
    for step, losses in ddp["losses"].items():
        assert found["losses"][step] == pytest.approx(losses, rel=1e-4), step
    assert found["norms"].keys() == ddp["norms"].keys()
    for step, norm in ddp["norms"].items():
        assert found["norms"][step] == pytest.approx(norm, rel=1e-4), step
    assert found["weights"] == pytest.approx(ddp["weights"], rel=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_saved_model_is_whole(whole: dict[int, dict[str, Any]], stage: int) -> None:
    from safetensors.torch import load_file

    saved = load_file(whole[stage]["export"] / "model.safetensors")
    assert {name: float(value.abs().sum()) for name, value in saved.items()} == pytest.approx(whole[stage]["weights"])


@pytest.fixture(scope="module", params=(1, 3))
def interrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A training that saved at step 4, and whose rank 1 was killed while the engine wrote the files of step 6."""
    stage, project = request.param, tmp_path_factory.mktemp("project")
    ended = train(plugin=zero(stage), project=str(project), saves=[4, 6], die_in_save=6)
    assert ended.codes[1] == 9
    return stage, project / "checkpoints"


def test_interrupted_save_is_not_a_checkpoint(interrupted: tuple[int, Path]) -> None:
    stage, checkpoints = interrupted
    assert sorted(path.name for path in checkpoints.glob("step_*")) == ["step_00000004"]
    report = verify(checkpoints / "step_00000004")
    assert report.problems == []
    assert report.notes == []
    manifest = json.loads((checkpoints / "step_00000004" / "COMMITTED").read_text())
    states = [name for name in manifest["attached"] if name.endswith(".pt")]
    assert len(states) == (4 if stage == 3 else 3)
    assert {"latest", "zero_to_fp32.py"} <= set(manifest["attached"]) <= set(manifest["files"])


def test_resume_continues_at_the_step_with_equal_losses(
    interrupted: tuple[int, Path], whole: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    stage, checkpoints = interrupted
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    found = result(train(plugin=zero(stage), project=str(tmp_path)))
    assert found["first"] == 4
    expected = {step: losses for step, losses in whole[stage]["losses"].items() if int(step) > 4}
    assert {step: losses for step, losses in found["losses"].items() if int(step) > 4} == expected
    assert found["weights"] == whole[stage]["weights"]


def test_damaged_engine_file_is_found_before_it_is_read(interrupted: tuple[int, Path], tmp_path: Path) -> None:
    stage, checkpoints = interrupted
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    [state, *_] = sorted((tmp_path / "checkpoints" / "step_00000004" / "deepspeed").glob("*optim_states.pt"))
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    ended = train(plugin=zero(stage), project=str(tmp_path))
    assert ended.codes == [1, 1]
    assert "no intact checkpoint is left" in ended.outputs[0]
    assert (tmp_path / "checkpoints" / "quarantined_step_00000004").is_dir()


@pytest.mark.parametrize("interrupted", [1], indirect=True)
@pytest.mark.parametrize(
    ("size", "how", "message"),
    [
        (1, {"plugin": zero(1)}, "was saved by 2 ranks, and DeepSpeed can load it only with 2 ranks"),
        (2, {"plugin": zero(2)}, "was saved with ZeRO stage 1, and DeepSpeed cannot load it with stage 2"),
        (1, {}, "which only a training with strategy='deepspeed' can load"),
    ],
)
def test_checkpoint_of_another_layout_is_refused(
    interrupted: tuple[int, Path], tmp_path: Path, size: int, how: dict[str, Any], message: str
) -> None:
    _, checkpoints = interrupted
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    ended = train(size, project=str(tmp_path), **how)
    assert set(ended.codes) == {1}, ended.outputs
    assert message in ended.outputs[0]
    assert (tmp_path / "checkpoints" / "step_00000004").is_dir()


def test_pickle_in_an_engine_file_is_not_executed(interrupted: tuple[int, Path], tmp_path: Path) -> None:
    """Even if its checksum is right: the file is replaced, and the manifest is written for it."""
    import zlib

    import torch

    from hpcaccel.checkpoint_files.manifest import seal

    stage, checkpoints = interrupted
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    step = tmp_path / "checkpoints" / "step_00000004"
    [name] = [path.name for path in (step / "deepspeed").glob("*pp_rank_0*optim_states.pt")]
    torch.save({"optimizer_state_dict": Planted(tmp_path / "executed")}, step / "deepspeed" / name)
    content = (step / "deepspeed" / name).read_bytes()
    manifest = json.loads((step / "COMMITTED").read_text())
    manifest["files"][f"deepspeed/{name}"] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (step / "COMMITTED").write_bytes(seal(manifest))
    ended = train(plugin=zero(stage), project=str(tmp_path))
    assert ended.codes == [1, 1]
    assert "contains a pickle of" in ended.outputs[0]
    assert not (tmp_path / "executed").exists()


class Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_json_file_with_auto_under_srun(tmp_path: Path) -> None:
    """srun sets no LOCAL_RANK; the optimizer and the schedule are the file's."""
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
    }
    (tmp_path / "zero2.json").write_text(json.dumps(config))
    found = result(
        train(
            plugin={"hf_ds_config": str(tmp_path / "zero2.json")},
            dummies=True,
            precision="bf16",
            launcher="srun",
            project=str(tmp_path),
            saves=[3],
        )
    )
    assert found["precision"] == "bf16"
    assert found["arguments"] == []
    expected = expected_rates(16)
    assert {int(step): rate for step, rate in found["rates"].items() if int(step)} == {
        step: pytest.approx(expected[step - 1]) for step in range(1, 13)
    }
    assert all(0 < loss < 20 for losses in found["losses"].values() for loss in losses)
    again = result(train(plugin={"hf_ds_config": str(tmp_path / "zero2.json")}, dummies=True, precision="bf16",
                         project=str(tmp_path), epochs=3))  # fmt: skip
    assert again["first"] == 12
    assert again["rates"]["13"] == pytest.approx(expected[12])  # the engine restores its scheduler


def expected_rates(steps: int) -> list[float]:
    """Learning rates after each step, by DeepSpeed's own schedule without an engine."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    schedule = WarmupDecayLR(optimizer, 40, warmup_max_lr=0.01, warmup_num_steps=4, warmup_type="linear")
    found = []
    for _ in range(steps):
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_spec_chooses_deepspeed_and_a_stop_ends_all_ranks_at_one_step(
    tmp_path: Path, whole: dict[int, dict[str, Any]]
) -> None:
    runtime = {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2, "gradient_clipping": 1.0}}
    run = make_run(tmp_path / "run", runtime=runtime)
    ended = train(run=run, terminate=3)
    assert ended.codes == [85, 85], ended.outputs
    [saved] = run.checkpoints.glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    assert step >= 3
    found = result(train(run=run, attempt=2, terminate=step))
    assert found["first"] == step
    last = list(found["losses"])[-1]
    assert found["losses"][last] == pytest.approx(whole[2]["losses"][last], rel=1e-4)


def test_standin_of_the_unit_tests_has_the_engines_methods() -> None:
    import inspect

    import deepspeed

    from tests.runtime.programs import deepspeed_standin

    for name, method in vars(deepspeed_standin.DeepSpeedEngine).items():
        if inspect.isfunction(method) and not name.startswith("__"):
            real = inspect.signature(getattr(deepspeed.DeepSpeedEngine, name)).parameters
            missing = [word for word in inspect.signature(method).parameters if word not in real]
            assert not missing or "kwargs" in real, f"{name} has no {missing}"
    real = inspect.signature(deepspeed.initialize).parameters
    assert set(inspect.signature(deepspeed_standin.initialize).parameters) <= set(real)


def test_page_and_example_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    [code] = re.findall(r"^```python\n(.+?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(code)
    ended = run_ranks(str(tmp_path / "page.py"), size=1, launcher="alone", preload=("deepspeed",))
    assert ended.codes == [0], ended.outputs
    run = make_run(tmp_path / "run", runtime={"strategy": "deepspeed", "mixed_precision": "bf16",
                   "deepspeed": {"config_file": str(EXAMPLE / "ds_config.json")}})  # fmt: skip
    arguments = ["--width", "32", "--depth", "2", "--epochs", "2"]
    ended = run_ranks(str(EXAMPLE / "train.py"), arguments, run=run, preload=("deepspeed",))
    assert ended.codes == [0, 0], ended.outputs
    assert "epoch 1: step 32, loss " in ended.outputs[0]
