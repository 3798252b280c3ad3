"""The launcher as Python functions, and as a program under Accelerate's name."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import UserError
from hpcaccel.launch.launch_function import (
    launch_command,
    launch_command_parser,
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from .conftest import Launcher

FUNCTION = """
import subprocess, sys
from hpcaccel.launch.launch_function import launch_command, launch_command_parser
args = launch_command_parser().parse_args(sys.argv[1:])
args.training_script_args.append("--more")
try:
    launch_command(args)
except subprocess.CalledProcessError as error:
    print("failed with", error.returncode)
"""
SEVERAL = "--num_processes 2 --num_machines 2"
SHOW = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ.get('ACCELERATE_MIXED_PRECISION')]))\n"


def parsed(line: str) -> argparse.Namespace:
    return launch_command_parser().parse_args(line.split())


def run(launcher: Launcher, *words: str) -> subprocess.CompletedProcess[str]:
    launcher.write("function.py", FUNCTION)
    return subprocess.run(
        [sys.executable, "function.py", *words],
        cwd=launcher.folder, env=launcher.env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


# -- the parser --------------------------------------------------------------------------------------------------------


def test_parser_has_the_flags_in_both_spellings_and_short_forms() -> None:
    args = parsed(
        "--num_processes 2 --mixed-precision bf16 --multi_gpu -m --node-rank 1 --env A=1 --env B=2 t.py --x 1"
    )
    assert (args.num_processes, args.mixed_precision, args.multi_gpu, args.module) == (2, "bf16", True, True)
    assert (args.machine_rank, args.env, args.cpu, args.num_machines) == (1, ["A=1", "B=2"], False, None)
    assert (args.training_script, args.training_script_args) == ("t.py", ["--x", "1"])


def test_parser_can_be_a_command_of_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    whole = argparse.ArgumentParser()
    launch_command_parser(whole.add_subparsers())
    args = whole.parse_args(["launch", "--cpu", "t.py"])
    assert args.func is launch_command
    with pytest.raises(SystemExit):
        parsed("--num-procs 2 t.py")
    with pytest.raises(SystemExit):
        parsed("--help")
    assert "--fsdp_version" in capsys.readouterr().out


# -- launch_command ----------------------------------------------------------------------------------------------------


def test_function_starts_the_script_with_changed_arguments(launcher: Launcher) -> None:
    launcher.write("show.py", SHOW)
    done = run(launcher, "--cpu", "--mixed_precision", "bf16", "show.py", "--help", "--", "a  b")
    assert json.loads(done.stdout) == [["--help", "--", "a  b", "--more"], "bf16"], done.stderr


def test_failure_is_an_exception_with_the_exit_code(launcher: Launcher) -> None:
    launcher.write("fail.py", "raise SystemExit(43)")
    assert run(launcher, "--cpu", "fail.py").stdout == "failed with 43\n"
    quiet = run(launcher, "--cpu", "--quiet", "fail.py")
    assert (quiet.stdout, quiet.returncode) == ("", 43)
    wrong = run(launcher, "--cpu", "--multi-gpu", "fail.py")
    assert wrong.stdout == "failed with 2\n"
    assert "--cpu and --multi-gpu exclude each other" in wrong.stderr


def test_namespace_may_have_the_script_only(capfd: pytest.CaptureFixture[str]) -> None:
    Path("t.py").write_text("import sys; print(sys.argv[1:])")
    launch_command(argparse.Namespace(training_script="t.py", cpu=True))
    assert capfd.readouterr().out == "[]\n"


WAIT = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
signal.signal(signal.SIGHUP, lambda *_: sys.exit(8))
Path("ready").touch()
time.sleep(60)
"""


def waiting(launcher: Launcher, program: str) -> subprocess.Popen[str]:
    """A process that runs ``program`` with a script that waits for a signal."""
    launcher.write("wait.py", WAIT)
    launcher.write("function.py", program)
    process = subprocess.Popen(
        [sys.executable, "function.py", "--cpu", "wait.py"],
        cwd=launcher.folder, env=launcher.env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    launcher.started.append(process)
    end = time.monotonic() + 60
    while not (launcher.folder / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    return process


def test_signals_reach_the_script(launcher: Launcher) -> None:
    process = waiting(launcher, FUNCTION)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "failed with 7\n"


def test_ignored_signals_stay_ignored(launcher: Launcher) -> None:
    process = waiting(launcher, f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{FUNCTION}")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "failed with 7\n"


@pytest.mark.torch
def test_function_starts_several_ranks(launcher: Launcher) -> None:
    launcher.write("rank.py", "import os; os.write(1, f\"rank {os.environ['RANK']}\\n\".encode())")
    done = run(launcher, "--cpu", "--num_processes", "2", "rank.py")
    assert sorted(done.stdout.split("\n")) == ["", "rank 0", "rank 1"], done.stderr


@pytest.mark.torch
@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        ("launch", ("--cpu", "--mixed_precision", "bf16", "show.py", "--x"), '[["--x"], "bf16"]'),
        ("accelerate_cli", ("launch", "--cpu", "--mixed_precision", "bf16", "show.py", "--x"), '[["--x"], "bf16"]'),
        ("config.config", ("default", "--config-file", "new.yaml"), "new.yaml"),
        ("estimate", ("--help",), "estimate-memory"),
    ],
)
def test_modules_can_be_started(launcher: Launcher, module: str, words: tuple[str, ...], expected: str) -> None:
    launcher.write("show.py", SHOW)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"hpcaccel.commands.{module}", *words],
        cwd=launcher.folder, env=launcher.env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout + done.stderr


