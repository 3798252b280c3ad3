"""``schema``, ``validate``, ``render`` and ``init``."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

TRAIN = """\
name: gpt
entrypoint:
  script: train.py
  args: {lr: 3.0e-4}
slurm: {partition: gpu, nodes: 2, gpus_per_node: 2, time: "1-00:00:00"}
"""


@pytest.fixture
def job(shell):
    shell.write("train.py", "")
    return shell.write("job.yaml", TRAIN)


def test_validate_prints_name_and_size_of_the_job(shell, job):
    result = shell("validate", "job.yaml")
    assert (result.returncode, result.stdout) == (0, "job.yaml is valid: gpt, 2 nodes × 2 ranks\n")


def test_validate_applies_overrides(shell, job):
    result = shell("validate", "job.yaml", "nodes=1", "args.lr=1e-3", "--json")
    said = json.loads(result.stdout)
    assert said["valid"] is True
    assert said["spec"]["slurm"]["nodes"] in (1, "1")
    assert len(said["hash"]) == 64


def test_validate_json_lists_the_problems(shell, job):
    result = shell("validate", "job.yaml", "slurm.nodes=many", "slurm.time=soon", "--json")
    said = json.loads(result.stdout)
    assert result.returncode == 2
    assert said["valid"] is False
    assert len(said["problems"]) == 2


def test_schema_is_json_and_contains_the_sections(shell):
    schema = json.loads(shell("schema").stdout)
    assert {"entrypoint", "slurm", "resilience"} <= set(schema["properties"])


def test_render_prints_the_script_and_writes_no_files(shell, job):
    before = shell.files()
    result = shell("render", "job.yaml", "slurm.partition=debug")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("#!/bin/bash")
    assert "--partition=debug" in result.stdout
    assert "--nodes=2" in result.stdout
    assert shell.files() == before
    assert not (shell.folder.parent / "state").exists()


def test_rendered_script_is_valid_bash(shell, job):
    script = shell("render", "job.yaml").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def header(path):
    """Path of the schema that the editor header of a file names."""
    first = path.read_text().splitlines()[0]
    return path.parent / first.removeprefix("# yaml-language-server: $schema=")


@pytest.mark.parametrize("script", [None, "train.py", "src/my train.py"])
def test_init_writes_a_valid_spec(shell, script):
    if script is not None:
        shell.write(script, "")
    result = shell("init", *([script] if script else []))
    assert result.returncode == 0, result.stderr

    checked = shell("validate", "job.yaml")
    assert checked.returncode == 0, checked.stderr
    written = yaml.safe_load((shell.folder / "job.yaml").read_text())
    assert written["entrypoint"].get("script") == script


def test_init_names_an_editor_schema_that_exists_and_accepts_the_spec(shell):
    jsonschema = pytest.importorskip("jsonschema")
    shell("init")
    job = shell.folder / "job.yaml"
    schema = json.loads(header(job).read_text())

    jsonschema.validate(yaml.safe_load(job.read_text()), schema)
    assert schema == json.loads(shell("schema").stdout)


def test_init_finds_the_script_beside_the_file(shell):
    shell.write("sub/train.py", "")
    assert shell("init", "-o", "sub/job.yaml").returncode == 0
    written = yaml.safe_load((shell.folder / "sub" / "job.yaml").read_text())
    assert written["entrypoint"]["script"] == "train.py"
    assert shell("validate", "sub/job.yaml").returncode == 0


def test_init_overwrites_a_file_only_with_force(shell, refused):
    job = shell.write("job.yaml", "mine\n")
    assert "--force" in refused(shell("init"))
    assert job.read_text() == "mine\n"
    assert shell.files() == {"job.yaml"}

    assert shell("init", "--force").returncode == 0
    assert job.read_text() != "mine\n"


def test_init_refuses_a_missing_script(shell, refused):
    assert "nowhere.py" in refused(shell("init", "nowhere.py"))
    assert shell.files() == set()


def test_init_refuses_a_missing_output_folder(shell, refused):
    assert "nowhere" in refused(shell("init", "-o", "nowhere/job.yaml"))
    assert shell.files() == set()


PARTITIONS = """\
cpu*|up|8|64|256000|7-00:00:00|n/a|OFF|1|(null)
gpu|up|4|32|512000|12:00:00|n/a|REQUEUE|1|gpu:a100:4
old|down|9|16|64000|infinite|n/a|OFF|1|gpu:k80:2
"""

ACCOUNTS = """\
physics|chemistry|||normal
physics|physics|||normal
"""


@pytest.fixture
def slurm(shell):
    """A fake Slurm with three partitions and two accounts."""
    shell.program("sbatch", "exit 1")
    shell.program("sinfo", f"cat <<'END'\n{PARTITIONS}END")
    shell.program("sacctmgr", f"cat <<'END'\n{ACCOUNTS}END")


def test_init_takes_partition_account_and_limits_from_slurm(shell, slurm):
    shell.write("train.py", "")
    assert shell("init", "train.py").returncode == 0
    text = (shell.folder / "job.yaml").read_text()
    written = yaml.safe_load(text)

    assert written["slurm"] == {
        "partition": "gpu",  # the default one has no GPUs, the third is down
        "account": "physics",
        "nodes": 1,
        "gpus_per_node": 4,
        "cpus_per_task": 8,
        "time": "12:00:00",
    }
    assert "cpu, gpu (4 GPUs per node)" in text
    assert "your accounts: chemistry, physics" in text
    assert shell("validate", "job.yaml").returncode == 0


def test_init_on_a_cluster_without_gpus_sets_ntasks_per_node(shell, slurm):
    shell.program("sinfo", "echo 'batch*|up|4|32|512000|infinite|n/a|OFF|1|(null)'")
    shell.program("sacctmgr", "true")
    assert shell("init").returncode == 0
    written = yaml.safe_load((shell.folder / "job.yaml").read_text())
    assert written["slurm"]["partition"] == "batch"
    assert written["slurm"]["ntasks_per_node"] == 1
    assert "account" not in written["slurm"]
    assert shell("validate", "job.yaml").returncode == 0


def test_init_reports_unreachable_slurm_and_writes_no_partition(shell, slurm):
    shell.program("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    result = shell("init")
    assert result.returncode == 0
    assert "Unable to contact" in result.stderr
    text = (shell.folder / "job.yaml").read_text()
    assert "partition" not in yaml.safe_load(text)["slurm"]
    assert "without Slurm" not in text  # there is one
    assert "No available partition was known when this file was written" in text


JOBS = """\
slurm: {time: "10:00"}
jobs:
  train: {entrypoint: {command: [echo, train]}, slurm: {nodes: 2}, after: [prepare]}
  prepare: {entrypoint: {command: [echo, prepare]}}
