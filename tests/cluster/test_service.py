"""`hpcaccel serve` on a real Slurm: a service killed during a submit, and the same request repeated, give one job."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpcaccel import Client
from hpcaccel.errors import HpcaccelError
from hpcaccel.submission import all_runs

from .dev_cluster import wait_until
from .test_killed_submits import Place
from .test_killed_submits import place as place

KEY = "the-same-request"


class Served:
    """``hpcaccel serve --socket``, as a process that can be killed."""

    def __init__(self, place: Place) -> None:
        self.socket = Path(place.path / "serve.sock")
        words = [sys.executable, "-m", "hpcaccel", "serve", "--socket", str(self.socket), "--no-browser"]
        self.process = subprocess.Popen(words, cwd=place.path, env=place.env, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("http://localhost:8000/")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


def submit(socket: Path, spec: str) -> str:
    """The id of the submitted run; empty if the service did not answer."""
    with Client(socket=socket) as client:
        try:
            return client.submit(spec, cluster="slurm", idempotency_key=KEY).run_id
        except HpcaccelError:
            return ""


@pytest.mark.chaos
@pytest.mark.parametrize("moment", [0.05, 0.2, 0.4, 0.6, 0.9, 1.3])
def test_a_service_killed_during_a_submit_submits_once(place: Place, moment: float) -> None:
    place.slow_sbatch(before=0.3, behind=0.3)
    spec = (place.path / "job.yaml").read_text()
    first = Served(place)
    asking = threading.Thread(target=submit, args=(first.socket, spec))
    asking.start()
    time.sleep(moment)
    first.kill()
    asking.join(timeout=60)
    again = Served(place)  # the socket of the killed one is replaced
    try:
        wait_until(lambda: submit(again.socket, spec), "the repeated request is answered")
        run_id = submit(again.socket, spec)
        assert len(place.jobs()) == 1
        assert [run.run_id for run in all_runs()] == [run_id]
        with Client(socket=again.socket) as client:
            assert client.run(run_id).state == "pending"
            client.cancel(run_id)
        wait_until(lambda: not place.jobs(), "cancelled")
    finally:
        again.kill()
