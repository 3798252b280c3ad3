"""Logs, status, pull and wait for remote runs, over connections that break."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError
from hpcaccel.spec import load_profile
from hpcaccel.submission.remote import RemoteCluster, pulling
from hpcaccel.submission.remote.connection import FabricConnection
from hpcaccel.submission.remote.protocol import FrameReader, FrameWriter
from hpcaccel.submission.remote.remote_cluster import RemoteRequest

from .login_node import Cutting, LoginNode, wait_for


def submitted(node: LoginNode) -> RunDir:
    node.project()
    return RunDir(json.loads(node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", "--json").stdout)["path"])


def begin(run: RunDir) -> Path:
    run.attempt(1).mkdir(parents=True)
    return run.rank_log(1, 0)


def test_logs_continue_after_a_reconnect(node: LoginNode) -> None:
    run = submitted(node)
    log = begin(run)
    log.write_text("one\n")
    process = node.start_command("logs", "-f", "toy", "--rank", "0")
    assert process.stdout is not None
    assert process.stdout.readline() == "one\n"
    assert node.cut()
    with log.open("a") as file:
        file.write("two\n")
    assert process.stdout.readline() == "two\n", "and not the first once more"
    assert node.programs(), "it follows"
    process.terminate()
    process.communicate()
    deadline = time.monotonic() + 30
    while node.programs() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert node.programs() == [], "nothing of it is left there"


def test_watched_status_reconnects_and_ends_with_its_run(node: LoginNode) -> None:
    run = submitted(node)
    process = node.start_command("status", "toy", "--watch")
    assert process.stdout is not None
    assert "pending" in _page(process.stdout)
    assert node.cut()
    assert "pending" in _page(process.stdout), "also over another connection"
    node.hpcaccel("cancel", run.run_id)
    rest, _ = process.communicate(timeout=60)
    assert "cancelled" in rest.rpartition("\n\n")[2], rest
    assert process.returncode == 0
    wait_for(lambda: not node.programs(), "nothing of it is left there")


def _page(stream: IO[str]) -> str:
    """The lines up to the next empty line."""
    return "".join(iter(stream.readline, "\n"))


def cluster(node: LoginNode, **cuts: int) -> RemoteCluster:
    profile = load_profile("alps")
    assert profile is not None
    connection = Cutting(node, FabricConnection("alps", cluster="alps"), **cuts)
    return RemoteCluster(profile, connection=connection, sleep=lambda seconds: None, note=lambda text: None)


@pytest.fixture
def run_with_results(client: LoginNode) -> RunDir:
    """A run with a log, metrics and two checkpoints, of which the first is better."""
    run = submitted(client)
    begin(run).write_bytes(os.urandom(1 << 20))
    for step, loss in ((10, 0.5), (20, 0.7)):
        append_line(run.metrics, {"step": step, "attempt": 1, "time": float(step), "values": {"val_loss": loss}})
        place = run.checkpoints / f"step_{step:08d}"
        place.mkdir()
        (place / "shard").write_bytes(os.urandom(2 << 20))
        (place / "COMMITTED").write_text(json.dumps({"step": step}))
    return run


def test_an_interrupted_pull_continues(client: LoginNode, run_with_results: RunDir) -> None:
    run, there = run_with_results, cluster(client, reads=2_500_000)
    pulled = pulling.pull(there, run.run_id, None, runs_dir=client.client / "here", checkpoint="best")
    assert pulled.checkpoint == "step_00000010"
    assert pulled.path == client.client / "here" / "toy" / run.run_id
    shard = Path("checkpoints/step_00000010/shard")
    assert (pulled.path / shard).read_bytes() == (run.path / shard).read_bytes()
    assert (pulled.path / "attempts/1/0.log").read_bytes() == run.rank_log(1, 0).read_bytes()
    assert not (pulled.path / "checkpoints" / "step_00000020").exists()
    assert not list(pulled.path.rglob(f"*{pulling.PART}"))
    again = pulling.pull(there, run.run_id, None, runs_dir=client.client / "here", checkpoint="best")
    assert (again.files, again.unchanged) == (0, pulled.files)
    with pytest.raises(ClusterError, match="steps: 10, 20"):
        pulling.pull(there, run.run_id, None, runs_dir=client.client / "here", checkpoint="30")
    there.connection.close()


def test_an_interrupted_pull_leaves_no_checkpoint_that_looks_complete(
    client: LoginNode, run_with_results: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest, whose name is sorted before those of the shards, is fetched after them."""
    run, there = run_with_results, cluster(client, reads=2_500_000)
    monkeypatch.setattr("hpcaccel.submission.remote.remote_cluster.PAUSES_SECONDS", ())
    with pytest.raises(ClusterError, match="Run the same command again to pick up where it stopped"):
        pulling.pull(there, run.run_id, None, runs_dir=client.client / "here", checkpoint="last")
    place = client.client / "here" / "toy" / run.run_id / "checkpoints" / "step_00000020"
    assert [path.name for path in place.iterdir()] == [f"shard{pulling.PART}"]
    pulling.pull(there, run.run_id, None, runs_dir=client.client / "here", checkpoint="last")
    assert {path.name for path in place.iterdir()} == {"COMMITTED", "shard"}
    there.connection.close()


