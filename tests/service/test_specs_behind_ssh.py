"""Specs for clusters behind SSH through a service on a laptop: checked here, rendered and planned there, sent once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel import Client
from hpcaccel.errors import UserError
from hpcaccel.service.client_connection import ServiceError, ServiceSpecError
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.submission.remote import remote_cluster
from hpcaccel.submission.remote.remote_index import remote_of
from tests.service.conftest import SPEC, TOKEN, serving
from tests.service.stand_in_login_node import LoginNode

SWEEP = f"""{SPEC}
sweep:
  metric: loss
  mode: min
  method: random
  max_trials: 4
  workers: 2
  parameters: {{args.lr: {{float: [0.1, 1.0]}}}}
"""
FACTS = """\
{version: 1, name: alps, probed_at: 1700000000, slurm_version: 23.02.0,
 partitions: [{name: gpu, default: true, max_time_minutes: 60, nodes: 4}]}
"""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_cluster, "PAUSES_SECONDS", ())


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    """The stored facts about the cluster; write them before the service loads a spec."""
    folder = tmp_path / "config" / "hpcaccel" / "clusters" / "alps.facts"
    folder.mkdir(parents=True)
    (folder / "facts.yaml").write_text(FACTS)
    return folder / "facts.yaml"


def test_a_submission_with_a_key_reaches_the_cluster_once(laptop: Client, login_node: LoginNode) -> None:
    options = {"cluster": "alps", "idempotency_key": "tuesday-0001", "overrides": ["slurm.nodes=2"]}
    first, again = (laptop.submit(SPEC, **options) for _ in range(2))
    assert (first.run_id, first.name, first.job_id, first.cluster) == ("alps:20261120-153012-0000", "demo", "7", "alps")
    assert (first.repeated, again.repeated, again.run_id) == (False, True, first.run_id)
    assert first.warnings == ["a note of the cluster"]
    assert [request["key"] for request in login_node.submissions] == ["tuesday-0001"] * 2
    document = login_node.submissions[0]["document"]
    assert document["slurm"]["nodes"] == "2"
    assert "workdir" not in document, "the job starts in the copy of its code"
    assert remote_of("20261120-153012-0000") is not None, "the command line knows the run, too"
    assert laptop.submit(SPEC, cluster="alps", idempotency_key="tuesday-0002").run_id != first.run_id


def test_names_of_runs_and_arrays_are_those_of_the_cluster(laptop: Client, login_node: LoginNode) -> None:
    options = {"grid": ["slurm.time=10,20"], "from_run": "alps:gpt@100", "after": ["afterany:alps:gpt", "alps:old"]}
    found = laptop.submit({"name": "values", "entrypoint": {"command": ["true"]}}, cluster="alps", **options)
    assert found.tasks == 2
    assert login_node.submissions[0]["options"] == [
        "--json", "--grid=slurm.time=10,20", "--from=gpt@100", "--after=afterany:gpt", "--after=old",
    ]  # fmt: skip


def test_a_service_killed_during_a_submission_goes_on_with_the_same_key(
    laptop: Client, login_node: LoginNode, home: Path
) -> None:
    login_node.is_cut = True
    with pytest.raises(ServiceError, match="the connection was lost") as lost:
        laptop.submit(SPEC, cluster="alps")
    assert lost.value.status == 503
    login_node.is_cut = False
    with serving(ServiceSettings(token=TOKEN, directory=home)) as settings, settings.client() as restarted:
        found = restarted.submit(SPEC, cluster="alps")
        assert found.repeated, "an earlier request has submitted it"
        first, second = (request["key"] for request in login_node.submissions)
        assert first == second
        assert len(login_node.runs) == 1
        restarted.submit(SPEC, cluster="alps")
    assert len(login_node.runs) == 2, "a request that was answered is over: the next one is another run"


def test_a_check_compares_with_the_facts_without_asking_the_cluster(
    laptop: Client, login_node: LoginNode, facts: Path
) -> None:
    assert laptop.check(SPEC, cluster="alps")["valid"]
    wrong = SPEC.replace("  nodes: 1\n", "  nodes: 1\n  partition: gpuu\n")
    with pytest.raises(ServiceSpecError, match="'gpuu'") as refused:
        laptop.check(wrong, cluster="alps")
    assert refused.value.details[0]["path"] == "slurm.partition"
    with pytest.raises(ServiceSpecError, match="'gpuu'"):
        laptop.submit(wrong, cluster="alps")
    with pytest.raises(ServiceSpecError, match="not set on alps"):
        laptop.check(SPEC.replace("name: demo", "name: ${env:RUN_NAME}"), cluster="alps")
    assert [request["do"] for request in login_node.requests if request["do"] != "command"] == ["environment"]


def test_variables_and_paths_are_those_of_the_cluster(laptop: Client, login_node: LoginNode) -> None:
    login_node.variables = {"SCRATCH": "/scratch/me"}
    spec = SPEC.replace("code: {copy: false}", "code: {copy: false}\nenvironment: {venv: '${env:SCRATCH}/venv'}")
    found = laptop.check(spec, cluster="alps")["spec"]
    assert (found["environment"]["venv"], found["workdir"]) == ("/scratch/me/venv", None)
    with pytest.raises(ServiceSpecError, match="Write a path on the cluster"):
        laptop.check(spec.replace("${env:SCRATCH}/venv", "./venv"), cluster="alps")


def test_scripts_and_starts_are_those_of_the_cluster(laptop: Client, login_node: LoginNode) -> None:
    assert laptop.render(SPEC, cluster="alps") == "#!/bin/bash\n"
    assert laptop.render(SWEEP, cluster="alps") == "#!/bin/bash\n"
    assert laptop.plan(SPEC, cluster="alps", partitions=["gpu", "cpu"], nodes=["1", "2"]) == []
    assert [request["command"] for request in login_node.looks] == [
        ["render"], ["render"], ["plan", "--json", "--partition=gpu,cpu", "--nodes=1,2"],
    ]  # fmt: skip
    assert {request["cluster"] for request in login_node.looks} == {"alps"}
    assert "sweep" not in login_node.looks[1]["document"], "of a sweep, its job"


@pytest.mark.parametrize(
    ("code", "stderr", "status", "sentence"),
    [
        (2, b"note: x\nerror: the account is closed\n", 400, "the account is closed"),
        (2, b"error: one\nerror: two\nhint: probe it\n", 422, "one\ntwo\nprobe it"),
        (1, b"error: sbatch exited with code 1: Socket timed out\n", 503, "on alps exited with code 1: sbatch"),
    ],
)
def test_errors_of_the_cluster_keep_their_kind(
    laptop: Client, login_node: LoginNode, code: int, stderr: bytes, status: int, sentence: str
) -> None:
    login_node.refusal = code, stderr
    for send in (laptop.submit, laptop.render):
        with pytest.raises((ServiceError, ServiceSpecError)) as refused:
            send(SPEC, cluster="alps")
        assert sentence in str(refused.value)
        assert getattr(refused.value, "status", 422) == status


def test_a_sweep_starts_there(laptop: Client, login_node: LoginNode) -> None:
    found = laptop.start_sweep(SWEEP, cluster="alps", idempotency_key="sweep-0001")
    assert (found.run_id, found.tasks) == ("alps:20261120-153012-0000", 3)
    request = login_node.submissions[0]
    assert (request["kind"], request["options"]) == ("sweep", ["--json"])
    assert request["document"]["sweep"]["max_trials"] == 4


def test_a_profile_that_was_added_later_is_found(laptop: Client, login_node: LoginNode, tmp_path: Path) -> None:
    laptop.runs()
    (tmp_path / "config" / "hpcaccel" / "clusters" / "late.yaml").write_text("name: late\nhost: me@late\n")
    assert laptop.submit(SPEC, cluster="late").run_id.startswith("late:")
    assert laptop.run("late:gpt").cluster == "late"
    with pytest.raises((UserError, ServiceError), match="nowhere"):
        laptop.submit(SPEC, cluster="nowhere")
