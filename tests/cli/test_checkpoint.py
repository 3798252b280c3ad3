"""``hpcaccel checkpoint`` and ``submit --from``, with trainings that run on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

TRAIN = (Path(__file__).parent / "programs" / "train.py").read_text()

JOB = """\
name: trains
entrypoint: {script: train.py}
slurm: {ntasks_per_node: 1, time: "10:00"}
runtime: {seed: 1, deterministic: true}
checkpoint: {every_steps: 1, keep: 2}
environment: {env: {OMP_NUM_THREADS: "1"}}
"""


def ended(shell, *arguments, job="job.yaml"):
    """Submit and wait; return what ``--json`` prints."""
    result = shell("submit", job, "--cluster", "local", "--wait", "--json", *arguments)
    assert result.returncode == 0, (result.stdout, result.stderr, shell("logs").stdout)
    return json.loads(result.stdout)


def weights(shell, run):
    return re.search(r"^weights .*", shell("logs", run["run_id"]).stdout, re.M)[0]


def said(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.chaos
def test_checkpoints_are_listed_verified_branched_and_converted(shell, refused):
    shell.write("train.py", TRAIN)
    shell.write("job.yaml", JOB)
    run = ended(shell, f"args.aside={shell.folder / 'aside'}")
    whole = weights(shell, run)

    # list, pin, show, verify
    assert "now pinned" in said(shell("checkpoint", "pin", "trains@3"))
    listed = json.loads(said(shell("checkpoint", "list", run["run_id"], "--json")))
    assert [(one["step"], one["good"], one["pinned"]) for one in listed] == [(3, True, True), (4, True, False)]
    assert "models.0.weight" in said(shell("checkpoint", "show", "trains@3", "--tensors"))
    assert said(shell("checkpoint", "verify", "trains", "aside")).count("good") == 3

    # a checkpoint saved elsewhere is not deleted, and a run can start from it
    aside = shell.folder / "aside"
    assert [path.name for path in aside.iterdir()] == ["step_00000002"]
    branch = ended(shell, "--from", "aside", "name=branch")
    assert (
        f"resumed at step 2 from {aside / 'step_00000002'}, state-exact (no DataLoader was prepared"
        in shell("logs", branch["run_id"]).stdout
    )
    assert weights(shell, branch) == whole
    assert "there is no checkpoint of step 2" in refused(shell("submit", "job.yaml", "--from", "trains@2"))

    # export the weights, import them, and start a run from them
    out = json.loads(said(shell("checkpoint", "convert", "trains", "model", "--to", "safetensors", "--json")))
    assert out["files"] == [str(shell.folder / "model" / "model.safetensors")]
    said(shell("checkpoint", "convert", "model", "start", "--to", "hpcaccel"))
    assert "already exists" in refused(shell("checkpoint", "convert", "model", "start", "--to", "hpcaccel"))
    imported = ended(shell, "--from", "start", "name=imported")
    log = shell("logs", imported["run_id"]).stdout
    assert "resumed at step 0" in log
    assert "only weights, imported from safetensors" in log
    assert weights(shell, imported) != whole

    # damage
    data = shell.folder / branch["path"] / "checkpoints" / "step_00000004" / "rank_00000.bin"
    data.write_bytes(data.read_bytes()[:-1])
    answer = shell("checkpoint", "verify", "branch", "--json")
    assert answer.returncode == 1
    assert [report["good"] for report in json.loads(answer.stdout)] == [True, False]
    assert "damaged" in shell("checkpoint", "list", "branch").stdout
