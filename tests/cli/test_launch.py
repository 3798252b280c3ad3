"""The command `hpcaccel launch`: help, errors, the configuration file, and imports limited to what it needs."""

from __future__ import annotations

import json

import pytest

SHOW = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


@pytest.fixture
def script(shell):
    shell.write("show.py", SHOW)
    return "show.py"


def shown(result):
    assert result.returncode == 0, result.stderr
    arguments, environment = json.loads(result.stdout)
    return arguments, environment


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_flag_by_group(shell, flag):
    result = shell("launch", flag)
    assert result.returncode == 0
    assert result.stdout.startswith("Usage: hpcaccel launch [FLAGS] SCRIPT [ARGUMENTS]")
    for text in ("--num-processes", "--nproc-per-node", "-m, --module", "--fsdp-version", "FSDP (with --use-fsdp):"):
        assert text in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_arguments_of_the_script_are_untouched(shell, script):
    words = ["--help", "-h", "--", "--num-processes", "a  b", "", "--x=1"]
    assert shown(shell("launch", "--cpu", script, *words))[0] == words


def test_wrong_flags_are_one_line(shell, refused, script):
    said = refused(shell("launch", "--num-procesess", "2", script))
    assert "Did you mean --num-processes?" in said
    assert len(said.splitlines()) == 1
    assert "the script is missing" in refused(shell("launch"))
    assert "there is no script 'absent.py'" in refused(shell("launch", "absent.py"))


def test_default_file_is_read_and_the_command_line_overrides_it(shell, script):
    shell.write(
        "../.cache/huggingface/accelerate/default_config.yaml", "distributed_type: 'NO'\nmixed_precision: bf16\n"
    )
    assert shown(shell("launch", script))[1]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert shown(shell("launch", "--mixed-precision", "fp16", script))[1]["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert "ACCELERATE_MIXED_PRECISION" not in shown(shell("launch", "--cpu", script))[1]
    shell.write("own.yaml", "distributed_type: 'NO'\nmixed_precision: fp8\n")
    found = shown(shell("launch", "--cpu", "--config_file", "own.yaml", script))[1]
    assert found["ACCELERATE_MIXED_PRECISION"] == "fp8"


def test_folder_of_the_default_file_may_be_elsewhere(shell, script):
    shell.environment["HF_HOME"] = str(shell.folder / "hf")
    shell.write("hf/accelerate/default_config.json", '{"distributed_type": "NO", "debug": true}')
    assert shown(shell("launch", script))[1]["ACCELERATE_DEBUG_MODE"] == "true"


def test_wrong_file_is_refused_with_its_line(shell, refused, script):
    shell.write("own.yaml", "distributed_type: 'NO'\nnum_procesess: 2\n")
    assert "own.yaml:2: num_procesess is not a known key" in refused(
        shell("launch", "--config-file", "own.yaml", script)
    )
    assert "there is no configuration file 'none.yaml'" in refused(
        shell("launch", "--config-file", "none.yaml", script)
    )


def test_flags_without_effect_are_named(shell, script):
    result = shell("launch", "--fsdp-version", "2", script)
    assert shown(result)
    assert result.stderr == "note: --fsdp-version without --use-fsdp: no effect\n"


def test_exit_code_is_the_programs(shell):
    assert shell("launch", "--no-python", "bash", "-c", "exit 43").returncode == 43


def test_launcher_imports_neither_torch_nor_pydantic(shell):
    """The time of each import is added to that of each start."""
    report = "import sys; from hpcaccel.launch import launch_plan, step_launch, arguments; print(*sys.modules)"
    loaded = set(shell(python=report).stdout.split())
    assert "hpcaccel.launch.launch_plan" in loaded
    assert not {"torch", "pydantic", "numpy", "submitit", "questionary"} & loaded
