"""A service on a laptop: runs of clusters behind SSH, over connections of the laptop's own."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from hpcaccel import Client
from hpcaccel.core.profile_requests import RankProfile, profiles_folder, write_rank_profile
from hpcaccel.errors import RunNotFound
from hpcaccel.service.behind_ssh import remote_runs
from hpcaccel.service.behind_ssh.reading_answers import answer_readings
from hpcaccel.service.client_connection import ServiceError
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.submission.remote.remote_cluster import RemoteCluster
from hpcaccel.submission.runs.find import find_run
from hpcaccel.submission.runs.status import ACTIVE
from tests.service.conftest import SPEC, TOKEN, until
from tests.service.stand_in_login_node import RUN, LoginNode


def test_runs_of_all_clusters_are_in_one_list_and_can_be_steered(laptop: Client, login_node: LoginNode) -> None:
    here = laptop.submit(SPEC, cluster="local").run_id
    until(lambda: {row.run_id for row in laptop.runs().runs} >= {here, f"alps:{RUN['run_id']}"})
    (there,) = [row for row in laptop.runs(state="running", name="gpt").runs if row.cluster == "alps"]
    assert (there.state, there.step, there.last_loss) == ("running", 5, 1.0)
    assert laptop.run("alps:gpt").run_id == f"alps:{RUN['run_id']}"
    laptop.stop("alps:gpt", "requeue")
    laptop.save("alps:gpt")
    laptop.cancel("alps:gpt")
    assert laptop.resume("alps:gpt") == "7"
    laptop.profile("alps:gpt", 3, ranks=[0, 2])
    changes = [words for words in login_node.commands if words[0] not in ("list", "status")]
    assert changes == [
        ["stop", "--requeue", "--", "gpt"],
        ["save", "--", "gpt"],
        ["cancel", "--", "gpt"],
        ["resume", "--", "gpt"],
        ["profile", "--no-wait", "--steps=3", "--rank=0", "--rank=2", "--", "gpt"],
    ]


def test_sweeps_of_all_clusters_are_in_one_list_and_can_be_steered(laptop: Client, login_node: LoginNode) -> None:
    login_node.readings = {
        "sweeps": [{**RUN, "run_id": "20261121-000000-0001", "name": "tune"}],
        "sweep": {"run_id": "20261121-000000-0001", "name": "tune", "state": "running"},
        "trials": [{"trial": 1}],
        "best": "name: tune\n",
    }
    until(lambda: laptop.sweeps().total == 1)
    (row,) = laptop.sweeps().runs
    assert (row.run_id, row.name, row.cluster) == ("alps:20261121-000000-0001", "tune", "alps")
    assert laptop.sweeps(offset=1).runs == []
    assert laptop.sweep("alps:tune").run_id == row.run_id, "the page steers the sweep under this name"
    assert (laptop.trials("alps:tune"), laptop.best("alps:tune")) == ([{"trial": 1}], "name: tune\n")
    laptop.stop_sweep("alps:tune")
    laptop.cancel_sweep("alps:tune")
    laptop.resume_sweep("alps:tune", overrides=["sweep.max_trials=9"])
    sweep = row.run_id.partition(":")[2]
    assert [words for words in login_node.commands if words[0] != "list" and words[1] != "status"] == [
        ["sweep", "stop", "--", sweep],
        ["cancel", "--", sweep],
        ["sweep", "resume", "--", sweep, "sweep.max_trials=9"],
    ]


def test_an_action_that_is_repeated_with_its_key_is_one_request(laptop: Client, login_node: LoginNode) -> None:
    for key in ("first-0001", "first-0001", "other-0001"):
        laptop.cancel("alps:gpt", idempotency_key=key)
    ids = [one["id"] for one in login_node.requests if one["args"][0] == "cancel"]
    assert ids[0] == ids[1] != ids[2]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_secrets_go_along_only_if_they_went_along_before(
    laptop: Client, login_node: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "s3cret")
    login_node.secrets = ["API_KEY"]
    with pytest.raises(ServiceError, match="run `hpcaccel resume alps:gpt` in a shell in which they are set"):
        laptop.resume("alps:gpt")
    assert login_node.sent == []
    spec = f"{SPEC}environment: {{secrets: [API_KEY]}}\n"
    run_id = laptop.submit(spec, cluster="alps", idempotency_key="with-a-secret").run_id
    assert login_node.submissions[0]["env"] == {"API_KEY": "s3cret"}
    laptop.resume(run_id)
    assert login_node.sent == [{"API_KEY": "s3cret"}]


def test_nobody_waits_for_a_cluster_that_was_lost(laptop: Client, login_node: LoginNode) -> None:
    login_node.is_down = True
    until(lambda: laptop.runs() and "no route" in {row["name"]: row["problem"] for row in laptop.clusters()}["alps"])
    for read in (laptop.run, laptop.script, laptop.ledger):
        with pytest.raises(ServiceError, match="no route") as refused:
            read("alps:gpt")
        assert refused.value.status == 503
    assert login_node.programs == 0, "only the list is tried again, in the background"
    login_node.is_down = False
    laptop.cancel("alps:gpt")
    until(lambda: laptop.runs().total)
    assert laptop.run("alps:gpt").state == "running"


def test_what_is_not_there_and_what_is_not_possible_is_said(laptop: Client, login_node: LoginNode) -> None:
    with pytest.raises(RunNotFound, match="no run 'nowhere'"):
        laptop.run("alps:nowhere")
    with pytest.raises(RunNotFound, match="not a run on a cluster behind SSH"):
        laptop.run("other:gpt")
    login_node.secrets = ["API_KEY"]
    with pytest.raises(ServiceError, match="needs API_KEY"):
        laptop.resume("alps:gpt")


def test_a_cluster_that_cannot_be_reached_delays_nothing(laptop: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise OSError("no route to alps")

    monkeypatch.setattr(RemoteCluster, "again", lost)
    assert laptop.runs() is not None
    until(lambda: "no route to alps" in {row["name"]: row["problem"] for row in laptop.clusters()}["alps"])


def ended_run(client: Client, spec: str = SPEC) -> str:
    """The id of a run that has ended: the program of the test's login node finds it in the same index."""
    run_id = client.submit(spec, cluster="local").run_id
    until(lambda: client.run(run_id).state not in ACTIVE)
    return run_id


