"""DeepSpeed behind ``prepare``: plugins, JSON configurations with ``auto``, and a stand-in for the engine.

tests/integrations/test_deepspeed_engine.py trains with the real package.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel.checkpoint_files.verify import verify
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.deepspeed import engine_wrappers
from hpcaccel.runtime.deepspeed.json_config import AUTO, HfDeepSpeedConfig, fill
from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin
from hpcaccel.runtime.deepspeed.plugin_choice import active_plugin, choose_plugin, select_plugin
from hpcaccel.runtime.launch_env import settings_from_env
from hpcaccel.runtime.settings import Settings

from .ranks import Ended, make_run, run_ranks

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/integrations/programs/train_zero.py")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)


# -- the configuration ------------------------------------------------------------------------------------------------


def test_configuration_is_read_from_a_dict_a_file_and_text(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    text = json.dumps(config)
    for source in (config, tmp_path / "zero3.json", text, base64.urlsafe_b64encode(text.encode()).decode()):
        found = HfDeepSpeedConfig(source)
        assert found.config == config
        assert found.config is not config
        assert (found.is_zero3(), found.is_zero2(), found.is_offload()) == (True, False, True)
        assert found.get_value("zero_optimization.stage") == 3
        assert found.get_value("optimizer.params.lr", 7) == 7
        assert found.is_false("fp16.enabled") is found.is_true("fp16.enabled") is False
    found.del_config_sub_tree("zero_optimization.offload_param")
    found.set_stage_and_offload()
    assert not found.is_offload()
    with pytest.raises(RuntimeMisuse, match=r"has no a\.b"):
        found.del_config_sub_tree("a.b", must_exist=True)


@pytest.mark.parametrize("source", ["nowhere.json", "[1]", "{", 7])
def test_unreadable_configuration_is_refused(source: Any) -> None:
    with pytest.raises(RuntimeMisuse, match="the DeepSpeed configuration"):
        HfDeepSpeedConfig(source)


def test_every_auto_is_filled_or_named() -> None:
    config: dict[str, Any] = {"a": AUTO, "b": {"c": AUTO, "d": 1}, "optimizer": {"params": {"eps": AUTO}}}
    with pytest.raises(RuntimeMisuse, match=r"for b\.c, which cannot be computed"):
        fill(config, {"a": 5}, optional=("optimizer.",))
    fill(config, {"b.c": 6})
    assert config == {"a": 5, "b": {"c": 6, "d": 1}, "optimizer": {"params": {}}}


def test_auto_in_a_list_is_filled_or_named() -> None:
    config: dict[str, Any] = {"optimizer": {"params": {"betas": [0.9, AUTO], "eps": AUTO}}, "a": [[1], [{"b": AUTO}]]}
    with pytest.raises(RuntimeMisuse, match=r"for optimizer\.params\.betas\[1\], a\[1\]\[0\]\.b, which cannot"):
        fill(config, {}, optional=("optimizer.params.",))
    fill(config, {"optimizer.params.betas[1]": 0.99, "a[1][0].b": 2})
    assert config == {"optimizer": {"params": {"betas": [0.9, 0.99]}}, "a": [[1], [{"b": 2}]]}


def test_plugin_reads_the_variables_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/nvme",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
    }.items():
        monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert plugin.deepspeed_config["gradient_clipping"] == 0.5
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 4
    assert not plugin.is_zero3_init_enabled()
    assert DeepSpeedPlugin(zero_stage=1, gradient_clipping=2.0).get_value("gradient_clipping") == 2.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "4", "zero_stage=4"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "two", "'two' is not a number"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "gpu", "offload_param_device='gpu'"),
        ("ACCELERATE_GRADIENT_CLIPPING", "much", "'much' is not a number"),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "/nowhere.json", "/nowhere.json"),
        ("ACCELERATE_FP8_BACKEND", "MSAMP", "MS-AMP"),
    ],
)
def test_invalid_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeMisuse, match=message):
        DeepSpeedPlugin()


def test_json_file_overrides_the_fields_and_its_autos_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"zero_optimization": {"stage": AUTO}, "gradient_clipping": 0.3}
    with pytest.warns(UserWarning, match=r"gradient_clipping=1.0\) has no effect"):
        plugin = DeepSpeedPlugin(hf_ds_config=config, zero_stage=1, gradient_clipping=1.0)
    assert (plugin.zero_stage, plugin.get_value("zero_optimization.stage"), plugin.gradient_clipping) == (1, 1, 0.3)
    assert config["zero_optimization"] == {"stage": AUTO}
    assert plugin.is_auto("gradient_accumulation_steps")
    assert plugin.is_auto("train_micro_batch_size_per_gpu")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.warns(UserWarning, match=r"zero_stage=3\) has no effect"):
        assert DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}}).zero_stage == 1
    with pytest.warns(UserWarning, match="applies only to ZeRO stage 3"):
        assert not DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag


@pytest.mark.parametrize(
    ("precision", "config", "enabled"),
    [
        ("bf16", {}, "bf16"),
        ("fp16", {"fp16": {"enabled": AUTO, "loss_scale": 0}}, "fp16"),
        ("no", {"bf16": {"enabled": AUTO}}, None),
        ("no", {"bf16": {"enabled": True}}, "bf16"),
    ],
)
def test_precision_is_the_accelerators_or_the_files(
    standin: None, precision: str, config: dict[str, Any], enabled: str | None
) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    handlers = SimpleNamespace(fsdp=None, deepspeed=plugin)
    assert choose_plugin(handlers, Settings(mixed_precision=precision)) == (plugin, enabled or "no")
    assert active_plugin(plugin) is plugin
    assert plugin.selected
    assert plugin.mixed_precision == enabled
    assert plugin.deepspeed_config["fp16"]["enabled"] is (enabled == "fp16")


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed")
    module.__spec__ = ModuleSpec("deepspeed", None)  # find_spec refuses a loaded module without one
    monkeypatch.setitem(sys.modules, "deepspeed", module)


def test_environment_and_spec_choose_deepspeed(standin: None) -> None:
    assert settings_from_env({"ACCELERATE_USE_DEEPSPEED": "true"}) == {"strategy": "deepspeed"}
    assert settings_from_env({"HPCACCEL_STRATEGY": "deepspeed"}) == {"strategy": "deepspeed"}
    with pytest.raises(RuntimeMisuse, match="are both true"):
        settings_from_env({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_FSDP": "1"})
    section = {"zero_stage": 1, "gradient_clipping": 0.1, "offload_optimizer": "cpu", "config_file": None}
    plugin, precision = choose_plugin(SimpleNamespace(fsdp=None, deepspeed=None), Settings(deepspeed=section))
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.offload_optimizer_device) == (1, 0.1, "cpu")
    assert precision == "no"
    with pytest.raises(RuntimeMisuse, match="cannot be combined with an fsdp_plugin"):
        choose_plugin(SimpleNamespace(fsdp=object(), deepspeed=None), Settings())


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setattr("hpcaccel.runtime.deepspeed.plugin_choice.find_spec", lambda name: None)
    with pytest.raises(RuntimeMisuse, match="pip install deepspeed"):
        Accelerator(strategy="deepspeed")


def test_plugin_is_selected_through_the_state_only() -> None:
    with pytest.raises(RuntimeMisuse, match="select_deepspeed_plugin"):
        DeepSpeedPlugin().select()


def test_settings_that_do_not_match_the_script_are_refused() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5})
    with pytest.raises(RuntimeMisuse, match=r"gradient_clipping: 0.5 in the configuration, 1.0 in the script"):
        plugin.deepspeed_config_process(gradient_clipping=1.0)
    with pytest.raises(RuntimeMisuse, match='is "auto" in the DeepSpeed configuration'):
        plugin.fill_match("gradient_accumulation_steps")


# -- wrappers ---------------------------------------------------------------------------------------------------------


class Engine:
    """Records calls, like the real engine's order of calls in a micro-batch."""

    def __init__(self, clipping: float = 0.0) -> None:
        self.calls: list[Any] = []
        self._clipping = clipping

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(is_boundary)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        self.calls.append(("backward", loss, kwargs))

    def step(self) -> None:
        self.calls.append("step")

    def get_global_grad_norm(self) -> float | None:
        return 2.5 if "step" in self.calls else None

    def gradient_clipping(self) -> float:
        return self._clipping