@pytest.mark.torch
def test_module_of_a_missing_command_names_the_replacement(launcher: Launcher) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcaccel.commands.merge", "src", "dst"],
        cwd=launcher.folder, env=launcher.env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "hpcaccel checkpoint convert SRC DST --to safetensors" in done.stderr


# -- commands and environments -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with a script, and no variables of launchers."""
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "SLURM_", "FSDP_", "MASTER_", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")


def test_command_and_environment_of_a_single_process() -> None:
    args = parsed("--mixed_precision fp16 --dynamo_backend no --gpu_ids 1 -m package.train --x 1")
    command, env = prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, "-m", "package.train", "--x", "1"]
    assert (env["ACCELERATE_MIXED_PRECISION"], env["ACCELERATE_DYNAMO_BACKEND"]) == ("fp16", "NO")
    assert (env["CUDA_VISIBLE_DEVICES"], env["PATH"]) == ("5", os.environ["PATH"])
    assert "MASTER_ADDR" not in env
    command, env = prepare_simple_launcher_cmd_env(parsed("--no_python --cpu --num_processes 2 ls -l"))
    assert command == ["ls", "-l"]
    assert (env["ACCELERATE_USE_CPU"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("true", "127.0.0.1", "29500")


def test_several_machines_need_an_address_and_a_rank() -> None:
    line = f"{SEVERAL} --main_process_port 7 t.py"
    with pytest.raises(UserError, match="--main-process-ip ADDRESS of machine 0 is missing"):
        prepare_simple_launcher_cmd_env(parsed(line))
    _, env = prepare_simple_launcher_cmd_env(parsed(f"--main_process_ip n1 {line}"))
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("n1", "7")
    with pytest.raises(UserError, match="--main-process-ip ADDRESS of machine 0 is missing"):
        prepare_multi_gpu_env(parsed(f"--machine_rank 1 {line}"))
    with pytest.raises(UserError, match="--machine-rank is missing"):
        prepare_multi_gpu_env(parsed(f"--main_process_ip n1 {line}"))


def test_environment_of_several_ranks_and_torchruns_options() -> None:
    args = parsed("--use_fsdp --fsdp_version 2 --num_processes 4 --mixed_precision bf16 t.py")
    env = prepare_multi_gpu_env(args)
    assert (env["ACCELERATE_USE_FSDP"], env["FSDP_VERSION"]) == ("true", "2")
    assert (args.nproc_per_node, args.master_port) == ("4", str(args.main_process_port))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", args.main_process_port))
    assert "standalone" not in vars(args) or not args.standalone


def test_deepspeed_ranks_are_started_by_torchrun() -> None:
    line = "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip n1 --main_process_port 29501"
    args = parsed(f"{line} --zero_stage 3 --deepspeed_multinode_launcher standard t.py")
    command, env = prepare_deepspeed_cmd_env(args)
    assert command is None
    assert (env["ACCELERATE_USE_DEEPSPEED"], env["ACCELERATE_DEEPSPEED_ZERO_STAGE"]) == ("true", "3")
    assert (args.nproc_per_node, args.node_rank, args.rdzv_endpoint) == ("2", 1, "n1:29501")
    with pytest.raises(UserError, match="does not use DeepSpeed's own launcher"):
        prepare_deepspeed_cmd_env(parsed(f"{line} --deepspeed_multinode_launcher pdsh t.py"))


def test_options_of_several_machines() -> None:
    line = "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip n1 --main_process_port 29501"
    args = parsed(f"{line} t.py")
    prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.node_rank, args.rdzv_endpoint) == ("2", "2", 1, "n1:29501")
    args = parsed(f"{line} --same_network t.py")
    prepare_multi_gpu_env(args)
    assert (args.master_addr, args.master_port) == ("n1", "29501")


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = parsed(f"--num_processes 2 --main_process_port {port} t.py")
        with pytest.warns(UserWarning, match=f"port {port} is in use"):
            prepare_multi_gpu_env(args)
        assert args.standalone
        with pytest.raises(UserError, match=f"port {port} is in use"):
            prepare_multi_gpu_env(
                parsed(f"{SEVERAL} --machine_rank 0 --main_process_ip n0 --main_process_port {port} t.py")
            )


@pytest.mark.parametrize("values", [{}, {"num_processes": 3, "num_machines": 2}])
def test_ranks_must_be_given_and_even(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be a number of ranks"):
        prepare_multi_gpu_env(argparse.Namespace(**values))
    with pytest.raises(UserError, match="--mixed-precision 'fp17' is not valid"):
        prepare_multi_gpu_env(argparse.Namespace(num_processes=2, mixed_precision="fp17"))
