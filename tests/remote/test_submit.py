"""Submission to a remote cluster: exactly one job, whatever is cut or killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import HpcaccelError
from hpcaccel.spec import load_profile
from hpcaccel.submission.remote import RemoteCluster, remote_index
from hpcaccel.submission.remote.bundle import pack
from hpcaccel.submission.remote.connection import FabricConnection
from hpcaccel.submission.remote.delivery import BundleReceipt, hand_over
from hpcaccel.submission.remote.remote_cluster import RemoteRequest

from .login_node import Cutting, LoginNode

SECRET = "planted-c0ffee-secret"


def submit(node: LoginNode, **cuts: int) -> tuple[BundleReceipt, Cutting]:
    profile = load_profile("alps")
    assert profile is not None
    cutting = Cutting(node, FabricConnection("alps", cluster="alps"), **cuts)
    cluster = RemoteCluster(profile, connection=cutting, sleep=lambda seconds: time.sleep(0.05), note=lambda text: None)
    try:
        luggage = pack(cluster, str(node.client / "project" / "job.yaml"), [], is_sweep=False)
        handed = hand_over(cluster, luggage, ["--json"], runs_dir=None, dry_run=False, columns=80)
    finally:
        cutting.close()
    return handed, cutting


def runs(node: LoginNode) -> list[str]:
    folder = node.runs / "toy"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_submit_status_list_and_cancel_from_a_client_without_slurm(node: LoginNode) -> None:
    folder = node.project(lines=["code: {exclude: ['*.bin']}"], files={"weights.bin": b"1", "lib.py": b"old"}).parent
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=me", "-c", "user.email=me", "commit", "-qm", "."]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    (folder / "lib.py").write_text("not committed yet")
    said = json.loads(node.hpcaccel("submit", "project/job.yaml", "args.lr=1e-3", "--cluster", "alps", "--json").stdout)
    run = Path(said["path"])
    assert run.parent == node.runs / "toy"
    assert sorted(path.name for path in (run / "code").iterdir()) == ["job.yaml", "lib.py", "train.py"]
    assert (run / "code" / "lib.py").read_text() == "not committed yet"
    spec = json.loads((run / "spec.json").read_text())
    assert spec["spec"]["entrypoint"]["args"] == {"lr": 0.001}
    assert spec["launch"]["workdir"] == str(run / "code")
    record = json.loads((run / "record.json").read_text())
    assert record["submitted_from"].endswith(f":{node.client}")
    assert "pending" in node.hpcaccel("status", "toy").stdout
    assert said["run_id"] in node.hpcaccel("list", "--cluster", "alps").stdout
    node.hpcaccel("cancel", said["run_id"][:-2])
    assert [job[2] for job in node.jobs()] == ["CANCELLED"]
    refused = node.hpcaccel("cancel", f"alps:{said['run_id']}", code=2)
    assert "nothing to cancel" in refused.stderr


def test_program_of_a_component_is_uploaded(client: LoginNode) -> None:
    lines = ["components: {data: {entrypoint: {script: serve.py}, slurm: {partition: cpu}}}"]
    client.project(lines=lines, files={"serve.py": b"pass"})
    handed, _ = submit(client)
    assert handed.code == 0
    assert handed.run is not None
    run = client.runs / "toy" / handed.run["run_id"]
    (component,) = json.loads((run / "spec.json").read_text())["launch"]["components"]
    assert component["program"][1] == str(run / "code" / "serve.py")
    assert Path(component["program"][1]).read_text() == "pass"


@pytest.mark.parametrize(("direction", "count"), [("reads", 1), ("writes", 1), ("reads", 260)])
def test_submission_over_a_cut_connection_creates_one_run(client: LoginNode, direction: str, count: int) -> None:
    client.project()
    handed, cutting = submit(client, **{direction: count})
    assert handed.code == 0
    assert cutting.cuts == 1
    assert len(client.jobs()) == 1
    assert handed.run is not None
    assert runs(client) == [handed.run["run_id"]]
    assert remote_index.remote_of("toy") is not None


def test_code_is_sent_once_and_an_interrupted_transfer_continues(
    client: LoginNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    client.project(files={"weights.bin": os.urandom(8 << 20)})
    sent: list[int] = []
    send = RemoteRequest.send

    def counted(conversation: RemoteRequest, data: bytes) -> None:
        sent.append(len(data))
        send(conversation, data)

    monkeypatch.setattr(RemoteRequest, "send", counted)
    handed, cutting = submit(client, writes=6 << 20)
    assert (handed.code, cutting.cuts) == (0, 1)
    assert 8 << 20 < sum(sent) < 12 << 20, "what had arrived was not sent again"
    assert "code to alps" in capsys.readouterr().err, "a bar, on a terminal"
    sent.clear()
    submit(client)
    assert sent == []
    assert len(client.jobs()) == 2, "two submissions"


def test_a_killed_submission_continues_when_repeated(node: LoginNode) -> None:
    node.project()
    (Path(node.env["STAND_IN_QUEUE"]) / "delay").write_text("0.5")
    process = node.start_command("submit", "project/job.yaml", "--cluster", "alps")
    deadline = time.monotonic() + 60
    while not runs(node) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()  # the client ...
    process.communicate()
    node.kill_programs()  # ... and the program on the login node, while sbatch runs
    again = node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps")
    assert "already submitted, but the reply was lost" in again.stderr
    assert len(node.jobs()) == 1
    assert "pending" in node.hpcaccel("status", "toy").stdout
    node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps")
    assert len(node.jobs()) == 2, "a new one, now that the first has been told of"


def test_job_accepted_without_a_reply_is_adopted_by_the_next_submit(node: LoginNode) -> None:
    node.project()
    silent = Path(node.env["STAND_IN_QUEUE"]) / "silent"
    silent.touch()
    failed = node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", code=1)
    assert "Running the same command again continues with that job" in failed.stderr
    silent.unlink()
    again = json.loads(node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", "--json").stdout)
    assert [again["run_id"]] == runs(node)
    assert len(node.jobs()) == 1
    node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps")
    assert len(node.jobs()) == 2


def test_run_accepted_without_a_reply_is_found_by_status(node: LoginNode) -> None:
    node.project()
    (Path(node.env["STAND_IN_QUEUE"]) / "silent").touch()
    node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", code=1)
    assert "pending" in node.hpcaccel("status", "toy").stdout


@pytest.mark.chaos
@pytest.mark.parametrize("moment", [0.1 * step for step in range(1, 31)])
@pytest.mark.parametrize("victim", ["here", "there", "both", "connection"])
def test_submission_killed_at_any_moment_creates_one_job(node: LoginNode, moment: float, victim: str) -> None:
    node.project()
    (Path(node.env["STAND_IN_QUEUE"]) / "delay").write_text("0.2")
    process = node.start_command("submit", "project/job.yaml", "--cluster", "alps")
    time.sleep(moment)
    node.strike(victim, process)
    out, _ = process.communicate(timeout=120)
    if "submitted" not in out:
        node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps")
    assert len(node.jobs()) == 1
    assert len(runs(node)) == 1


def test_a_client_killed_before_showing_the_reply_finds_the_run_again(client: LoginNode) -> None:
    client.project()
    profile = load_profile("alps")
    assert profile is not None

    def killed(handed: object) -> None:
        raise KeyboardInterrupt

    with RemoteCluster(profile, note=lambda text: None) as cluster:
        luggage = pack(cluster, "project/job.yaml", [], is_sweep=False)
        options: dict[str, Any] = {"runs_dir": None, "dry_run": False, "columns": 80}
        with pytest.raises(KeyboardInterrupt):
            hand_over(cluster, luggage, [], show=killed, **options)
        assert hand_over(cluster, luggage, [], **options).repeated
    assert len(client.jobs()) == 1


def test_a_refused_submission_leaves_nothing_and_reports_the_reason(node: LoginNode) -> None:
    node.project(lines=["resilience: {chain: 0}"])
    here = node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", code=2)
    assert "job.yaml:4" in here.stderr, "found before anything is sent"
    node.project()
    there = node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", "--from", "no-such-run", code=2)
    assert "no-such-run" in there.stderr
    assert node.jobs() == []
    assert not list((node.client / ".local/state/hpcaccel/remote-submissions").glob("*.json"))


def test_a_full_disk_on_the_cluster_is_reported(client: LoginNode, mounted: Any) -> None:
    place = mounted("size=256k")
    client.project(files={"weights.bin": os.urandom(8 << 20)})
    profile = load_profile("alps")
    assert profile is not None
    with RemoteCluster(profile, note=lambda text: None) as cluster:
        luggage = pack(cluster, "project/job.yaml", [], is_sweep=False)
        with pytest.raises(HpcaccelError, match="the disk is full on the cluster"):
            hand_over(cluster, luggage, [], runs_dir=f"{place}/runs", dry_run=False, columns=80)
    assert client.jobs() == []
    assert list(place.rglob("*")) == [place / "runs", place / "runs" / ".code"], "nothing half is left"


def test_a_full_home_on_the_cluster_is_reported(client: LoginNode, mounted: Any) -> None:
    place = mounted("size=64k")
    client.project()
    with (client.home / ".profile").open("a") as profile:
        profile.write(f"export XDG_STATE_HOME={place}\n")
    _fill(place)
    handed, _ = submit(client)
    assert handed.code == 2
    assert next(line for line in handed.err.splitlines() if not line.startswith(b"note: ")).startswith(b"error: ")
    assert b"No space left on device" in handed.err
    assert (client.jobs(), runs(client)) == ([], [])


def _fill(place: Path) -> None:
    about = os.statvfs(place)
    with (place / "filled").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize)


def test_a_secret_reaches_the_job_and_nothing_else(node: LoginNode) -> None:
    node.project(lines=["environment: {secrets: [WANDB_API_KEY]}"])
    (Path(node.env["STAND_IN_QUEUE"]) / "delay").write_text("0.3")
    process = node.start_command("submit", "project/job.yaml", "--cluster", "alps", WANDB_API_KEY=SECRET)
    lines: set[bytes] = set()
    while process.poll() is None:
        lines.update(_command_lines())
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert [job[3] for job in node.jobs()] == [SECRET], "sbatch got it"
    assert any(b"answer" in line for line in lines), "the process list was looked at"
    assert not any(SECRET.encode() in line for line in lines)
    assert SECRET not in out + err
    places = [path for path in node.root.rglob("*") if path.is_file()]
    assert any(path.name == "sshd.log" for path in places)
    assert [path for path in places if SECRET.encode() in path.read_bytes()] == []
    for path in (node.runs / "toy").rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o007 == 0, f"{path} is for everybody"


def _command_lines() -> set[bytes]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found.add((entry / "cmdline").read_bytes())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found