def test_engine_steps_at_boundaries_and_each_step_is_counted_once() -> None:
    engine, steps = Engine(), list[int]()
    wrapper = engine_wrappers.DeepSpeedEngineWrapper(engine, on_step=lambda: steps.append(1))
    wrapper.backward(7, sync_gradients=False)  # type: ignore[arg-type]
    assert engine.calls == [False, ("backward", 7, {})]
    wrapper.backward(8, scale_wrt_gas=False)  # type: ignore[arg-type]
    assert engine.calls[2:] == [True, ("backward", 8, {"scale_wrt_gas": False}), "step"]
    assert steps == []
    wrapper.count()
    wrapper.count()
    assert steps == [1]
    wrapper.backward(9)  # type: ignore[arg-type]
    wrapper.backward(10)  # type: ignore[arg-type]  # without optimizer.step() in between
    assert len(steps) == 3
    wrapper.set_reduction(False)
    wrapper.backward(11)  # type: ignore[arg-type]
    assert engine.calls[-2] is False
    assert len(steps) == 3


@pytest.mark.parametrize(("clipping", "says"), [(0.0, "does not clip"), (0.5, "clips to the norm 0.5")])
def test_clipping_in_the_script_that_the_engine_does_not_do_is_warned_of(clipping: float, says: str) -> None:
    wrapper = engine_wrappers.DeepSpeedEngineWrapper(Engine(clipping))
    with pytest.warns(UserWarning, match=rf"max_norm=1, norm_type=2\) has no effect.*{says}"):
        assert wrapper.clip(1.0, 2).isnan()
    wrapper.engine.step()
    assert wrapper.clip(1.0, 2) == 2.5  # warned of once


