"""A service on a laptop: runs of clusters behind SSH, over connections of the laptop's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import Client
from hpcaccel.errors import RunNotFound
from hpcaccel.service.client_connection import ServiceError
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.submission.remote.remote_cluster import RemoteCluster
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

    def converse(self, _: RemoteCluster, request: dict[str, Any], talk: Any) -> Any:
        self.commands.append(request["args"])
        return talk(self)

    def to_the_end(self, *, secrets: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        words = self.commands[-1]
        if words[0] == "resume" and self.secrets:
            secrets({"frame": "secrets", "names": self.secrets}, b"")
        if words[-1] == "nowhere":
            return {"code": 2}, {"err": b"error: no run 'nowhere'\n"}
        document = [RUN] if words[0] == "list" else RUN
        return {"code": 0}, {"out": json.dumps(document).encode() if "--json" in words else b"done\n"}


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
    with pytest.raises(ServiceError, match="hpcaccel pull alps:gpt"):
        laptop.logs("alps:gpt")
    login_node.secrets = ["API_KEY"]
    with pytest.raises(ServiceError, match="needs API_KEY"):
        laptop.resume("alps:gpt")


def test_a_cluster_that_cannot_be_reached_delays_nothing(laptop: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise OSError("no route to alps")

    monkeypatch.setattr(RemoteCluster, "again", lost)
    assert laptop.runs() is not None
    until(lambda: "no route to alps" in {row["name"]: row["problem"] for row in laptop.clusters()}["alps"])
