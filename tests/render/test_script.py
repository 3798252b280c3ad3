"""Behaviour of rendered batch scripts, run by a real bash."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import SpecError
from hpcaccel.render import render
from hpcaccel.render.context import VARIABLES_OF_BASH as REFUSED
from hpcaccel.spec import ClusterProfile

from .conftest import Shell, Started, make_spec


def start(
    shell: Shell, env: dict[str, str] | None = None, *, options: dict[str, Any] | None = None, **spec: Any
) -> Started:
    text = render(
        make_spec(**spec),
        run_dir=RunDir(shell.folder / "run"),
        python=str(shell.python),
        workdir=shell.folder,
        header={},
        **(options or {}),
    )
    return shell.run(text, env)


def test_script_starts_the_supervisor(shell: Shell) -> None:
    started = start(shell)
    run = str(shell.folder / "run")
    assert (started.code, started.output) == (0, "")
    assert started.argv == [f"{run}/node.pyz", "batch", "supervise", run]
    assert started.cwd == str(shell.folder)
    assert started.env["MASTER_ADDR"] == "n7"


def test_array_task_has_its_own_run_directory(shell: Shell) -> None:
    started = start(shell, {"SLURM_ARRAY_TASK_ID": "3"}, options={"array_size": 5})
    assert started.argv[-1] == str(shell.folder / "run" / "tasks" / "3")


def test_job_with_spare_nodes_outlives_the_loss_of_one(tmp_path: Path) -> None:
    text = render(
        make_spec(slurm={"nodes": "2"}, resilience={"spare_nodes": 1}),
        run_dir=RunDir(tmp_path / "run"), python="python3", workdir=tmp_path, header={},
    )  # fmt: skip
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --no-kill\n" in text


def test_script_sets_defaults_for_python_and_torch(shell: Shell) -> None:
    env = start(shell, slurm={"cpus_per_task": 3}).env
    assert (env["PYTHONUNBUFFERED"], env["PYTHONFAULTHANDLER"]) == ("1", "1")
    assert (env["OMP_NUM_THREADS"], env["SRUN_CPUS_PER_TASK"]) == ("3", "3")
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_user_environment_overrides_site_and_defaults(shell: Shell) -> None:
    profile = ClusterProfile(name="alps", env={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "hsn0"})
    environment = {"env": {"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO"}}
    env = start(shell, {"TORCH_FR_BUFFER_SIZE": "9"}, options={"profile": profile}, environment=environment).env
    assert (env["OMP_NUM_THREADS"], env["TORCH_FR_BUFFER_SIZE"]) == ("7", "9")
    assert (env["NCCL_DEBUG"], env["NCCL_SOCKET_IFNAME"]) == ("INFO", "hsn0")


def test_script_unsets_slurm_export_env(shell: Shell) -> None:
    started = start(shell, {"SLURM_EXPORT_ENV": "KEY", "KEY": "a secret"}, environment={"secrets": ["KEY"]})
    assert "SLURM_EXPORT_ENV" not in started.env
    assert started.env["KEY"] == "a secret"
    assert started.output == ""


def test_missing_secret_is_reported_and_the_job_continues(shell: Shell) -> None:
    started = start(shell, environment={"secrets": ["KEY"]})
    assert "the secret KEY was not set" in started.output
    assert started.code == 0


def test_setup_lines_change_the_environment_of_the_ranks(shell: Shell) -> None:
    lines = [
        "export A=1; B=2",
        "declare -x C=$((A + B))",
        'export D="$UNSET_VARIABLE-$FROM_ENV"',
        "set -ex",
        "false | cat || true",
    ]
    started = start(shell, environment={"setup": lines, "env": {"FROM_ENV": "given"}})
    assert (started.code, started.argv[1:3]) == (0, ["batch", "supervise"])
    assert (started.env["A"], started.env["C"], started.env["D"]) == ("1", "3", "-given")
    assert "PYTHONUNBUFFERED" not in started.output  # set -x of a setup line ends with the setup


def test_spec_environment_overrides_exports_of_setup_lines(shell: Shell) -> None:
    assert start(shell, environment={"setup": ["export A=changed"], "env": {"A": "kept"}}).env["A"] == "kept"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("false", 1),
        ("exit 3", 3),
        ("exit 0", 0),
        ("no-such-program --flag", 127),
        ("(exit 9)", 9),
        ("set -e; false; true", 1),
        ("source /no/such/file", 1),
        ("-x", 127),
    ],
)
def test_failing_setup_line_is_reported_and_no_rank_starts(shell: Shell, line: str, code: int) -> None:
    started = start(shell, environment={"setup": ["true", line, "touch too-far"]})
    run = str(shell.folder / "run")
    assert started.argv == [f"{run}/node.pyz", "setup-failed", run, str(code), f"environment.setup: {line}"]
    assert started.code == 1
    assert f"environment.setup: {line} failed with exit code {code}" in started.output
    assert not (shell.folder / "too-far").exists()


def test_setup_line_with_a_syntax_error_fails_the_setup(shell: Shell) -> None:
    started = start(shell, environment={"setup": ["if ("]})
    assert started.argv[1] == "setup-failed"
    assert started.argv[3] != "0"


MODULE = '() { printf "%s\\n" "$*" >> "$HOME/loaded"; [[ $2 != missing* ]]; }'


def test_modules_are_loaded_in_order(shell: Shell) -> None:
    started = start(shell, {"BASH_FUNC_module%%": MODULE}, environment={"modules": ["gcc/12", "cuda/12.4"]})
    assert (shell.folder / "loaded").read_text() == "load gcc/12\nload cuda/12.4\n"
    assert started.argv[1:3] == ["batch", "supervise"]


def test_module_that_fails_to_load_fails_the_setup(shell: Shell) -> None:
    started = start(shell, {"BASH_FUNC_module%%": MODULE}, environment={"modules": ["missing/1", "gcc/12"]})
    assert started.argv[1:] == ["setup-failed", str(shell.folder / "run"), "1", "environment.modules: missing/1"]
    assert (shell.folder / "loaded").read_text() == "load missing/1\n"


def test_module_function_is_sourced_from_moduleshome(shell: Shell) -> None:
    (shell.folder / "init").mkdir()
    (shell.folder / "init" / "bash").write_text(f"module {MODULE}\n")
    start(shell, {"MODULESHOME": str(shell.folder)}, environment={"modules": ["gcc/12"]})
    assert (shell.folder / "loaded").read_text() == "load gcc/12\n"


@pytest.mark.skipif(any(Path("/etc/profile.d").glob("*mod*.sh")), reason="this machine has modules")
def test_missing_module_command_fails_on_slurm_and_warns_locally(shell: Shell) -> None:
    started = start(shell, environment={"modules": ["gcc/12"]})
    assert started.argv[1:] == ["setup-failed", str(shell.folder / "run"), "127", "environment.modules"]
    local = start(shell, options={"backend": "local"}, environment={"modules": ["gcc/12"]})
    assert local.argv[1:3] == ["batch", "supervise"]
    assert "continuing without environment.modules: gcc/12" in local.output


def test_conda_environment_is_activated_through_the_shell_hook(shell: Shell) -> None:
    hook = 'conda() { [[ $NEVER_SET ]]; export CONDA_PREFIX="$2"; [[ $2 != broken ]]; }'
    shell.program("conda", f"#!/bin/bash\n[[ $1 == shell.bash ]] && cat <<'END'\n{hook}\nEND\n")
    assert start(shell, environment={"conda": "my env"}).env["CONDA_PREFIX"] == "my env"
    assert start(shell, environment={"conda": "broken"}).argv[1:] == [
        "setup-failed", str(shell.folder / "run"), "1", "environment.conda: broken",
    ]  # fmt: skip


def test_missing_conda_is_reported(shell: Shell) -> None:
    started = start(shell, {"PATH": str(shell.bin) + ":/usr/bin:/bin"}, environment={"conda": "base"})
    assert started.argv[3:] == ["127", "environment.conda: base"]
    assert "conda is not on PATH" in started.output


def test_venv_is_activated(shell: Shell) -> None:
    venv = shell.folder / "my venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text('[ -z "$ZSH_VERSION" ]\nexport VIRTUAL_ENV=here\n')
    assert start(shell, environment={"venv": str(venv)}).env["VIRTUAL_ENV"] == "here"


def test_missing_venv_or_workdir_is_named(shell: Shell) -> None:
    assert start(shell, environment={"venv": "/no/venv"}).argv[-1] == "environment.venv: /no/venv"
    assert start(shell, workdir="/no/place").argv[-1] == "workdir: /no/place"


def background(shell: Shell, **spec: Any) -> subprocess.Popen[bytes]:
    spec_ = make_spec(**spec)
    run = RunDir(shell.folder / "run")
    script = shell.folder / "job.sbatch"
    script.write_text(render(spec_, run_dir=run, python=str(shell.python), workdir=shell.folder, header={}))
    return subprocess.Popen(
        ["bash", str(script)],
        env={"PATH": f"{shell.bin}:/usr/bin:/bin", "HOME": str(shell.folder), "SLURM_JOB_NODELIST": "n7"},
        cwd=shell.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_signal_during_setup_is_passed_to_the_supervisor(shell: Shell, number: signal.Signals) -> None:
    wait = "touch begun; while [[ ! -e go ]]; do sleep 0.05; done"
    process = background(shell, environment={"setup": [wait]})
    wait_for(shell.folder / "begun")
    process.send_signal(number)
    (shell.folder / "go").touch()
    assert process.wait(timeout=30) == 0
    record = (shell.bin / "record.json").read_text()
    assert '"supervise"' in record
    assert f'"HPCACCEL_EARLY_SIGNALS": " {number.name.removeprefix("SIG")}"' in record


def test_setup_line_killed_by_job_termination_is_no_failure(shell: Shell) -> None:
    wait = "touch begun; while [[ ! -e go ]]; do sleep 0.05; done; (exit 143)"
    process = background(shell, environment={"setup": [wait]})
    wait_for(shell.folder / "begun")
    process.send_signal(signal.SIGTERM)
    (shell.folder / "go").touch()
    assert process.wait(timeout=30) == 143
    assert not (shell.bin / "record.json").exists()


def bash_variables() -> list[str]:
    names = subprocess.run(
        ["bash", "-c", "compgen -v"], env={}, capture_output=True, text=True, check=True
    ).stdout.split()
    return [name for name in names if re.fullmatch(r"[A-Z_]+", name)]


@pytest.mark.parametrize(
    "name", sorted({*bash_variables(), *REFUSED, "BASH_ENV", "POSIXLY_CORRECT", "LC_ALL", "CDPATH"})
)
def test_variable_known_to_bash_is_exported_or_refused(shell: Shell, name: str) -> None:
    value = "x y;z"
    if name == "PATH":
        value = f"{shell.bin}:/usr/bin:/bin:/with blank"
    if name in REFUSED:
        with pytest.raises(SpecError, match=f"environment variable {name}: bash sets it itself"):
            start(shell, environment={"env": {name: value}})
    else:
        assert start(shell, environment={"env": {name: value}}).env[name] == value


def test_variable_reserved_by_the_script_is_refused(shell: Shell) -> None:
    with pytest.raises(SpecError, match="hpcaccel_python"):
        start(shell, environment={"env": {"hpcaccel_python": "x"}})


def test_rendering_imports_no_heavy_library() -> None:
    code = "import sys, hpcaccel.render; print(*{name.partition('.')[0] for name in sys.modules})"
    import sys

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "optuna", "fabric", "submitit", "typer", "rich"} & set(loaded)


EXPEDITE = {"resilience": {"requeue": "expedite"}}


def test_expedited_job_is_marked_and_always_exits_zero(shell: Shell) -> None:
    text = render(
        make_spec(**EXPEDITE),
        run_dir=RunDir(shell.folder / "run"),
        python=str(shell.python),
        workdir=shell.folder,
        header={},
    )
    assert "#SBATCH --requeue=expedite\n" in text
    assert start(shell, **EXPEDITE).env["HPCACCEL_EXPEDITE"] == "1"
    failed = start(shell, environment={"setup": ["false"]}, **EXPEDITE)
    assert failed.code == 0
    assert "failed with exit code 1: no rank is started" in failed.output
    missing = shell.run(text.replace(str(shell.python), "/nowhere/python"))
    assert missing.code == 0
    assert "/nowhere/python" in missing.output
