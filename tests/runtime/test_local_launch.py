"""debug_launcher and notebook_launcher: ranks started from inside a program."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from typing import Any

import pytest

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import forked_ranks, local_launch
from hpcaccel.runtime.local_launch import notebook_launcher

from .ranks import Ended, run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def ended() -> Ended:
    return run_ranks("launch.py", size=1, launcher="alone", fresh=True)  # it forks after it has used OpenMP


@pytest.fixture(scope="module")
def found(ended: Ended) -> dict[str, Any]:
    assert ended.codes == [0], ended.outputs
    return ended.result()


def test_debug_launcher_starts_ranks_on_the_cpu(found: dict[str, Any]) -> None:
    assert found["debug"] == [[rank, 2, "cpu", "no", 11.0, True] for rank in range(2)]


def test_launched_function_may_be_a_closure(found: dict[str, Any]) -> None:
    assert found["closure"] == [[rank, 3, "cpu", "no", 111.0, True] for rank in range(3)]


def test_rank_failure_is_raised_with_the_functions_traceback(found: dict[str, Any]) -> None:
    for case, rank in (("debug fails", 1), ("notebook fails", 0)):
        kind, text = found[case]
        assert kind == "RunFailed"
        assert text.startswith(f"rank {rank}")
        assert "launch.py" in text.splitlines()[2]  # the first frame is in the script
        assert f"ValueError: rank {rank} has had enough" in text
        assert "local_launch.py" not in text
    assert found["debug dies"] == ["RunFailed", found["debug dies"][1]]
    assert "exit code 7" in found["debug dies"][1]


def test_notebook_launcher_starts_ranks_as_torchrun_does(found: dict[str, Any]) -> None:
    assert found["notebook"] == [[rank, 2, "cpu", "bf16", 11.0, True] for rank in range(2)]


def test_single_rank_runs_in_the_calling_process(found: dict[str, Any]) -> None:
    assert found["alone"] == [[0, 1, "cpu", "bf16", 1.0, False]]


def test_notebook_launcher_refuses_wrong_use(found: dict[str, Any]) -> None:
    assert found["precision"] == [
        "RuntimeMisuse",
        "mixed_precision='fp17' is not a valid value (allowed: no, fp8, fp16, bf16)",
    ]
    assert found["node rank"][1] == "node_rank=1 must be at least 0 and less than num_nodes=1"
    assert found["none"][1] == "num_processes=0 must be an integer, at least 1"
    assert "create them only inside the function" in found["too late"][1]


def test_launchers_leave_the_environment_unchanged(found: dict[str, Any]) -> None:
    assert found["variables"] == []


def test_notebook_launcher_refuses_to_fork_after_gpu_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr(local_launch, "_refuse_group", lambda what: None)
    with pytest.raises(RuntimeMisuse, match=r"has already used a GPU.*Restart the notebook's kernel"):
        notebook_launcher(print, num_processes=2)


def test_notebook_launcher_warns_of_an_old_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.release", lambda: "4.18.0-553.el8")
    monkeypatch.setattr(local_launch, "_refuse_group", lambda what: None)
    monkeypatch.setattr(local_launch, "elastic_ranks", lambda *args, **options: None)
    notebook_launcher(print, num_processes=2)
    assert "Linux kernel 4.18.0-553.el8 is older than 5.5" in caplog.text


def _stays(pipe: int) -> None:
    said = f"{os.getpid()}\n"
    while True:
        try:
            os.write(pipe, said.encode())
            time.sleep(100)
        except KeyboardInterrupt:
            said = "interrupted\n"


def _start_a_rank(pipe: int) -> None:
    multiprocessing.get_context("fork").Process(target=forked_ranks.run_as_rank, args=(_stays, (pipe,), None)).start()
    time.sleep(100)


def test_rank_that_catches_interrupts_ends_after_its_parent_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_ranks, "PARENT_POLL_SECONDS", 0.05)
    monkeypatch.setattr(forked_ranks, "INTERRUPT_SECONDS", 0.3)
    read, write = os.pipe()
    parent = multiprocessing.get_context("fork").Process(target=_start_a_rank, args=(write,))
    parent.start()
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        assert select.select([pipe], [], [], 20)[0]
        rank = int(pipe.read(100))
        try:
            os.kill(rank, signal.SIGINT)
            assert select.select([pipe], [], [], 5)[0]
            assert pipe.read(100) == b"interrupted\n"
            assert not select.select([pipe], [], [], 0.6)[0], "the rank has ended before its parent"
            parent.kill()
            assert select.select([pipe], [], [], 10)[0], "the rank still runs"
            assert pipe.read(100) == b""  # its end of the pipe is closed
        finally:
            parent.kill()
            parent.join()
            if os.path.exists(f"/proc/{rank}"):
                os.kill(rank, signal.SIGKILL)