def test_placeholders_and_wrappers_have_accelerates_arguments() -> None:
    weight = nn.Parameter(torch.ones(1))
    dummy = engine_wrappers.DummyOptim([weight], lr=0.1, betas=(0.9, 0.99))
    assert (dummy.params, dummy.lr, dummy.weight_decay, dummy.kwargs) == ([weight], 0.1, 0, {"betas": (0.9, 0.99)})
    optimizer = torch.optim.SGD([weight], lr=1.0)
    prepared = engine_wrappers.DeepSpeedOptimizerWrapper(optimizer)
    weight.grad = torch.ones(1)
    prepared.step()
    prepared.zero_grad()
    assert (weight.item(), weight.grad.item()) == (1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrapped = engine_wrappers.DeepSpeedSchedulerWrapper(scheduler, prepared)
    wrapped.step()
    assert wrapped.get_last_lr() == [1.0]
    with engine_wrappers.GatheredParameters([weight]):
        assert weight.numel() == 1


# -- two ranks with a stand-in for the engine -------------------------------------------------------------------------


def train(size: int = 2, **how: Any) -> Ended:
    options = {name: how.pop(name) for name in ("run", "attempt", "launcher") if name in how}
    how = {"micro_batches": 2, "clip": 1.0, "epochs": 1, "standin": True, **how}
    return run_ranks(PROGRAM, [json.dumps(how)], size=size, **options)


def result(ended: Ended) -> dict[str, Any]:
    assert set(ended.codes) == {0}, "\n".join(ended.outputs)
    return ended.result()


ZERO2 = {"zero_stage": 2, "gradient_clipping": 1.0}


@pytest.fixture(scope="module")
def ddp() -> dict[str, Any]:
    return result(train(standin=False))


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return result(train(plugin=ZERO2, launcher="srun"))


def test_accumulation_clipping_and_steps_are_done_once(ddp: dict[str, Any], whole: dict[str, Any]) -> None:
    for name in ("losses", "norms"):
        assert whole[name].keys() == ddp[name].keys()
    assert whole["rates"] == ddp["rates"]
    assert whole["type"] == "DEEPSPEED"
    assert whole["arguments"] == []
    for step, losses in ddp["losses"].items():
        assert whole["losses"][step] == pytest.approx(losses, rel=1e-5)
    for step, norm in ddp["norms"].items():
        assert whole["norms"][step] == pytest.approx(norm, rel=1e-5)
    assert whole["weights"] == pytest.approx(ddp["weights"], rel=1e-5)


def test_prepared_optimizer_and_scheduler_show_the_states(ddp: dict[str, Any], whole: dict[str, Any]) -> None:
    assert whole["states"] == ["DEEPSPEED", 2, 2, True]
    assert ddp["states"] == ["MULTI_CPU", 2, 2, True]


def test_killed_save_is_not_loaded_and_the_resume_is_exact(whole: dict[str, Any], tmp_path: Path) -> None:
    ended = train(plugin=ZERO2, project=str(tmp_path), saves=[2, 4], die_in_save=4)
    assert ended.codes[1] == 9
    step = tmp_path / "checkpoints" / "step_00000002"
    assert [path.name for path in step.parent.glob("step_*")] == [step.name]
    assert not verify(step).problems
    manifest = json.loads((step / "COMMITTED").read_text())
    assert sorted(manifest["attached"]) == [
        "deepspeed/mp_rank_00_model_states.pt",
        "deepspeed/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "deepspeed/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "latest",
        "zero_to_fp32.py",
    ]
    assert manifest["mesh"]["zero_stage"] == 2
    shutil.copytree(tmp_path, tmp_path / "copy")
    found = result(train(plugin=ZERO2, project=str(tmp_path)))
    assert found["first"] == 2
    for number, losses in found["losses"].items():
        if int(number) > 2:
            assert losses == whole["losses"][number]
    assert found["weights"] == whole["weights"]
    damage(tmp_path / "copy" / "checkpoints" / step.name / "deepspeed" / "mp_rank_00_model_states.pt")
    assert verify(tmp_path / "copy" / "checkpoints" / step.name).problems
    ended = train(plugin=ZERO2, project=str(tmp_path / "copy"))
    assert "no intact checkpoint is left" in ended.outputs[1]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_file_that_cannot_be_written_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    ended = train(plugin=ZERO2, project=str(tmp_path), saves=[2], full_disk=2)
    assert ended.codes == [1, 1]
    for output in ended.outputs:
        assert "the checkpoint of step 2 cannot be saved: OSError: no space (rank 1" in output
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_stop_ends_all_ranks_at_one_step_and_the_spec_chooses_the_engine(whole: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", runtime={"strategy": "deepspeed", "deepspeed": ZERO2})
    ended = train(run=run, terminate=2)
    assert ended.codes == [85, 85], ended.outputs
    [saved] = run.checkpoints.glob("step_*")
    found = result(train(run=run, attempt=2, terminate=int(saved.name[-8:])))
    assert found["first"] == int(saved.name[-8:]) >= 2
    assert found["rates"]["6"] == whole["rates"]["6"]


def test_no_plugin_can_be_selected_of_none() -> None:
    with pytest.raises(RuntimeMisuse, match="there are: none"):
        select_plugin({})


def test_what_does_not_combine_is_refused() -> None:
    errors = result(run_ranks("engine_misuse.py", size=1, launcher="alone"))
    expected = {
        "unknown plugin": "no DeepSpeedPlugin 'nobody' (there are: student, teacher)",
        "two models": "prepare() got 2 models",
        "optimizer alone": "DeepSpeed needs the model and its optimizer in one call",
        "no loader": "prepare() got no loader with a batch size",
        "dummy without section": "DummyOptim stands for the section 'optimizer'",
        "original again": "this Linear has already been prepared",
        "second engine": "this training already has a DeepSpeed engine",
        "clip by value": "clip_grad_value_() cannot be combined with DeepSpeed",
        "two optimizers": "there are two optimizers",
        "empty tensors": "contains empty tensors, because ZeRO-3",
        "fsdp": "cannot be combined with strategy='fsdp'",
        "both names": "these keywords have the same meaning",
        "no plugin": "'zero3.json', which is not a DeepSpeedPlugin",
        "fp8": "mixed_precision=fp8 with DeepSpeed is not supported",
        "two precisions": "conflicts with bf16.enabled",
        "after the end": "this process has already trained with DeepSpeed and then called end_training()",
    }
    assert errors.keys() == expected.keys()
    for name, text in expected.items():
        assert text in errors[name], name


def test_example_is_a_valid_spec_and_its_json_file_a_configuration() -> None:
    from hpcaccel.spec import load_spec

    folder = ROOT / "jobs" / "zero"
    spec = load_spec(folder / "job.yaml")
    assert spec.runtime.strategy == "deepspeed"
    plugin = DeepSpeedPlugin(hf_ds_config=folder / str(spec.runtime.deepspeed.config_file))
    plugin.set_mixed_precision(spec.runtime.mixed_precision)
    assert (plugin.zero_stage, plugin.mixed_precision) == (3, "bf16")
