"""Tests of a run directory that is full, not writable or missing: the run waits, and no node is blamed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import make_folder
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.failures import Failure, cause
from hpcaccel.node.failures.disk_space import LEAST_BYTES, bytes_to_save, explained_by_room, shortage

from .conftest import ROOT, LocalRun, outcome
from .sweeping import IN_TURN, Sweep

Make = Callable[..., LocalRun]
Mounted = Callable[[str], Path]

SAVES = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
folder = os.environ["HPCACCEL_RUN_DIR"] + "/attempts/" + os.environ["HPCACCEL_ATTEMPT"]
path = os.environ["HPCACCEL_RUN_DIR"] + "/checkpoints/.step_00000003.1.tmp"
print("ready", flush=True)
while not os.path.exists(os.environ["GO"]): pass
os.mkdir(path)
os.rmdir(path)
{outcome(step=3, resume=False, reason="completed")}
"""


def patient(run: LocalRun, seconds: float) -> LocalRun:
    """Set how long the run waits for disk space, instead of ten minutes."""
    text = run.dir.node_program.read_text()
    patched = f"from hpcaccel.node.failures import disk_space\ndisk_space.PATIENCE_SECONDS = {seconds}\nmain()\n"
    run.dir.node_program.write_text(text.replace("main()\n", patched))
    return run


def says(run: LocalRun, text: str) -> None:
    end = time.monotonic() + 60
    while text not in run.log:
        assert time.monotonic() < end, run.log
        time.sleep(0.05)


