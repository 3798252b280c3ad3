"""The questions of `hpcaccel config`, with answers from a list, and the job specs that configurations become."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.launch.config_questions import ask_everything
from hpcaccel.launch.config_to_spec import to_spec
from hpcaccel.launch.launch_config import LaunchConfig, load_config, save_config
from hpcaccel.spec import JobSpec, load_spec


class Scripted:
    """Answers by a part of the question; other questions get their default."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.left = dict(answers)
        self.asked: list[str] = []

    def _answer(self, question: str, default: Any) -> Any:
        self.asked.append(question)
        found = [part for part in self.left if part in question]
        assert len(found) <= 1, (question, found)
        return self.left.pop(found[0]) if found else default

    def choose(self, question: str, choices: Sequence[tuple[str, str]], default: str) -> str:
        answer = self._answer(question, default)
        assert answer in [value for value, _ in choices], question
        return str(answer)

    def agree(self, question: str, *, default: bool) -> bool:
        return bool(self._answer(question, default))

    def number(self, question: str, default: float, *, least: int = 1, whole: bool = True) -> float:
        answer = self._answer(question, default)
        assert answer >= least
        assert not whole or isinstance(answer, int)
        return float(answer) if not whole else answer

    def text(self, question: str, default: str = "", *, required: bool = True) -> str:
        answer = str(self._answer(question, default))
        assert answer or not required, question
        return answer


