"""Many viewers, slow ones, and ones that vanish; a service that is killed and started again."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hpcaccel import Client
from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptStart, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.service.service_settings import ServiceSettings
from tests.service.conftest import SERVERS, SPEC, TOKEN, serving, until

SQUEUE = "45|PENDING|gpu|me||1|N/A|N/A|2026-11-20T09:00:00|1:00:00|Resources|demo"
VIEWERS = 200


@pytest.fixture
def squeue_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for sbatch and squeue; the latter counts its calls in this file."""
    calls = tmp_path / "calls"
    calls.touch()
    for name, text in (("sbatch", "echo 45"), ("squeue", f"echo >> {calls}; echo '{SQUEUE}'"), ("scancel", "true")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return calls


def test_200_viewers_at_once_ask_slurm_once(settings: ServiceSettings, client: Client, squeue_calls: Path) -> None:
    made = client.submit(SPEC.replace("demo", "queued"), cluster="slurm")
    until(lambda: client.run(made.run_id).detail)
    before = len(squeue_calls.read_text())
    start = threading.Barrier(VIEWERS)

    def view(_: int) -> tuple[str, int]:
        with settings.client() as viewer:
            start.wait(timeout=120)
            found = [viewer.run(made.run_id).state for _ in range(2)]
            return found[-1], viewer.runs(limit=5).total

    with ThreadPoolExecutor(VIEWERS) as pool:
        seen = set(pool.map(view, range(VIEWERS)))
    assert len(seen) == 1
    assert seen.pop()[0] == "pending"
    assert len(squeue_calls.read_text()) - before <= 1


@pytest.fixture
def running(home: Path) -> RunDir:
    """A run with an endless log, made by hand: its process is this one."""
    run = RunDir(home / "runs" / "long" / "20261120-153012-4f2a")
    if not run.path.exists():
        run.create()
        record = {
            "version": 1, "run_id": run.run_id, "name": "long", "backend": "slurm", "cluster": "slurm",
            "job_ids": ["45"], "created": time.time(),
        }  # fmt: skip
        run.record.write_text(json.dumps(record))
        run.attempt(1).mkdir(parents=True)
        start = AttemptStart(attempt=1, time=time.time(), job_id="45", nodes=["n1"], ranks=1)
        append_line(run.ledger, to_dict(start))
    run.rank_log(1, 0).write_bytes(b"".join(b"line %07d\n" % number for number in range(600_000)))  # 7.8 MB
    return run


def stream(settings: ServiceSettings, run: RunDir) -> socket.socket:
    """Ask for the log as it grows, and read nothing but the first byte."""
    connection = socket.create_connection(("127.0.0.1", settings.port), timeout=60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    path = f"/api/v1/runs/{run.run_id}/logs/1/0.log/stream"
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert connection.recv(1) == b"H"
    return connection


def memory() -> int:
    """Resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_slow_clients_hold_no_memory_and_vanished_ones_are_forgotten(
    settings: ServiceSettings, client: Client, running: RunDir, squeue_calls: Path
) -> None:
    stream(settings, running).close()
    before = memory()
    slow = [stream(settings, running) for _ in range(40)]
    try:
        assert "1/0.log" in client.logs(running.run_id)
        assert len(SERVERS[settings.port].server_state.connections) >= len(slow)
        assert memory() - before < 100 << 20  # the logs that they have asked for have 312 MB
    finally:
        for connection in slow:
            connection.close()
    until(lambda: len(SERVERS[settings.port].server_state.connections) <= 2)


def test_a_log_is_followed_across_a_restart_of_the_service(home: Path) -> None:
    (home / "hold").touch()
    settings = ServiceSettings(token=TOKEN, directory=home)
    found: list[str] = []

    def follow(settings: ServiceSettings, run_id: str) -> None:
        with settings.client() as client:
            found.extend(client.follow(run_id, "1/0.log"))

    with serving(settings) as first, first.client() as client:
        made = client.submit(SPEC, cluster="local")
        until(lambda: "1/0.log" in client.logs(made.run_id))
        thread = threading.Thread(target=follow, args=(first, made.run_id))
        thread.start()
        until(lambda: "".join(found) == "begins\n")
    (home / "hold").unlink()
    with serving(replace(settings, port=first.port)) as second, second.client() as client:
        thread.join(timeout=120)
        assert client.run(made.run_id).state == "completed"
    assert "".join(found) == "begins\nends\n"


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    assert threading.active_count() < VIEWERS
