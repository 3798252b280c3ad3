"""What is started, and with which variables, without starting it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.launch.config_to_spec import to_spec

from .planning import ALONE, GPUS, PYTHON, config, plan, refusal, torchrun

pytestmark = pytest.mark.usefixtures("script_and_srun")


# -- this machine ------------------------------------------------------------------------------------------------------


def test_single_process_is_the_script_itself() -> None:
    assert plan("t.py --x 1").command == [PYTHON, "t.py", "--x", "1"]
    assert plan("-m package.train --x").command == [PYTHON, "-m", "package.train", "--x"]
    assert plan("--no-python ls -l").command == ["ls", "-l"]


def test_all_gpus_of_the_machine_by_default() -> None:
    assert torchrun(plan("t.py", GPUS)) == ["--nnodes=1", "--nproc-per-node=4", "--standalone"]
    assert plan("--cpu t.py", GPUS).command == [PYTHON, "t.py"]
    assert torchrun(plan("--gpu-ids 1,3 t.py", GPUS))[1] == "--nproc-per-node=2"
    assert plan("--gpu-ids 1,3 t.py", GPUS).environ["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_torchruns_flags_start_its_agent_for_one_rank_too() -> None:
    assert torchrun(plan("--nproc-per-node 1 t.py")) == ["--nnodes=1", "--nproc-per-node=1", "--standalone"]
    assert torchrun(plan("--standalone --nproc_per_node=gpu t.py"))[1] == "--nproc-per-node=gpu"
    assert "--tee=3" in torchrun(plan("-t 3 --log-dir logs t.py"))
    assert "--max-restarts=2" in torchrun(plan("--max-restarts 2 --nproc-per-node 2 t.py"))


def test_cpus_are_shared_among_the_ranks() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert plan("--nproc-per-node 2 t.py").environ["OMP_NUM_THREADS"] == str(max(1, cpus // 2))
    assert plan("--nproc-per-node 2 t.py", {**ALONE, "OMP_NUM_THREADS": "7"}).environ["OMP_NUM_THREADS"] == "7"
    line = "--nproc-per-node 2 --num-cpu-threads-per-process 3 t.py"
    assert plan(line, {**ALONE, "OMP_NUM_THREADS": "7"}).environ["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in plan("t.py").environ


def test_cpus_are_shared_among_ranks_that_a_word_counts() -> None:
    cpus = len(os.sched_getaffinity(0))
    for word in ("gpu", "auto"):
        found = plan(f"--nproc-per-node {word} t.py", GPUS)
        assert found.environ["OMP_NUM_THREADS"] == str(max(1, cpus // 4))
        assert torchrun(found)[1] == f"--nproc-per-node={word}"
    some = plan("--gpu-ids 0,1 --nproc-per-node gpu t.py", GPUS)
    assert some.environ["OMP_NUM_THREADS"] == str(max(1, cpus // 2))
    on_cpus = plan("--nproc-per-node cpu t.py", GPUS).environ.get("OMP_NUM_THREADS", "1")
    assert on_cpus == str(max(1, cpus // (os.cpu_count() or 1)))


def test_gpu_ids_count_among_the_visible_gpus() -> None:
    for visible, ids, expected in [
        ("4,5", "0,1", "4,5"), ("4,5,6,7", "3,1", "7,5"), ("GPU-a,GPU-b", "1", "GPU-b"),
        ("GPU-a,GPU-b", "GPU-a", "GPU-a"),
    ]:  # fmt: skip
        found = plan(f"--gpu-ids {ids} t.py", {"CUDA_VISIBLE_DEVICES": visible})
        assert found.environ["CUDA_VISIBLE_DEVICES"] == expected
    found = plan("--gpu-ids 1 t.py", {"HIP_VISIBLE_DEVICES": "2,3"})
    assert (found.environ["HIP_VISIBLE_DEVICES"], "CUDA_VISIBLE_DEVICES" in found.environ) == ("3", False)
    message = refusal("--gpu-ids 1,4 t.py", {"CUDA_VISIBLE_DEVICES": "4,5"})
    assert "there is no GPU 4. CUDA_VISIBLE_DEVICES=4,5 makes 2 GPUs visible" in message


def test_total_and_number_per_machine() -> None:
    found = plan("--num-processes 8 --num-machines 2 --machine-rank 1 --main-process-ip a --main-process-port 1 t.py")
    expected = ["--nnodes=2", "--nproc-per-node=4", "--node-rank=1", "--master-addr=a", "--master-port=1"]
    assert torchrun(found) == expected
    found = plan("--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr a --master-port 1 t.py")
    assert torchrun(found) == expected


def test_rendezvous_by_c10d() -> None:
    found = plan("--nnodes 1:4 --nproc-per-node 2 --rdzv-endpoint a:1 --rdzv-id job --max-restarts 3 t.py")
    assert torchrun(found) == [
        "--nnodes=1:4", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "--max-restarts=3",
        "--rdzv-id=job",
    ]  # fmt: skip
    found = plan("--num-machines 2 --num-processes 2 --rdzv-backend c10d --main-process-ip a t.py")
    assert torchrun(found)[2:] == ["--rdzv-backend=c10d", "--rdzv-endpoint=a:29500"]


def test_address_of_machine_0_may_come_from_the_environment() -> None:
    env = {**ALONE, "MASTER_ADDR": "a", "MASTER_PORT": "29555 ", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2"}
    expected = ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=a", "--master-port=29555"]
    assert torchrun(plan("--nnodes 2 t.py", env)) == expected
    assert torchrun(plan("--nnodes 2 --master-addr b t.py", env))[3] == "--master-addr=b"


def test_switch_that_is_off_is_not_passed_to_torchrun() -> None:
    assert not [word for word in torchrun(plan("--num-processes 2 --run-path=false t.py")) if "run" in word]


def test_port_is_free_unless_it_is_given() -> None:
    assert "--standalone" in torchrun(plan("--num-processes 2 --main-process-port 0 t.py"))
    assert torchrun(plan("--num-processes 2 --main-process-port 23456 t.py"))[2:] == [
        "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=23456",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-processes 8 --nproc-per-node 2 t.py", "contradict each other on 1 machine"),
        ("--num-processes 3 --num-machines 2 t.py", "cannot be spread evenly over 2 machines"),
        ("--num-processes 0 t.py", "--num-processes 0 must be at least 1"),
        ("--nproc-per-node many t.py", "must be a number of at least 1, or gpu, cpu, xpu, auto"),
        ("--nnodes 2:1 t.py", "--nnodes 2:1 must be a number of machines"),
        ("--nnodes 2 --num-machines 2 t.py", "--num-machines and --nnodes exclude each other"),
        ("--nnodes 1:2 --num-processes 2 t.py", "use --nproc-per-node"),
        ("--nnodes 1:2 --rdzv-backend static --nproc-per-node 1 --rdzv-endpoint a:1 t.py", "--rdzv-backend c10d"),
        ("--nnodes 2 t.py", "--main-process-ip ADDRESS of machine 0 is missing"),
        ("--nnodes 2 --rdzv-backend c10d t.py", "--rdzv-endpoint HOST:PORT of machine 0 is missing"),
        ("--nnodes 2 --main-process-ip a t.py", "several machines need --machine-rank, this machine's index"),
        ("--cpu --multi-gpu t.py", "--cpu and --multi-gpu exclude each other"),
        ("--use-fsdp --use-deepspeed t.py", "--use-fsdp and --use-deepspeed exclude each other"),
        ("--module --no-python t.py", "--module and --no-python exclude each other"),
        ("--multi-gpu t.py", "no GPU is visible on this machine"),
        ("--no-python no-such-program", "the program 'no-such-program' was not found on PATH, or is not executable"),
        ("no-such.py", "there is no script 'no-such.py'"),
        ("--tpu-cluster --tpu t.py", "hpcaccel does not start programs on TPU pods"),
        (
            "--nnodes 2 --use-deepspeed --deepspeed-hostfile hosts t.py",
            "hpcaccel does not use DeepSpeed's own launcher",
        ),
        (
            "--num-machines 2 --use-deepspeed --deepspeed-multinode-launcher pdsh t.py",
            "--deepspeed-multinode-launcher pdsh",
        ),
        ("--gradient-accumulation-steps 0 t.py", "must be a whole number of at least 1"),
        ("--use-fsdp --fsdp-cpu-ram-efficient-loading true --fsdp-sync-module-states false t.py", "only rank 0 reads"),
        ("--mixed-precision fp8 --fp8-override-linear-precision true t.py", "three booleans"),
        ("--mpirun-hostfile hosts --nproc-per-node gpu t.py", "--mpirun-hostfile needs fixed numbers"),
        ("--mpirun-hostfile hosts --num-processes 2 t.py", "neither mpirun nor mpiexec is on PATH"),
    ],
)
def test_contradictions_are_refused(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert message in refusal(line)


def test_more_gpus_than_there_are_are_refused() -> None:
    assert "8 ranks with --multi-gpu need a GPU each, but this machine has 4" in refusal(
        "--multi-gpu --num-processes 8 t.py", GPUS
    )
    assert "2 ranks with --multi-gpu need a GPU each, but this machine has 1" in refusal(
        "--multi-gpu --gpu-ids 0 --num-processes 2 t.py", GPUS
    )
    assert "several GPUs need at least 2 ranks" in refusal("--multi-gpu --num-processes 1 t.py", GPUS)


def test_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in refusal(f"--num-processes 2 --main-process-port {port} t.py")


def test_flags_without_effect_are_named() -> None:
    assert plan("--fsdp-version 2 t.py").notes == ["--fsdp-version without --use-fsdp: no effect"]
    assert plan("--zero-stage 2 t.py").notes == ["--zero-stage without --use-deepspeed: no effect"]
    assert plan("--fp8-backend te t.py").notes == ["--fp8-* without --mixed-precision fp8: no effect"]
    assert plan("--use-fsdp --fsdp-version 2 t.py").notes == []


def test_mpirun(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/bash\necho 'mpirun (Open MPI) 4.1.4'\n")
    program.chmod(0o755)
    line = "--cpu --mpirun-hostfile hosts --num-processes 4 --num-machines 2 --main-process-ip a t.py --x"
    found = plan(line)
    expected = ["--hostfile", "hosts", "--npernode", "2", "-n", "4", "--bind-to", "socket"]
    names = ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT")
    passed = [word for name in names for word in ("-x", name)]
    assert found.command == [str(program), *expected, *passed, PYTHON, "t.py", "--x"]
    assert found.environ["MASTER_ADDR"] == "a"
    without = line.replace("--main-process-ip a", "")
    assert "2 machines: --main-process-ip ADDRESS is missing" in refusal(without)
    assert plan(without, {**ALONE, "MASTER_ADDR": "b"}).environ["MASTER_ADDR"] == "b"
    program.write_text("#!/bin/bash\necho 'Intel(R) MPI Library for Linux'\n")
    assert plan(line).command == [str(program), "-f", "hosts", "-ppn", "2", "-n", "4", PYTHON, "t.py", "--x"]


def test_tpu() -> None:
    found = plan("--tpu --mixed-precision bf16 --main-training-function train t.py --x")
    assert found.command == [PYTHON, "-m", "hpcaccel.launch.tpu_program", "train", "t.py", "--x"]
    assert (found.environ["PJRT_DEVICE"], found.environ["XLA_USE_BF16"]) == ("TPU", "1")


def test_shutdown_timeout_and_quiet_reach_the_agent() -> None:
    found = plan("--quiet --shutdown-timeout 5 --num-processes 2 t.py")
    assert found.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5"
    assert found.command[3] == "--quiet"


# -- the configuration file --------------------------------------------------------------------------------------------


def test_command_line_overrides_the_file_and_the_file_the_environment() -> None:
    file = config(mixed_precision="bf16", num_processes=2, distributed_type="MULTI_CPU")
    env = {**ALONE, "ACCELERATE_MIXED_PRECISION": "fp16", "PET_NPROC_PER_NODE": "3"}
    assert plan("--mixed-precision no t.py", env, file).environ["ACCELERATE_MIXED_PRECISION"] == "no"
    assert plan("t.py", env, file).environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert plan("t.py", env).environ["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert torchrun(plan("t.py", env, file))[1] == "--nproc-per-node=2"
    assert torchrun(plan("t.py", env))[1] == "--nproc-per-node=3"


@pytest.mark.parametrize(
    ("kind", "variable"),
    [("FSDP", "ACCELERATE_USE_FSDP"), ("DEEPSPEED", "ACCELERATE_USE_DEEPSPEED"), ("MULTI_CPU", "ACCELERATE_USE_CPU")],
)
def test_distributed_type_of_the_file(kind: str, variable: str) -> None:
    file = config(distributed_type=kind, num_processes=2)
    assert plan("t.py", ALONE, file).environ[variable] == "true"
    assert variable not in plan("--multi-gpu t.py", GPUS, file).environ


def test_file_for_a_single_device() -> None:
    file = config(distributed_type="NO", num_processes=1)
    assert plan("t.py", GPUS, file).command == [PYTHON, "t.py"]
    assert plan("t.py", GPUS, config(distributed_type="NO")).command == [PYTHON, "t.py"]
    assert torchrun(plan("--multi-gpu t.py", GPUS, file))[1] == "--nproc-per-node=4"


@pytest.mark.parametrize(("value", "expected"), [(False, "NO"), (True, "INDUCTOR"), ("eager", "EAGER")])
def test_backend_of_the_compiler_may_be_an_unquoted_yes_or_no(value: Any, expected: str) -> None:
    file = config(distributed_type="NO", dynamo_config={"dynamo_backend": value})
    assert plan("t.py", ALONE, file).environ["ACCELERATE_DYNAMO_BACKEND"] == expected
    assert ("compile: true" in to_spec(file, source="file")) == (expected != "NO")


def test_sections_of_the_file_become_variables() -> None:
    file = config(
        distributed_type="FSDP",
        num_processes=8,
        fsdp_config={"fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_offload_params": True, "fsdp_version": 2},
        dynamo_config={"dynamo_backend": "inductor", "dynamo_use_dynamic": False},
        parallelism_config={"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 1},
    )
    found = plan("--fsdp-version 1 t.py", ALONE, file).environ
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_VERSION": "1",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "false",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_CP_SIZE": "1",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_variables_of_deepspeed_and_fp8() -> None:
    file = config(
        distributed_type="DEEPSPEED",
        num_processes=2,
        mixed_precision="fp8",
        deepspeed_config={"zero_stage": 3, "zero3_init_flag": True, "gradient_clipping": 1.0},
        fp8_config={"fp8_backend": "TE", "fp8_override_linear_precision": [False, True, False]},
    )
    found = plan("--offload-param-device cpu --gradient-accumulation-steps 4 t.py", ALONE, file).environ
    expected = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_CONFIG_DS_FIELDS": "gradient_clipping,mixed_precision,zero3_init_flag,zero_stage",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_FP8_OVERRIDE_DGRAD": "true",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_file_of_another_number_of_processes_than_minus_one() -> None:
    assert torchrun(plan("t.py", GPUS, config(distributed_type="MULTI_GPU", num_processes=-1)))[1].endswith("=4")


def test_megatron_in_the_file_is_refused() -> None:
    assert "does not support Megatron-LM" in refusal("t.py", GPUS, config(distributed_type="MEGATRON_LM"))