def answered(answers: dict[str, Any]) -> LaunchConfig:
    ask = Scripted(answers)
    config = ask_everything(ask)
    assert ask.left == {}, f"not asked: {ask.left}"
    return config


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one GPU": ({"Where": "NO"}, {"distributed_type": "NO", "num_processes": 1, "gpu_ids": "all"}),
    "CPU": ({"Where": "NO", "on the CPU": True}, {"use_cpu": True, "gpu_ids": None}),
    "GPUs": ({"How many GPUs": 4, "near their GPU": True}, {"num_processes": 4, "enable_cpu_affinity": True}),
    "nodes": (
        {"How many machines": 4, "this one": "2", "Address": "n01", "local network": False, "each other": "c10d"},
        {"machine_rank": 2, "main_process_ip": "n01", "main_process_port": 29500, "rdzv_backend": "c10d"},
    ),
    "mpirun": (
        {"Where": "MULTI_CPU", "mpirun?": True, "hostfile": "/h"},
        {"use_cpu": True, "mpirun_config": {"mpirun_hostfile": "/h"}},
    ),
    "compiled": (
        {"torch.compile?": True, "backend": "EAGER", "further": True, "Mode": "max-autotune", "blocks only": True},
        {
            "dynamo_config": {
                "dynamo_backend": "EAGER",
                "dynamo_mode": "max-autotune",
                "dynamo_use_fullgraph": False,
                "dynamo_use_dynamic": False,
                "dynamo_use_regional_compilation": True,
            }
        },
    ),
    "FSDP": (
        {"Shard": "fsdp", "class names": "Block", "Combine": True, "replicas'": 2, "shards'": 4, "How many GPUs": 8},
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": True,
                "fsdp_offload_params": False,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "Block",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_activation_checkpointing": False,
            },
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 2,
                "parallelism_config_dp_shard_size": 4,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            },
        },
    ),
    "FSDP by size": (
        {"Shard": "fsdp", "Which modules": "SIZE_BASED_WRAP", "Least number": 1000, "context parallel'": 2,
         "Combine": True, "exchange": "alltoall"},
        {"num_processes": 2},
    ),
    "DeepSpeed": (
        {"Shard": "deepspeed", "ZeRO": "3", "optimizer's": "nvme", "NVMe": "/x", "parameters?": "cpu", "Clip": True,
         "Largest": 0.5, "16-bit": True, "zero.Init": True, "experts": True, "MoE": "Moe"},
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": 3,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/x",
                "offload_param_device": "cpu",
                "gradient_accumulation_steps": 1,
                "gradient_clipping": 0.5,
                "zero3_save_16bit_model": True,
                "zero3_init_flag": True,
                "deepspeed_moe_layer_cls_names": "Moe",
            },
        },
    ),
    "DeepSpeed file": (
        {"Shard": "deepspeed", "JSON": True, "Path of the file": "ds.json", "How many machines": 2, "Address": "n1",
         "launcher": "pdsh", "hostfile": "/h"},
        {"mixed_precision": None},
    ),
    "fp8": ({"Precision": "fp8", "FP8": "TE"}, {"mixed_precision": "fp8", "fp8_config": {"backend": "TE"}}),
    "TPU": (
        {"Where": "XLA", "TPU pod": True, "Name": "pod", "zone": "z", "sudo": True, "Function": "run"},
        {"distributed_type": "XLA", "tpu_name": "pod", "tpu_use_sudo": True, "main_training_function": "run"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_answers_make_a_file_that_both_programs_read(case: str, tmp_path: Path) -> None:
    answers, expected = CASES[case]
    config = answered(answers)
    assert {key: getattr(config, key) for key in expected} == expected
    path = tmp_path / "config.yaml"
    save_config(config, path)
    again = load_config(path).to_dict()
    prefixed = {"fp8_config": {"fp8_backend": "TE"}} if case == "fp8" else {}
    assert again == config.to_dict() | prefixed
    theirs = pytest.importorskip("accelerate.commands.config.config_args").load_config_from_file(str(path))
    assert theirs.distributed_type.value == config.distributed_type
    assert theirs.num_processes == config.num_processes


def spec_of(config: LaunchConfig, tmp_path: Path) -> tuple[JobSpec, str]:
    text = to_spec(config, source="default_config.yaml")
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_spec(path), text


@pytest.mark.parametrize("case", CASES)
def test_every_configuration_becomes_a_valid_spec(case: str, tmp_path: Path) -> None:
    config = answered(CASES[case][0])
    spec, _ = spec_of(config, tmp_path)
    nodes = int(config.num_machines or 1)
    assert int(spec.slurm.nodes) == nodes
    assert spec.slurm.ranks_per_node * nodes == config.num_processes


def test_settings_become_fields_of_the_spec(tmp_path: Path) -> None:
    spec, _ = spec_of(answered(CASES["FSDP"][0] | {"Recompute": True, "Precision": "bf16"}), tmp_path)
    fsdp = spec.runtime.fsdp
    assert (spec.runtime.strategy, spec.runtime.mixed_precision, fsdp.wrap) == ("fsdp", "bf16", ["Block"])
    assert (fsdp.shard_size, fsdp.reshard_after_forward, spec.runtime.activation_checkpointing) == (4, True, True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"zero_stage": 1}, {"zero_stage": 1}),
        (
            {"zero_stage": 3, "offload_param_device": "cpu", "gradient_clipping": "0.5", "zero3_init_flag": True},
            {"zero_stage": 3, "offload_params": "cpu", "gradient_clipping": 0.5},
        ),
        ({"deepspeed_config_file": "ds.json"}, {"config_file": "ds.json"}),
        ({"zero_stage": None, "gradient_clipping": None}, {"zero_stage": 2}),
    ],
)
def test_deepspeed_settings_become_fields_of_the_spec(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = LaunchConfig(distributed_type="DEEPSPEED", deepspeed_config=values, num_processes=2)
    spec, text = spec_of(config, tmp_path)
    assert spec.runtime.strategy == "deepspeed"
    assert spec.runtime.deepspeed.model_dump(exclude_none=True) == expected
    assert ("zero3_init_flag" in text) == ("zero3_init_flag" in values), "a comment says what has no counterpart"


@pytest.mark.parametrize(
    ("sharding", "strategy", "reshard"),
    [
        (1, "fsdp", True), ("2", "fsdp", False), ("SHARD_GRAD_OP", "fsdp", False), (4, "fsdp", True),
        (5, "fsdp", False), (3, "ddp", True), ("NO_SHARD", "ddp", True),
    ],
)  # fmt: skip
def test_sharding_strategies_by_name_and_number(tmp_path: Path, sharding: Any, strategy: str, reshard: bool) -> None:
    values = {"fsdp_sharding_strategy": sharding, "fsdp_offload_params": "false"}
    spec, text = spec_of(LaunchConfig(distributed_type="FSDP", fsdp_config=values), tmp_path)
    assert (spec.runtime.strategy, spec.runtime.fsdp.reshard_after_forward) == (strategy, reshard)
    assert not spec.runtime.fsdp.cpu_offload
    assert ("set fsdp.shard_size" in text) == (sharding in (4, 5))


@pytest.mark.parametrize(
    ("config", "comment"),
    [
        (LaunchConfig(main_process_ip="n1", num_machines=2), "without a counterpart: main_process_ip"),
        (LaunchConfig(gpu_ids="0,1"), "without a counterpart: gpu_ids (Slurm chooses"),
        (LaunchConfig(tpu_env=["TOKEN=1"]), "without a counterpart: tpu_env (set environment.env)"),
        (LaunchConfig(dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}), "dynamo_mode"),
        (LaunchConfig(num_processes=5, num_machines=2), "num_processes 5 cannot be split evenly over 2 nodes"),
        (LaunchConfig(num_processes=-1), "num_processes is not set"),
        (LaunchConfig(distributed_type="FSDP", fsdp_config={"fsdp_sharding_strategy": "HYBRID_SHARD"}), "shard_size"),
        (LaunchConfig(distributed_type="FSDP", fsdp_config={"fsdp_use_orig_params": True}), "fsdp_use_orig_params"),
        (LaunchConfig(parallelism_config={"parallelism_config_sp_size": 2}), "parallelism_config_sp_size"),
    ],
)
def test_setting_without_counterpart_becomes_a_comment(tmp_path: Path, config: LaunchConfig, comment: str) -> None:
    _, text = spec_of(config, tmp_path)
    assert comment in "\n".join(line for line in text.splitlines() if line.strip().startswith("#"))
    assert "TOKEN" not in text


def test_value_with_line_breaks_stays_in_its_comment(tmp_path: Path) -> None:
    values = {"deepspeed_config_file": "ds.json\nname: other"}
    spec, _ = spec_of(LaunchConfig(distributed_type="DEEPSPEED", deepspeed_config=values), tmp_path)
    assert spec.name == "train"
