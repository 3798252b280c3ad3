"""``serve --demo``: recorded runs and a recorded sweep in a temporary folder, to look at the page without a cluster.

``demo_runs.tar.xz`` was recorded by ``tests/data/record_demo.py``. Its times are shifted so that the recording ended
just now. One run was copied while it was running: here, a process that only waits stands for it, and ends with the
service.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from hpcaccel.checkpoint_files import MANIFEST, manifest
from hpcaccel.core.durable_files import write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.jobs.local import LocalProcess

__all__ = ["demo_runs"]

DAY = 86_400
TEXTS = (".json", ".jsonl", ".log", ".sbatch", ".txt", ".yaml")
_SECONDS = re.compile(r"(?<![\w.])1\d{9}(?:\.\d+)?(?![\w.])")
_CLOCK = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
_RUN_ID = re.compile(r"\b(\d{8}-\d{6})(-[0-9a-f]{4})\b")
_STAMP = "%Y%m%d-%H%M%S"


@contextmanager
def demo_runs() -> Iterator[Path]:
    """A folder of recorded runs. This process reads no other runs. The folder is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hpcaccel-demo-") as folder:
        place = Path(folder)
        os.environ.update(XDG_STATE_HOME=str(place / "state"), HPCACCEL_RUNS_DIR=str(place / "runs"))
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            _unpack(place / "runs", process.pid)
            yield place / "runs"
        finally:
            process.kill()
            process.communicate()


def _unpack(runs: Path, pid: int) -> None:
    """Write the recorded files below ``runs``, with their times shifted. Process ``pid`` stands for running jobs."""
    contents = _contents()
    shift = _Shift(json.loads(contents.pop("recorded.json"))["recorded"])
    for name, data in contents.items():
        target = runs / shift.text(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix in TEXTS or target.name == MANIFEST:
            data = shift.text(data.decode()).encode()
        if target.name == MANIFEST:
            data = manifest.seal(json.loads(data))  # its CRC is that of the recorded time
        target.write_bytes(data)
    host, begun = os.uname().nodename, process_start(pid) or 0
    for ledger in runs.glob("*/*/attempts.jsonl"):
        run = RunDir(ledger.parent)
        if '"end"' not in ledger.read_text().splitlines()[-1]:
            job_id = json.loads(run.record.read_text())["job_ids"][-1]
            write_json(run.local_process, asdict(LocalProcess(job_id=job_id, host=host, pid=pid, pid_start=begun)))


def _contents() -> dict[str, bytes]:
    """The recorded files by name."""
    found = {}
    packed = files("hpcaccel.service").joinpath("demo_runs.tar.xz").read_bytes()
    with tarfile.open(fileobj=BytesIO(packed), mode="r:xz") as recorded:
        for entry in recorded:
            if (content := recorded.extractfile(entry)) is not None:
                found[entry.name] = content.read()
    return found


class _Shift:
    """Moves moments of the recording, which ended at ``recorded``, in texts."""

    def __init__(self, recorded: float) -> None:
        self._recorded = recorded
        self._by = round(time.time() - recorded)

    def text(self, text: str) -> str:
        """``text`` with its seconds since 1970, ISO times and run ids of the recording shifted."""
        text = _SECONDS.sub(self._seconds, text)
        text = _CLOCK.sub(lambda found: self._clock(found[0], "%Y-%m-%dT%H:%M:%S"), text)
        return _RUN_ID.sub(lambda found: self._clock(found[1], _STAMP) + found[2], text)

    def _seconds(self, found: re.Match[str]) -> str:
        moment = float(found[0])
        if abs(moment - self._recorded) > DAY:
            return found[0]  # another number
        return f"{moment + self._by:.7f}".rstrip("0").rstrip(".")

    def _clock(self, text: str, form: str) -> str:
        moment = datetime.strptime(text, form) + timedelta(seconds=self._by)
        return moment.strftime(form)