def test_all_readings_of_a_run_there_are_those_of_a_run_here(laptop: Client, login_node: LoginNode) -> None:
    here = ended_run(laptop)
    there = f"alps:{here}"
    for read in (
        laptop.script, laptop.spec, laptop.ledger, laptop.checkpoints, laptop.metric_names, laptop.metrics,
        laptop.merged_log, laptop.traceback, laptop.diff, laptop.logs,
    ):  # fmt: skip
        assert read(there) == read(here), read
    assert laptop.log(there, "1/0.log", -5) == laptop.log(here, "1/0.log", -5)
    login_node.state = "completed"
    assert "begins" in "".join(laptop.follow(there, "1/0.log"))
    assert login_node.programs == 1, "one program answers all"


def test_a_trace_there_is_downloaded_in_pieces(
    laptop: Client, on_laptop: ServiceSettings, login_node: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_runs, "MOST_BYTES", 1000)
    run = find_run(ended_run(laptop)).dir
    trace = profiles_folder(run, 1) / "step_3-rank0.json.gz"
    file = str(trace.relative_to(run.path))
    write_rank_profile(
        run, 1, RankProfile(request="1-a", rank=0, state="done", first_step=3, steps=2, file=file, bytes=2500)
    )
    trace.write_bytes(os.urandom(2500))
    there = f"alps:{run.run_id}"
    assert laptop.profiles(there) == laptop.profiles(run.run_id)
    path = f"{on_laptop.url}/api/v1/runs/{there}/profiles/1"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with urlopen(Request(f"{path}/{trace.name}", headers=headers), timeout=60) as answer:
        assert (answer.read(), answer.headers["content-type"]) == (trace.read_bytes(), "application/gzip")
    assert laptop.trace(run.run_id, f"1/{trace.name}") == trace.read_bytes()
    assert [one["options"]["offset"] for one in login_node.questions if one["what"] == "trace-part"] == [0, 1000, 2000]
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(f"{path}/spec.json", headers=headers), timeout=60)
    refused.value.close()
    assert refused.value.code == 404


def test_viewers_share_what_was_read(laptop: Client, login_node: LoginNode) -> None:
    run_id = ended_run(laptop)
    for _ in range(3):
        assert laptop.script(f"alps:{run_id}")
    assert len(login_node.questions) == 1


def test_a_question_is_asked_again_after_a_broken_connection(laptop: Client, login_node: LoginNode) -> None:
    run_id = ended_run(laptop)
    login_node.breaks = 1
    assert laptop.script(f"alps:{run_id}") == laptop.script(run_id)
    login_node.breaks = 2
    with pytest.raises(ServiceError, match="the connection was lost"):
        laptop.spec(f"alps:{run_id}")
    assert laptop.spec(f"alps:{run_id}") == laptop.spec(run_id)


def test_errors_of_readings_keep_their_status(laptop: Client, login_node: LoginNode) -> None:
    login_node.state = "completed"
    run_id = ended_run(laptop)
    with pytest.raises(RunNotFound, match="nowhere"):
        laptop.logs("alps:nowhere")
    with pytest.raises(RunNotFound, match=r"no log '9/9\.log'"):
        laptop.log(f"alps:{run_id}", "9/9.log")
    with pytest.raises(RunNotFound, match=r"no log '9/9\.log'"):
        list(laptop.follow(f"alps:{run_id}", "9/9.log"))
    with pytest.raises(ServiceError, match="is a run, not a sweep"):
        laptop.sweep(f"alps:{run_id}")


BAD_QUESTIONS = {
    b'{"run": "../x", "what": "spec", "options": {}}': "is not the name of a run",
    b'{"run": "RUN", "what": "__class__", "options": {}}': "is not a reading of a run",
    b'{"run": "RUN", "what": "metrics", "options": {"names": ["a"], "buckets": 9999999}}': "metrics: buckets",
    b'{"run": "RUN", "what": "log", "options": {"name": "../spec.yaml", "offset": 0, "limit": 9}}': "has no log",
    b'{"run": "RUN", "what": "spec", "options": {"self": 1}}': "spec: self",
    b"[]": "cannot read this",
    b"{": "cannot read this",
}


def test_the_login_node_checks_questions(laptop: Client) -> None:
    run_id = laptop.submit(SPEC, cluster="local").run_id
    answers = answered(b"".join(line.replace(b"RUN", run_id.encode()) + b"\n" for line in BAD_QUESTIONS))
    assert len(answers) == len(BAD_QUESTIONS)
    for answer, sentence in zip(answers, BAD_QUESTIONS.values(), strict=True):
        assert sentence in answer["error"]


def test_the_login_node_ends_at_a_line_that_is_too_long() -> None:
    assert answered(b" " * (1 << 20) + b"\n") == []


def answered(data: bytes) -> list[dict[str, Any]]:
    """The frames for the questions in ``data``."""
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        answer_readings(file, lambda frame, payload=b"", **values: found.append(values))
    return found
