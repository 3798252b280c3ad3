"""Stop and resume of remote runs: each takes effect once, whatever is cut or killed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.cli.remote import forward
from hpcaccel.core.run_dir import RunDir
from hpcaccel.spec import load_profile
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.remote import RemoteCluster, remote_index
from hpcaccel.submission.remote.connection import FabricConnection
from hpcaccel.submission.remote.remote_cluster import RemoteRequest

from .login_node import Cutting, LoginNode, wait_for

SECRET = "planted-c0ffee-secret"


@pytest.fixture
def run(node: LoginNode) -> RunDir:
    """A paused run that was submitted with a secret."""
    node.project(lines=["environment: {secrets: [WANDB_API_KEY]}"])
    said = node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", "--json", WANDB_API_KEY=SECRET).stdout
    node.hpcaccel("stop", "toy")
    return RunDir(json.loads(said)["path"])


@pytest.fixture
def here(client: LoginNode, monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    """This process as the client, with the secret in its environment."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    return client


def ask(node: LoginNode, *args: str, **cuts: int) -> int:
    """Run a command from this process over a connection that may be cut. Returns the number of cuts."""
    profile = load_profile("alps")
    assert profile is not None
    cutting = Cutting(node, FabricConnection("alps", cluster="alps"), **cuts)
    there = RemoteCluster(profile, connection=cutting, sleep=lambda seconds: time.sleep(0.05), note=lambda text: None)
    try:
        assert forward._forward(there, args, effect="changes", secrets=frozenset(["WANDB_API_KEY"])) == 0
    finally:
        cutting.close()
    return cutting.cuts


def jobs(run: RunDir) -> list[str]:
    return read_record(run).job_ids


def delay(node: LoginNode, seconds: float) -> None:
    (Path(node.env["STAND_IN_QUEUE"]) / "delay").write_text(str(seconds))


@pytest.mark.usefixtures("here")
def test_command_over_a_cut_connection_takes_effect_once(node: LoginNode, run: RunDir) -> None:
    for known, cuts in ((["1", "2"], {"writes": 1}), (["1", "2", "3"], {"reads": 60})):
        assert ask(node, "resume", run.run_id, **cuts) == 1
        assert jobs(run) == known == [job[0] for job in node.jobs()]
        assert ask(node, "stop", run.run_id, **cuts) == 1
        assert len(list(run.control.glob("stop-*"))) == 1, "the earlier ones were honoured, this one stands"
    assert {job[3] for job in node.jobs()} == {SECRET}, "each job got it"
    assert not list((remote_index.state_folder() / "remote-commands").glob("*.json")), "all were answered"


def test_a_resume_killed_on_both_sides_continues_when_repeated(node: LoginNode, run: RunDir) -> None:
    delay(node, 0.5)
    assert "WANDB_API_KEY" in node.hpcaccel("resume", "toy", code=2).stderr, "it is not set here"
    at_work = Path(node.env["STAND_IN_QUEUE"], "at-work")
    at_work.unlink()
    process = node.start_command("resume", "toy", WANDB_API_KEY=SECRET)
    wait_for(at_work.exists, "sbatch at work")
    process.kill()
    process.communicate()
    node.kill_programs()
    assert "continues as job 2" in node.hpcaccel("resume", "toy").stdout
    assert jobs(run) == ["1", "2"] == [job[0] for job in node.jobs()]
    assert "has not ended" in node.hpcaccel("resume", "toy", code=2).stderr


def ask_and_be_killed(node: LoginNode, monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    to_the_end = RemoteRequest.to_the_end

    def killed(conversation: RemoteRequest, **hear: Any) -> Any:
        to_the_end(conversation, **hear)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRequest, "to_the_end", killed)
        with pytest.raises(KeyboardInterrupt):
            ask(node, *args)