def test_partial_files_are_continued_and_damaged_ones_fetched_again(
    client: LoginNode, run_with_results: RunDir
) -> None:
    run, there = run_with_results, cluster(client)
    content = run.rank_log(1, 0).read_bytes()
    target = client.client / "out"
    place = target / "attempts" / "1"
    for half in (content[:700_000], bytes(700_000)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "0.log").unlink(missing_ok=True)
        (place / f"0.log{pulling.PART}").write_bytes(half)
        pulling.pull(there, run.run_id, target, runs_dir=target)
        assert (place / "0.log").read_bytes() == content
    there.connection.close()


def test_wait_exits_with_the_state_of_the_run(node: LoginNode) -> None:
    run = submitted(node)
    node.hpcaccel("cancel", "toy")
    ended = node.hpcaccel("wait", run.run_id, "--json", code=130)
    assert json.loads(ended.stdout)["state"] == "cancelled"


class _TakenOver:
    """A compromised login node that sends arbitrary replies."""

    name = "alps"

    def __init__(self, *answers: Sequence[tuple[str, bytes, dict[str, Any]]]) -> None:
        self._answers = iter(answers)

    def again(self, action: Any) -> Any:
        return action()

    def converse(self, _: Any, talk: Any) -> Any:
        stream = io.BytesIO()
        for frame, payload, values in next(self._answers):
            FrameWriter(stream).send(frame, payload, **values)
        return talk(RemoteRequest(None, FrameReader(io.BytesIO(stream.getvalue()).read)))  # type: ignore[arg-type]


END = ("exit", b"", {"code": 0})
OFFERED = ("file", b"", {"name": "record.json", "size": 2, "mtime_ns": 1, "link": None})


@pytest.mark.parametrize("name", ["..", "/tmp", "a/../../b", "", "."])
@pytest.mark.parametrize("key", ["name", "run_id"])
def test_invalid_run_names_from_the_login_node_are_refused(tmp_path: Path, key: str, name: str) -> None:
    about = {"name": "toy", "run_id": "20261121-100000-abcd", "checkpoint": None, key: name}
    there: Any = _TakenOver([("run", b"", about), OFFERED, END])
    with pytest.raises(ClusterError, match="not a valid directory name"):
        pulling.pull(there, "toy", None, runs_dir=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frame", ["data", "end"])
def test_files_that_were_not_requested_are_refused(tmp_path: Path, frame: str) -> None:
    about = {"name": "toy", "run_id": "20261121-100000-abcd", "checkpoint": None}
    planted = (frame, b"planted", {"name": "../planted", "crc": 0, "size": 7})
    there: Any = _TakenOver([("run", b"", about), OFFERED, END], [planted, END])
    with pytest.raises(ClusterError, match="which was not requested"):
        pulling.pull(there, "toy", tmp_path / "here", runs_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
