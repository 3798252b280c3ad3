"""A service on a laptop: runs of clusters behind SSH, over connections of the laptop's own."""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import Client
from hpcaccel.errors import RunNotFound
from hpcaccel.service.behind_ssh.reading_answers import answer_readings
from hpcaccel.service.client_connection import ServiceError
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.submission.remote.protocol import ConnectionLost
from hpcaccel.submission.remote.remote_cluster import RemoteCluster
from hpcaccel.submission.runs.status import ACTIVE
from tests.service.conftest import SPEC, TOKEN, serving, until

RUN = {
    "run_id": "20261120-153012-4f2a", "name": "gpt", "path": "/there/gpt", "backend": "slurm", "cluster": "slurm",
    "job_id": "7", "created": 1000.0, "state": "running", "reason": "", "detail": "", "attempts": 1, "step": 5,
    "total_steps": 10, "steps_lost": 0, "first_loss": 2.0, "last_loss": 1.0,
    "checkpoint": None, "checkpoint_step": None,
}  # fmt: skip


class LoginNode:
    """Answers hpcaccel's commands, and records them."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.secrets: list[str] = []
        self.state = "running"
        self.programs = 0
        """Number of programs that were started to answer questions."""
        self.breaks = 0
        """Number of questions after which the connection breaks."""
        self.questions: list[dict[str, Any]] = []

    def converse(self, _: RemoteCluster, request: dict[str, Any], talk: Any) -> Any:
        if request["do"] == "readings":
            self.programs += 1
            return talk(Program(self))
        self.commands.append(request["args"])
        return talk(self)

    def to_the_end(self, *, secrets: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        words = self.commands[-1]
        if words[0] == "resume" and self.secrets:
            secrets({"frame": "secrets", "names": self.secrets}, b"")
        if words[-1] == "nowhere":
            return {"code": 2}, {"err": b"error: no run 'nowhere'\n"}
        run = {**RUN, "state": self.state}
        document = [run] if words[0] == "list" else run
        return {"code": 0}, {"out": json.dumps(document).encode() if "--json" in words else b"done\n"}


class Program:
    """``answer_readings`` in a thread, between pipes."""

    def __init__(self, node: LoginNode) -> None:
        self._node = node
        self._frames: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        reading, writing = os.pipe()
        self._input = os.fdopen(writing, "wb", buffering=0)
        self._frames.put(({"frame": "ready"}, b""))
        threading.Thread(target=self._run, args=(reading,), daemon=True).start()

    def _run(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as questions:
            answer_readings(questions, self._send)

    def _send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        self._frames.put(({"frame": frame, **values}, payload))

    def expect(self, frame: str) -> tuple[dict[str, Any], bytes]:
        head, payload = self._frames.get(timeout=60)
        assert head["frame"] == frame
        return head, payload

    def send(self, line: bytes) -> None:
        self._node.questions.append(json.loads(line))
        if self._node.breaks:
            self._node.breaks -= 1
            self._input.close()
            raise ConnectionLost("the connection was lost")
        self._input.write(line)

    def end_input(self) -> None:
        self._input.close()


@pytest.fixture
def login_node(monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    made = LoginNode()
    monkeypatch.setattr(RemoteCluster, "converse", lambda *args: made.converse(*args))
    return made


@pytest.fixture
def laptop(home: Path, tmp_path: Path, login_node: LoginNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    profiles = tmp_path / "config" / "hpcaccel" / "clusters"
    profiles.mkdir(parents=True)
    (profiles / "alps.yaml").write_text("name: alps\nhost: me@alps\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with serving(ServiceSettings(token=TOKEN, directory=home)) as settings, settings.client() as client:
        yield client


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
    changes = [words for words in login_node.commands if words[0] not in ("list", "status")]
    assert changes == [
        ["stop", "--requeue", "--", "gpt"],
        ["save", "--", "gpt"],
        ["cancel", "--", "gpt"],
        ["resume", "--", "gpt"],
    ]


def test_what_is_not_there_and_what_is_not_possible_is_said(laptop: Client, login_node: LoginNode) -> None:
    with pytest.raises(ServiceError, match="no run 'nowhere'"):
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
    b'{"run": "RUN", "what": "__class__", "options": {}}': "is not something that can be read",
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