@contextmanager
def immutable(folder: Path) -> Iterator[Callable[[], None]]:
    """Make ``folder`` immutable, for root too. Yields a function that makes it mutable again."""
    done = subprocess.run(["chattr", "+i", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot make a folder immutable here: {done.stderr.strip()}")

    def lift() -> None:
        subprocess.run(["chattr", "-i", str(folder)], check=True)

    try:
        yield lift
    finally:
        lift()


def test_full_file_system_fails_the_run_and_reports_the_needed_bytes(local_run: Make, mounted: Mounted) -> None:
    run = patient(local_run("print('ran')", within=mounted("size=3m"), preflight="quick"), 2)
    assert run.run() == 1
    assert run.ends == [("failed", "end")]
    end = run.lines("end")[0]
    assert (end["error_class"], end["nodes_blamed"], end["nodes_excluded"]) == ("disk_full", [], [])
    assert f"the run needs {LEAST_BYTES:,} bytes there, " in end["detail"]
    assert " are free; no change within " in end["detail"]
    assert not run.dir.rank_log(1, 0).exists()
    assert not run.dir.excluded_nodes.exists()


def test_run_starts_as_soon_as_there_is_disk_space(local_run: Make, mounted: Mounted) -> None:
    place = mounted("size=3m")
    run = local_run("print('ran')", within=place, preflight="quick")
    run.start()
    says(run, "Waiting for up to 10 minutes")
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    assert run.wait() == 0
    assert run.ends == [("completed", "end")]


def test_run_waiting_for_disk_space_can_be_paused(local_run: Make, mounted: Mounted) -> None:
    run = local_run("print('ran')", within=mounted("size=3m"), preflight="quick")
    run.start()
    says(run, "Waiting for up to 10 minutes")
    run.ask("pause")
    assert run.wait() == 85
    assert run.ends == [("stop", "pause")]


def test_unwritable_checkpoints_have_their_own_error_class(
    local_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("GO", str(go))
    run = local_run(SAVES, preflight="quick")
    run.start()
    run.wait_for("ready")
    with immutable(run.dir.checkpoints) as lift:
        go.touch()
        says(run, "Waiting for up to 10 minutes")
        first = run.lines("end")[0]
        assert (first["error_class"], first["decision"], first["nodes_blamed"]) == ("unwritable", "restart", [])
        assert "Operation not permitted" in first["detail"]
        lift()
        assert run.wait() == 0
    assert run.ends == [("failed", "restart"), ("completed", "end")]


def test_trial_without_disk_space_is_requeued(tmp_path: Path, mounted: Mounted) -> None:
    sweep = Sweep(
        mounted("size=3m"), "print('ran')", IN_TURN.format(count=1), resilience={"preflight": "quick"}
    )  # fmt: skip
    sweep.trial(0)
    text = sweep.dir.node_program.read_text()
    patched = "from hpcaccel.node.failures import disk_space\ndisk_space.PATIENCE_SECONDS = 2\nmain()\n"
    sweep.dir.node_program.write_text(text.replace("main()\n", patched))
    assert sweep.run() == 0
    told = sweep.heard[-1]
    assert (told["reason"], told["error_class"]) == ("failed", "disk")
    assert "disk_full: not enough space on the file system of " in told["detail"]
    assert sweep.ends(0) == [("stop", "requeue")]


def test_read_only_file_system_fails_the_run_after_a_wait(
    local_run: Make, mounted: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("GO", str(go))
    place = mounted("size=64m")
    run = patient(local_run(SAVES), 2)
    run.dir.checkpoints.rmdir()
    run.dir.checkpoints.symlink_to(place)
    run.start()
    run.wait_for("ready")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    go.touch()
    assert run.wait() == 1
    assert run.ends == [("failed", "restart"), ("failed", "end")]
    assert {line["error_class"] for line in run.lines("end")} == {"unwritable"}
    assert "Read-only file system" in run.lines("end")[1]["detail"]


def test_full_disk_is_detected_without_a_message_in_the_logs(local_run: Make, mounted: Mounted) -> None:
    program = """
import os, sys
if os.environ["HPCACCEL_ATTEMPT"] == "1":
    ballast = open(os.environ["HPCACCEL_RUN_DIR"] + "/checkpoints/ballast", "wb", buffering=0)
    try:
        while True:
            ballast.write(bytes(4096))
    except OSError:
        os._exit(1)
"""
    place = mounted("size=40m")
    run = patient(local_run(program), 60)
    run.dir.checkpoints.rmdir()
    run.dir.checkpoints.symlink_to(place)
    run.start()
    says(run, "Waiting for up to 1 minutes")
    assert run.lines("end")[0]["error_class"] == "disk_full"
    assert "the program exited with code 1; cannot write to" in run.lines("end")[0]["detail"]
    (place / "ballast").unlink()
    assert run.wait() == 0
    assert run.ends == [("failed", "restart"), ("completed", "end")]


def test_moved_run_directory_is_not_created_again(
    local_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    monkeypatch.setenv("GO", str(go))
    program = SAVES.replace("os.mkdir(path)", "from pathlib import Path\n"
                            "from hpcaccel.core.durable_files import make_folder\n"
                            "make_folder(Path(path))").replace("os.rmdir(path)", "")  # fmt: skip
    run = local_run(program)
    run.start()
    run.wait_for("ready")
    moved = tmp_path / "moved"
    shutil.move(run.dir.path, moved)
    go.touch()
    assert run.wait() == 2
    log = (moved / "slurm.log").read_text()
    assert f"the run directory no longer exists (was it moved or deleted?): {run.dir.path}" in log
    assert f"Move it back, then run: hpcaccel resume {run.dir.run_id}" in log
    assert "Traceback" not in log
    assert "the run directory no longer exists" in (moved / "attempts/1/0.log").read_text()
    assert not run.dir.path.exists()


def test_worker_of_a_deleted_sweep_creates_no_folder(tmp_path: Path) -> None:
    from hpcaccel.core.sweep_dir import SweepDir

    with pytest.raises(FileNotFoundError, match="the run directory no longer exists"):
        SweepDir(tmp_path / "gone").worker(0).prepare()
    assert not (tmp_path / "gone").exists()
    make_folder(tmp_path / "other" / "place")  # not in a run directory: created as usual


def test_bytes_to_save_are_summed_and_shortage_is_described(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    assert bytes_to_save(run, "no space") == 0
    said = "rank 0: No space left; it needs 20,000,000 bytes, 0 are free; rank 1: it needs 30,000,000 bytes, 0 are free"
    assert bytes_to_save(run, said) == 50_000_000
    found = shortage(run, needed=1 << 60)
    assert found is not None
    assert (found.cause, "the run needs 1,152,921,504,606,846,976 bytes" in found.text) == ("disk_full", True)
    found = shortage(run, to_save=1 << 60)
    assert found is not None
    assert str(run.checkpoints) in found.text
    assert shortage(run) is None


@pytest.mark.parametrize(
    ("free", "said"), [(1000, "; the run needs 16,777,216 bytes in {run}, and 1,000 are free"), (1 << 40, "")]
)
def test_bytes_are_reported_only_if_the_run_directory_lacks_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: str
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 50, 0, free))  # type: ignore[attr-defined]
    detail = "rank 0: OSError: [Errno 28] No space left on device: '/scratch/cache'"
    failure = explained_by_room(run, Failure(cause=cause("disk_full"), detail=detail))
    assert failure.detail == detail + said.format(run=run.checkpoints)
