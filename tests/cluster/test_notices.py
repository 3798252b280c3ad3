"""Notices on a real Slurm: each event is delivered once, through a preemption, a requeue and a killed supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json, read_lines
from tests.node.webhook_server import Receiver

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario

Lease = Callable[[int], list[str]]

PROGRAM = """
import os, signal, sys, time
attempt = int(os.environ["HPCACCEL_ATTEMPT"])
print("starting", flush=True)
if attempt < 3:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    time.sleep(120)
if attempt == 3:
    raise ValueError("this one fails once")
"""


@pytest.mark.chaos
def test_each_event_arrives_once(
    cluster: Cluster, lease: Lease, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    receiver = Receiver()
    run = Scenario(cluster, tmp_path, nodes=lease(1))
    secret, program = tmp_path_factory.mktemp("home") / "webhook", tmp_path / "program.py"
    secret.write_text(receiver.url)
    secret.chmod(0o600)
    program.write_text(PROGRAM)
    run.submit(
        {
            "entrypoint": {"script": str(program)},
            "slurm": {"nodes": 1, "gpus_per_node": 1},
            "runtime": {"stop": "signals"},
            "notify": {"webhook_file": str(secret), "mail": "nobody", "events": ["start", "requeue", "failure", "end"]},
        }
    )
    assert "#SBATCH --mail-type=BEGIN,REQUEUE,FAIL,END\n" in run.dir.script.read_text()
    try:
        run.wait_for_word("starting")
        run.preempt()
        run.wait_for_word("starting", attempt=2)
        os.kill(int((read_json(run.dir.lease) or {})["pid"]), signal.SIGKILL)
        assert run.wait_until_over() == 0, run.story
        wait_until(lambda: receiver.events[-1:] == ["end:4"], "the end is told", timeout_seconds=60)
    finally:
        receiver.close()
    assert receiver.events == ["start:1", "requeue:1", "start:2", "failure:2", "failure:3", "end:4"]
    assert len(set(receiver.keys)) == len(receiver.keys)
    states = [line["state"] for line, _ in read_lines(run.dir.path / "notices.jsonl")]
    assert states == ["opened", *["intent", "trying", "delivered"] * 6] or states.count("delivered") == 6
    for path in run.dir.path.rglob("*"):
        assert not path.is_file() or b"verySecretToken" not in path.read_bytes(), path