@pytest.mark.usefixtures("here")
def test_a_requeue_whose_reply_could_not_be_stored_is_requested_once(
    node: LoginNode, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``answer`` was killed after it wrote the request. The run has honoured the request and runs again."""
    ask(node, "resume", "toy")
    queue = Path(node.env["STAND_IN_QUEUE"], "jobs")
    queue.write_text(queue.read_text().replace("PENDING", "RUNNING"))
    ask_and_be_killed(node, monkeypatch, "stop", "toy", "--requeue")
    for reply in (node.home / ".local/state/hpcaccel/replies").glob("*.json"):
        reply.unlink()
    (request,) = run.control.glob("stop-*.json")
    request.rename(request.with_name(f"honoured-{request.name}"))
    ask(node, "stop", "toy", "--requeue")
    assert list(run.control.glob("stop-*.json")) == []
    ask(node, "stop", "toy", "--requeue")
    assert len(list(run.control.glob("stop-*.json"))) == 1, "a new one, now that the first has been told of"


@pytest.mark.usefixtures("here")
def test_a_repeated_command_gets_the_lost_reply(
    node: LoginNode, run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ask_and_be_killed(node, monkeypatch, "resume", "toy")
    assert jobs(run) == ["1", "2"]
    ask(node, "resume", "toy")
    told = capfd.readouterr()
    assert "continues as job 2" in told.out
    assert "this command had already run" in told.err
    assert len(node.jobs()) == 2
    ask(node, "stop", "toy")
    ask(node, "resume", "toy")
    assert jobs(run) == ["1", "2", "3"], "a new one, now that the first has been told of"


def test_login_node_gets_only_variables_of_the_submission(node: LoginNode, run: RunDir) -> None:
    """A compromised login node has added another variable to the run's files."""
    spec = json.loads(run.spec.read_text())
    spec["spec"]["environment"]["secrets"] += ["AWS_SECRET_ACCESS_KEY"]
    run.spec.write_text(json.dumps(spec))
    both: dict[str, Any] = {"WANDB_API_KEY": SECRET, "AWS_SECRET_ACCESS_KEY": "planted-aws-secret"}
    refused = node.hpcaccel("resume", "toy", code=2, **both).stderr
    assert "alps requests variables of this machine (AWS_SECRET_ACCESS_KEY)" in refused
    assert "--secret NAME" in refused
    assert (jobs(run), len(node.jobs())) == (["1"], 1), "nothing was done"
    node.hpcaccel("resume", "toy", "--secret", "AWS_SECRET_ACCESS_KEY", **both)
    assert [job[3] for job in node.jobs()] == [SECRET, SECRET]


def test_run_submitted_elsewhere_gets_only_secrets_that_the_user_lists(node: LoginNode, run: RunDir) -> None:
    memory_file = node.client / ".local/state/hpcaccel/remote-runs.jsonl"
    line = json.loads(memory_file.read_text())
    assert line.pop("secrets") == ["WANDB_API_KEY"], "names, and no value"
    for remembered in ("", json.dumps(line) + "\n"):
        memory_file.write_text(remembered)
        refused = node.hpcaccel("resume", "alps:toy", code=2, WANDB_API_KEY=SECRET).stderr
        assert "(WANDB_API_KEY)" in refused
    assert "is not set on this machine" in node.hpcaccel("resume", "alps:toy", "--secret=WANDB_API_KEY", code=2).stderr
    assert jobs(run) == ["1"]
    node.hpcaccel("resume", "alps:toy", "--secret=WANDB_API_KEY", WANDB_API_KEY=SECRET)
    assert [job[3] for job in node.jobs()] == [SECRET, SECRET]


@pytest.mark.chaos
@pytest.mark.parametrize("moment", [0.15 * step for step in range(1, 13)])
@pytest.mark.parametrize("victim", ["here", "there", "both", "connection"])
def test_resume_killed_at_any_moment_submits_one_job(node: LoginNode, run: RunDir, moment: float, victim: str) -> None:
    delay(node, 0.2)
    process = node.start_command("resume", "toy", WANDB_API_KEY=SECRET)
    time.sleep(moment)
    node.strike(victim, process)
    process.communicate(timeout=120)
    if process.returncode != 0:
        node.hpcaccel("resume", "toy", WANDB_API_KEY=SECRET)
    assert jobs(run) == ["1", "2"] == [job[0] for job in node.jobs()]
