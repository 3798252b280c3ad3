"""`hpcaccel env`: what it reports, and that no secret is in it."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

import hpcaccel
from hpcaccel.launch import environment_report as reporting
from hpcaccel.launch.environment_report import masked
from tests.cli.conftest import Shell

SECRETS = {
    "WANDB_API_KEY": "f00dfeedf00dfeed",
    "HF_TOKEN": "plain-looking-words",
    "MY_PASSWORD": "correct horse",
    "DATABASE": "postgres://ada:s3same@db/x",
    "PIP_INDEX_URL": "https://ada:hunter2@pypi.example.org/simple?sig=abc123",
    "NCCL_DEBUG": "INFO https://x:leaked@y",
    "SLURM_JOB_PARTITION": "plain-looking-words",
    "NCCL_UNUSUAL": "unusual-value",
    "HTTPS_PROXY": "http://proxyuser:proxypass@proxy:3128",
    "PIP_EXTRA_INDEX_URL": "https://conda.anaconda.org/t/ab-1234abcd/simple https://pypi.fury.io/Fury77Token/me/",
    "UV_INDEX": "own=https://uv.example.org/uvTokenInPath/simple https://me:p4ss/word@slash.example.org/simple",
    "NCCL_IB_HCA": "xoxb-1111-2222-slackslack",
    "NCCL_NET": "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    "GLOO_SOCKET_IFNAME": "Authorization: Bearer bearer.token-words",
    "NCCL_SOCKET_IFNAME": 'password = "quoted phrase"',
    "CONDA_DEFAULT_ENV": "https://conda.anaconda.org/t/cd-5678efgh/simple",
}
NOT_SHOWN = (
    "f00dfeed", "plain-looking-words", "correct horse", "s3same", "hunter2", "abc123", "leaked", "unusual-value",
    "proxypass", "in-the-file", "Pa55", "of-pip", "hf_abcdefghijklmnop", "ab-1234", "Fury77Token", "uvTokenInPath",
    "p4ss", "word@", "slackslack", "AIzaSy", "token-words", "quoted", "phrase", "cd-5678",
)  # fmt: skip
CONFIG = """\
distributed_type: MULTI_GPU
num_processes: 4
main_training_function: hf_abcdefghijklmnop
commands: ["export TOKEN=in-the-file"]
tpu_env: ["TOKEN=in-the-file"]
deepspeed_config: {deepspeed_hostfile: 'https://u:Pa55@host/file'}
"""


@pytest.fixture
def planted(shell: Shell) -> Shell:
    """A machine with secrets in many places, a broken torch and two programs that describe GPUs."""
    shell.environment |= SECRETS
    shell.environment |= {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "HPCACCEL_RUNS_DIR": str(shell.folder / "runs")}
    shell.environment["HF_HOME"] = str(shell.folder / "hf")
    shell.write("hf/accelerate/default_config.yaml", CONFIG)
    shell.write("../.config/pip/pip.conf", "[global]\nextra-index-url = https://of-pip@example.org/simple\n")
    shell.write("../config/pip/pip.conf", "[global]\nextra-index-url = https://of-pip@example.org/simple\n")
    shell.write("../config/hpcaccel/clusters/alps.yaml", "default: true\nenv: {API_KEY: in-the-file}\n")
    shell.write("torch.py", "import os\nraise OSError('libcudart.so.12, token=' + os.environ['WANDB_API_KEY'])")
    shell.environment["PYTHONPATH"] = f"{shell.folder}:{shell.environment['PYTHONPATH']}"
    shell.program("nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15'")
    shell.program("rocm-smi", "echo 'no driver' >&2; exit 3")
    shell.program("sinfo", "echo 'slurm 23.11.4'")
    return shell


@pytest.mark.parametrize("words", [["env"], ["env", "--json"]])
def test_no_secret_is_shown(planted: Shell, words: list[str]) -> None:
    result = planted(*words)
    assert result.returncode == 0, result.stderr
    for secret in NOT_SHOWN:
        assert secret not in result.stdout + result.stderr, secret
    hosts = ("https://pypi.example.org", "https://example.org", "https://conda.anaconda.org", "https://pypi.fury.io")
    for shown in (*hosts, "https://uv.example.org", "23.11.4", "H100", "NCCL_UNUSUAL", "alps", "77"):
        assert shown in result.stdout, shown


def test_report_has_what_a_bug_report_needs(planted: Shell) -> None:
    report = json.loads(planted("env", "--json").stdout)
    assert report["hpcaccel"] == hpcaccel.__version__
    assert report["python"] == platform.python_version()
    assert report["system"]["kernel"] == platform.release()
    assert {"pydantic", "submitit", "questionary"} <= report["packages"].keys()
    assert report["slurm"] == "23.11.4"
    assert report["gpus"] == {
        "nvidia-smi": ["NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"],
        "rocm-smi": ["failed with exit code 3", "no driver"],
    }
    assert "libcudart.so.12" in report["torch"]["problem"]
    assert (report["allocation"]["SLURM_JOB_ID"], report["allocation"]["SLURM_NTASKS"]) == ("77", "8")
    assert "NCCL_UNUSUAL" in report["other_variables"]
    assert (report["cluster_profile"], report["runs_dir"]["exists"]) == ("alps", False)
    assert report["runs_dir"]["file_system"] == file_system_of(planted.folder)
    values = report["launch_config"]["values"]
    assert (values["num_processes"], values["commands"], values["tpu_env"]) == (4, "1 not shown", "1 not shown")


def file_system_of(folder: Path) -> str:
    import subprocess

    found = subprocess.run(["findmnt", "-no", "FSTYPE", "--target", folder], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_torch_is_described_by_the_python_of_the_ranks(shell: Shell) -> None:
    torch = pytest.importorskip("torch")
    report = json.loads(shell("env", "--json").stdout)
    assert report["torch"]["version"] == torch.__version__
    assert "gloo" in report["torch"]["backends"]
    absent = json.loads(shell("env", "--json", "--python", "/nowhere/python").stdout)
    assert absent["torch"]["problem"] == "/nowhere/python cannot be started: No such file or directory"


def test_torch_that_ends_its_process_is_reported(shell: Shell) -> None:
    shell.write("torch.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    shell.environment["PYTHONPATH"] = f"{shell.folder}:{shell.environment['PYTHONPATH']}"
    report = json.loads(shell("env", "--json").stdout)
    assert "was ended by signal 11" in report["torch"]["problem"]
    assert "was ended by signal 11" in shell("env").stdout


def test_broken_files_are_reported_and_not_raised(shell: Shell) -> None:
    shell.write("torch.py", "raise ImportError('none')")
    shell.environment["PYTHONPATH"] = f"{shell.folder}:{shell.environment['PYTHONPATH']}"
    shell.environment["HF_HOME"] = str(shell.folder / "hf")
    shell.write("hf/accelerate/default_config.yaml", "num_procs: 4\n")
    shell.write("../config/hpcaccel/clusters/alps.yaml", "default: perhaps\n")
    shell.write("../config/pip/pip.conf", "no section\n")
    result = shell("env")
    assert result.returncode == 0, result.stderr
    assert "num_procs is not a known key" in result.stdout
    assert "cannot be read: " in result.stdout


def test_value_of_a_key_with_a_secret_name_is_masked() -> None:
    values = {"aws_secret": "two words", "list_of_tokens": ["a", "b"], "num_processes": 4, "rdzv_backend": "c10d"}
    assert reporting._safe("section", values) == {
        "aws_secret": "***", "list_of_tokens": ["***", "***"], "num_processes": 4, "rdzv_backend": "c10d"
    }  # fmt: skip


def test_old_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "4.18.0-553.el8.x86_64")
    monkeypatch.setattr(reporting, "torch_facts", lambda _: {"problem": "not asked"})
    assert reporting.environment_report()["system"]["kernel_too_old"] is True
    monkeypatch.setattr("platform.release", lambda: "5.14.0-362.el9")
    assert reporting.environment_report()["system"]["kernel_too_old"] is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:p@ss/w@host/simple", "https://***@host/simple"),
        ("see https://host/a?token=1 and https://b", "see https://host/a?*** and https://b"),
        ("api_key = abc, more", "api_key = *** more"),
        ("ghp_0123456789abcdef01", "***"),
        ("xoxb-12345-67890-abcdef, AIzaSyA0123456789abcdefghij", "***, ***"),
        ("Bearer abc.def-ghi and Authorization: Basic dTpw", "Bearer *** and Authorization: Basic ***"),
        ("https://conda.anaconda.org/t/ab-1234/simple", "https://conda.anaconda.org/t/***/simple"),
        ("https://pypi.fury.io/TOKEN/me/", "https://pypi.fury.io/***/me/"),
        ('password = "two words" end', "password = *** end"),
        ("""{'api_key': 'it\\'s two', 'a': 1}""", "{'api_key': ***, 'a': 1}"),
        ('token="not closed, more', "token=***"),
        ("nothing secret in https://host/path", "nothing secret in https://host/path"),
    ],
)
def test_masked(text: str, expected: str) -> None:
    assert masked(text) == expected