"""


def test_file_with_several_jobs_is_validated_and_rendered_per_job(shell, refused):
    shell.write("jobs.yaml", JOBS)
    said = shell("validate", "jobs.yaml", "--cluster", "slurm")
    assert said.returncode == 0, said.stderr
    assert said.stdout.splitlines() == [
        "jobs.yaml is valid: 2 jobs",
        "  prepare, 1 node × 1 rank",
        "  train, 2 nodes × 1 rank, after afterok:prepare",
    ]
    said = json.loads(shell("validate", "jobs.yaml", "train.slurm.nodes=3", "--json", "--cluster", "slurm").stdout)
    assert [(job["name"], job["spec"]["slurm"]["nodes"]) for job in said["jobs"]] == [("prepare", "1"), ("train", "3")]
    script = shell("render", "jobs.yaml", "--cluster", "slurm").stdout
    first, second = script.split("### job train\n")
    assert first.startswith("### job prepare\n#!/bin/bash")
    assert "--nodes=2" in second
    unknown = shell("render", "jobs.yaml", "train.slurm.nodez=3", "--cluster", "slurm")
    assert "slurm.nodez is not a known key" in refused(unknown)
    shell.write("jobs.yaml", JOBS.replace("prepare: {entry", "prepare: {after: [train], entry"))
    assert "in a cycle" in refused(shell("validate", "jobs.yaml", "--cluster", "slurm"))
