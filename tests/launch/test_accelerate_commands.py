"""The command lines of Accelerate's documentation (1.15, commit 16cb6eb8), with the program's name replaced.

Each line runs as the documentation has it, through a shell. What stands in braces or brackets there, and the names of
scripts, is a file of the test: a program that prints its arguments and the variables of the launcher, without torch.
Lines for two GPUs run on a machine whose nvidia-smi lists two.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from typing import Any

import pytest

from .conftest import Launcher

SHOW = """
import json, os, sys  # one write, so that lines of different ranks are not mixed up
names = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "WORLD_SIZE", "LOCAL_RANK", "RANK", "CUDA_VIS", "ZE_", "MASTER_")
found = {name: value for name, value in os.environ.items() if name.startswith(names)}
os.write(1, (json.dumps({"args": sys.argv[1:], "env": found}) + "\\n").encode())
"""
ZERO3 = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""
ZERO2_FILE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: zero_stage2_config.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""
CPU = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nuse_cpu: true\n"
FSDP = """\
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
"""
FP8 = """\
distributed_type: "NO"
mixed_precision: "fp8"
fp8_config:
  backend: TE
  fp8_format: E4M3
  override_linear_precision: [false, false, false]
"""
TP_HSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
"""
DEFAULT = ".cache/huggingface/accelerate/default_config.yaml"
FP16 = {"ACCELERATE_MIXED_PRECISION": "fp16"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}


@dataclass(frozen=True)
class Case:
    """One line of the documentation, and what the program must get."""

    page: str
    line: str
    args: str
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    files: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    outer: dict[str, str] = field(default_factory=dict)
    """Variables that the page sets before."""
    long: bool = False
    """Needs several seconds more, and differs little from the others."""


