"""Golden files of rendered batch scripts. HPCACCEL_UPDATE_GOLDEN=1 rewrites them: review the diff afterwards."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.render import render
from hpcaccel.spec import ClusterProfile, JobSpec

from .conftest import golden, make_spec

HEADER = {"spec": "0123abcd", "commit": "89ab4567 (with uncommitted changes)", "hpcaccel": "0.1.0", "made": "by submit"}
RUN = RunDir("/scratch/ann/runs/gpt/20261120-153012-4f2a")
PYTHON = "/home/ann/.venv/bin/python"


def single() -> JobSpec:
    return make_spec(slurm={"partition": "gpu", "nodes": 2, "gpus_per_node": 2, "time": "1-00:00:00"})


def everything() -> JobSpec:
    return make_spec(
        slurm={
            "account": "phys",
            "partition": "gpu",
            "qos": "long",
            "reservation": "course",
            "nodes": "2-4",
            "ntasks_per_node": 4,
            "cpus_per_task": 8,
            "gpus_per_node": "a100:4",
            "mem": "200G",
            "time": "12:00:00",
            "constraint": "a100&ib",
            "exclude": "n[01-03]",
            "exclusive": True,
            "licenses": "matlab:2,ansys@lm",
            "switches": "1@10:00",
            "comment": 'Ann\'s 1st run # "b" \\ $(id) é',
            "mail_type": "END,FAIL",
            "mail_user": "ann@example.org",
            "extra": {"switches-timeout": "1 2", "spread-job": True},
        },
        environment={
            "modules": ["gcc/12", "cuda/12.4"],
            "conda": "/envs/my env",
            "setup": ["source $PROJECT/it's.sh", "ulimit -n 4096"],
            "env": {"PROJECT": "/p/a b", "QUOTE": 'it\'s "$HOME" `id`'},
            "secrets": ["WANDB_API_KEY", "HF_TOKEN"],
        },
        workdir="/home/ann/gpt 2",
        resilience={"requeue": False, "warning_seconds": 300},
    )


def test_single_job_matches_golden_file() -> None:
    golden("single.sbatch", render(single(), run_dir=RUN, python=PYTHON, header=HEADER, workdir="/home/ann"))


def test_array_matches_golden_file() -> None:
    text = render(single(), run_dir=RUN, python=PYTHON, header=HEADER, workdir="/home/ann", array_size=6)
    golden("array.sbatch", text)


def test_local_backend_matches_golden_file() -> None:
    spec = make_spec(environment={"venv": "/home/ann/.venv", "modules": ["cuda/12"], "secrets": ["HF_TOKEN"]})
    text = render(spec, run_dir=RUN, python=PYTHON, header=HEADER, workdir="/home/ann", backend="local")
    assert "SBATCH" not in text
    assert "scontrol" not in text
    golden("local.sbatch", text)


def test_all_settings_match_golden_file() -> None:
    profile = ClusterProfile(name="alps", exclude=["n07", "n[20-23]"], env={"NCCL_SOCKET_IFNAME": "hsn0"})
    text = render(everything(), run_dir=RUN, python=PYTHON, header=HEADER, profile=profile)
    golden("everything.sbatch", text)


def test_components_match_golden_file() -> None:
    """Options that Slurm does not inherit from the first component are repeated in each; secrets are not."""
    data = {
        "entrypoint": {"command": ["serve"]},
        "slurm": {"partition": "cpu", "nodes": 2, "exclude": "c9", "mem": "9G"},
    }
    env = {"entrypoint": {"command": ["play"]}, "slurm": {"qos": "long", "gpus_per_node": 1}}
    slurm = {"account": "phys", "partition": "gpu", "nodes": 4, "gpus_per_node": 8, "mail_type": "END", "time": 60}
    spec = make_spec(
        slurm=slurm, environment={"secrets": ["WANDB_API_KEY"]}, components={"data": data, "environment": env}
    )
    profile = ClusterProfile(name="alps", exclude=["n07"])
    text = render(spec, run_dir=RUN, python=PYTHON, header=HEADER, profile=profile, workdir="/home/ann/gpt")
    golden("components.sbatch", text)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "golden").glob("*.sbatch")), ids=lambda path: path.name
)
def test_golden_scripts_are_valid_bash_without_tracing(path: Path) -> None:
    result = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "set -x" not in path.read_text()