ARGS = "--arg1 --arg2"
CASES = [
    # basic_tutorials/launch.md
    Case("launch", "accelerate launch {script_name.py} --arg1 --arg2 ...", ARGS),
    Case("launch", 'CUDA_VISIBLE_DEVICES="0" accelerate launch {script_name.py} --arg1 --arg2 ...', ARGS,
         {"CUDA_VISIBLE_DEVICES": "0"}),
    Case("launch", 'ZE_AFFINITY_MASK="0" accelerate launch {script_name.py} --arg1 --arg2 ...', ARGS,
         {"ZE_AFFINITY_MASK": "0"}),
    Case("launch", "accelerate launch --multi_gpu {script_name.py} {--arg1} {--arg2} ...", ARGS, ranks=2, gpus=2),
    Case("launch", "accelerate launch --num_processes=2 {script_name.py} {--arg1} {--arg2} ...", ARGS, ranks=2,
         long=True),
    Case("launch", "accelerate launch --multi_gpu --mixed_precision=fp16 --num_processes=2 {script_name.py} {--arg1} "
         "{--arg2} ...", ARGS, FP16, ranks=2, gpus=2, long=True),
    Case("launch", "accelerate launch -h", ""),
    Case("launch", 'MIXED_PRECISION="fp16" torchrun --nproc_per_node=2 --nnodes=1 {script_name.py} {--arg1} {--arg2} '
         "...", ARGS, ranks=2),
    Case("launch", "python -m accelerate.commands.launch --num_processes=2 {script_name.py} {--arg1} {--arg2}", ARGS,
         ranks=2, long=True),
    Case("launch", "python -u -m accelerate.commands.launch --num_processes=2 {script_name.py} {--arg1} {--arg2}",
         ARGS, ranks=2, long=True),
    Case("launch", "accelerate launch --cpu {script_name.py} {--arg1} {--arg2}", ARGS, {"ACCELERATE_USE_CPU": "true"}),
    Case("launch", "accelerate launch --config_file {path/to/config/my_config_file.yaml} {script_name.py} {--arg1} "
         "{--arg2} ...", ARGS, {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"},
         files={"path/to/config/my_config_file.yaml": CPU}),
    # basic_tutorials/install.md, quicktour.md, package_reference/cli.md, basic_tutorials/troubleshooting.md
    Case("quicktour", "accelerate launch path_to_script.py --args_for_the_script", "--args_for_the_script"),
    Case("cli", "accelerate launch {my_script.py}", ""),
    Case("cli", "accelerate launch [arguments] {training_script} --{training_script-argument-1} "
         "--{training_script-argument-2} ...", "--training_script-argument-1 --training_script-argument-2"),
    Case("troubleshooting", "accelerate launch --debug {my_script.py} --arg1 --arg2", ARGS,
         {"ACCELERATE_DEBUG_MODE": "true"}),
    # concept_guides/context_parallelism.md, sequence_parallelism.md
    Case("context", "accelerate launch --parallelism-config-cp-size 8 --parallelism-config-cp-comm-strategy "
         "[allgather|alltoall] ...", "", {"PARALLELISM_CONFIG_CP_SIZE": "8",
         "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "allgather", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}),
    Case("context", "accelerate launch --use-fsdp --fsdp-activation-checkpointing=TRUE examples/fsdp2/nd_parallel.py "
         "--cp-size=8 --sequence-length=128000", "--cp-size=8 --sequence-length=128000",
         {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}, long=True),
    Case("sequence", "accelerate launch --parallelism-config-sp-size 8  ...", "", {"PARALLELISM_CONFIG_SP_SIZE": "8"}),
    # usage_guides/deepspeed.md
    Case("deepspeed", "accelerate launch examples/nlp_example.py --mixed_precision fp16", "--mixed_precision fp16",
         {**DEEPSPEED, **FP16, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_GRADIENT_CLIPPING": "1.0",
          "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
         ranks=2, files={DEFAULT: ZERO3}),
    Case("deepspeed", "accelerate launch examples/by_feature/deepspeed_with_config_support.py \\\n"
         '--config_name "gpt2-large" \\\n--block_size 128 \\\n--learning_rate 5e-4 \\\n--with_tracking \\\n'
         '--report_to "wandb"\\\n',
         "--config_name gpt2-large --block_size 128 --learning_rate 5e-4 --with_tracking --report_to wandb",
         {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero_stage2_config.json"}, ranks=2,
         files={DEFAULT: ZERO2_FILE}, long=True),
    Case("deepspeed", 'accelerate launch --mixed_precision="fp16" --zero_stage=3 --gradient_accumulation_steps=5 '
         '--gradient_clipping=1.0 --offload_param_device="cpu" --offload_optimizer_device="nvme" '
         '--zero3_save_16bit_model="true" test.py', "",
         {**DEEPSPEED, **FP16, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "5",
          "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme",
          "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}, ranks=2, files={DEFAULT: ZERO2_FILE}, long=True),
    # usage_guides/distributed_inference.md, mps.md, intel_cpu.md, low_precision_training.md
    Case("inference", "accelerate launch --config_file my_config.json distributed_inference.py", "",
         {"ACCELERATE_MIXED_PRECISION": "bf16"},
         files={"my_config.json": '{"distributed_type": "NO", "mixed_precision": "bf16", "num_processes": 1}'}),
    Case("inference", "accelerate launch --num_processes 2 distributed_inference.py", "", ranks=2, long=True),
    Case("mps", "accelerate launch /examples/cv_example.py --data_dir images", "--data_dir images"),
    Case("intel_cpu", "mpirun -f hostfile -n 16 -ppn 4 accelerate launch examples/nlp_example.py", "",
         outer={"PMI_SIZE": "16", "PMI_RANK": "3"}),
    Case("low_precision", "accelerate launch --fp8_backend=te -h", ""),
    # usage_guides/gradient_accumulation.md and others that only name a script
    Case("gradient_accumulation", "accelerate launch ./gradient_accumulation.py --gradient_accumulation_steps 5",
         "--gradient_accumulation_steps 5"),
    # examples/README.md, examples/by_feature/README.md
    Case("examples", "accelerate launch --cpu ./nlp_example.py", "", {"ACCELERATE_USE_CPU": "true"}),
    Case("examples", "accelerate launch --mixed_precision fp16 ./nlp_example.py", "", FP16),
    Case("examples", "accelerate launch --config_file config.yaml ./cv_example.py --data_dir path_to_data",
         "--data_dir path_to_data", {"ACCELERATE_USE_CPU": "true"}, files={"config.yaml": CPU}),
    Case("by_feature", "accelerate launch ../nlp_example.py --mixed_precision fp16 --cpu 0",
         "--mixed_precision fp16 --cpu 0"),
    Case("by_feature", 'accelerate launch ./checkpointing.py --checkpointing_steps epoch output_dir '
         '"checkpointing_tutorial" --resume_from_checkpoint "checkpointing_tutorial/epoch_0"',
         "--checkpointing_steps epoch output_dir checkpointing_tutorial --resume_from_checkpoint "
         "checkpointing_tutorial/epoch_0"),
    Case("by_feature", "accelerate launch ./cross_validation.py --num_folds 2", "--num_folds 2"),
    Case("by_feature", "accelerate launch ./ddp_comm_hook.py --mixed_precision fp16 --ddp_comm_hook power_sgd",
         "--mixed_precision fp16 --ddp_comm_hook power_sgd"),
    # examples/config_yaml_templates, examples/inference, examples/torch_native_parallelism
    Case("templates", "accelerate launch --config_file {file} run_me.py", "",
         {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_SYNC_MODULE_STATES": "true",
          "ACCELERATE_MIXED_PRECISION": "bf16"}, ranks=2, files={"file": FSDP}),
    Case("templates", "accelerate launch --config_file {file} run_me.py", "",
         {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_FORMAT": "E4M3",
          "ACCELERATE_FP8_OVERRIDE_FPROP": "false"}, files={"file": FP8}),
    Case("inference examples", "accelerate launch --num_processes {NUM_GPUS} phi2.py", "", ranks=2, gpus=2, long=True,
         outer={"NUM_GPUS": "2"}),
    Case("inference examples", "accelerate launch --num_processes=2 florence2.py --data_path "
         '"https://huggingface.co/datasets/pixparse/cc3m-wds/resolve/main/cc3m-train-0000.tar" --num_workers 1 '
         '--prompt "<CAPTION>"', "--data_path https://huggingface.co/datasets/pixparse/cc3m-wds/resolve/main/"
         "cc3m-train-0000.tar --num_workers 1 --prompt '<CAPTION>'", ranks=2, long=True),
    Case("parallelism", "accelerate launch --num-processes 8 nd_parallel.py \\\n    --dp-replicate-size 2 \\\n"
         "    --dp-shard-size 2 \\\n    --tp-size 2", "--dp-replicate-size 2 --dp-shard-size 2 --tp-size 2", ranks=8,
         long=True),
    Case("parallelism", "accelerate launch --config-file configs/tp_hsdp.yaml nd_parallel_trainer.py", "",
         {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "FSDP_VERSION": "2"},
         ranks=8, files={"configs/tp_hsdp.yaml": TP_HSDP}, long=True),
    # examples/slurm/submit_multigpu.sh; the jobs on several nodes are in tests/cluster
    Case("slurm", "accelerate launch --num_processes $GPUS_PER_NODE $SCRIPT $SCRIPT_ARGS",
         "--mixed_precision fp16 --with_tracking", ranks=4, gpus=4, long=True,
         outer={"GPUS_PER_NODE": "4", "SCRIPT": "complete_nlp_example.py",
                "SCRIPT_ARGS": " --mixed_precision fp16 --with_tracking "}),
    # examples/alst_ulysses_sequence_parallelism/sp-alst.sh
    Case("alst", 'python -u -m accelerate.commands.launch --rdzv_conf '
         '"rdzv_backend=c10d,rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT" --main_process_ip $MASTER_ADDR '
         "--main_process_port $MASTER_PORT --config_file sp-alst.accelerate-config.yml sp-alst.py", "", DEEPSPEED,
         ranks=2, files={"sp-alst.accelerate-config.yml": ZERO3}, outer={"MASTER_ADDR": "localhost"}, long=True),
]  # fmt: skip
SCRIPT = re.compile(r"\S+\.py\b|\btraining_script\b")


def shell_line(case: Case, launcher: Launcher) -> str:
    """The line for a shell: our program's name, and the documentation's placeholders replaced."""
    program = f"{shlex.quote(launcher.python)} -m hpcaccel launch"
    line = re.sub(r"^mpirun .*? (?=accelerate)", "", case.line)
    line = re.sub(
        r"python (-u )?-m accelerate\.commands\.launch|accelerate launch|\btorchrun\b", program, line, count=1
    )
    line = line.replace("{NUM_GPUS}", "$NUM_GPUS").replace("[allgather|alltoall] ...", "allgather script.py")
    line = line.replace(" [arguments]", "").replace("  ...", " script.py").removesuffix(" ...")
    line = re.sub(r"\{([^}]*)\}", r"\1", line)
    return line.replace("/examples", "examples").replace("../", "./")


@pytest.mark.torch
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{number}-{case.page}", marks=[pytest.mark.chaos] if case.long else [])
        for number, case in enumerate(CASES)
    ],
)
def test_documented_command_line_runs(launcher: Launcher, case: Case) -> None:
    line = shell_line(case, launcher)
    for name in SCRIPT.findall(f"{line} {case.outer.get('SCRIPT', '')}"):
        launcher.write(name, SHOW)
    for name, text in case.files.items():
        launcher.write(name, text)
    launcher.gpus(case.gpus)
    outer = {**case.outer, **({"MASTER_PORT": str(launcher.free_port())} if "MASTER_ADDR" in case.outer else {})}
    answer = subprocess.run(
        ["bash", "-c", line],
        cwd=launcher.folder, env={**launcher.env, **outer}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    if line.endswith("-h"):
        assert "--num-processes" in answer.stdout
        assert "--fp8-backend" in answer.stdout
        return
    found: list[dict[str, Any]] = [json.loads(text) for text in answer.stdout.splitlines()]
    assert [one["args"] for one in found] == [shlex.split(case.args)] * case.ranks
    for one in found:
        assert {name: one["env"].get(name) for name in case.env} == case.env
    ranks = sorted(one["env"].get("RANK", "0") for one in found)
    assert ranks == [str(rank) for rank in range(case.ranks)]
    if case.ranks > 1:
        assert {one["env"]["WORLD_SIZE"] for one in found} == {str(case.ranks)}


def test_there_are_enough_documented_command_lines() -> None:
    assert len({case.line for case in CASES}) >= 40
    assert len([case for case in CASES if not case.long]) >= 20


def test_misspelt_line_of_the_examples_gets_the_right_spelling(launcher: Launcher) -> None:
    """examples/README.md has this line, which Accelerate's launcher refuses, too."""
    launcher.write("cv_example.py", SHOW)
    answer = launcher("--mixed_precison", "fp16", "./cv_example.py", "--data_dir", "path_to_data")
    assert answer.returncode == 2
    assert "Did you mean --mixed-precision?" in answer.stderr
