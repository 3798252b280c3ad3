"""Python functions as jobs, with real ranks on the local backend."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import HpcaccelError, RunFailed, UserError
from hpcaccel.submission import Run, RunArray
from hpcaccel.submission.submit.api import submit
from tests.submission.conftest import Project

SPEC: dict[str, Any] = {
    "name": "call",
    "slurm": {"ntasks_per_node": 2},
    "resilience": {"restart_in_place": 0, "requeue": False},
    "code": {"copy": False},
}

MODULE = (Path(__file__).parent / "programs" / "functions.py").read_text()


@pytest.fixture
def work(project: Project, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's module beside the spec."""
    import importlib

    project.write("work_of_mine.py", MODULE)
    monkeypatch.syspath_prepend(str(project.path))
    yield importlib.import_module("work_of_mine")
    del sys.modules["work_of_mine"]


def call(function: Callable[..., Any], *args: Any, spec: Any = SPEC, **kwargs: Any) -> Run:
    run = submit(function, *args, spec=spec, cluster="local", **kwargs)
    assert isinstance(run, Run)
    return run


def test_the_result_is_that_of_rank_zero(work: Any) -> None:
    run = call(work.add, 1, b=2)
    assert run.result(60) == 3
    assert run.job.results() == [3, 103]
    assert run.job.done()


def test_an_error_comes_back_with_its_traceback(work: Any) -> None:
    run = call(work.fail)
    with pytest.raises(RunFailed, match=r"is failed(.|\n)*in fail(.|\n)*ValueError: unlucky"):
        run.result(60)


ALONE: dict[str, Any] = {**SPEC, "slurm": {"ntasks_per_node": 1}}


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("leave", (3,), "is failed: the function called sys.exit(3). Return a value, or raise an exception"),
        (
            "lock",
            (),
            "is failed: the function returned an object of type list, which cannot be pickled: cannot pickle "
            "'_thread.lock' ",
        ),
    ],
)
def test_an_end_without_a_result_is_told_in_one_sentence(
    work: Any, name: str, args: tuple[Any, ...], sentence: str
) -> None:
    run = call(getattr(work, name), *args, spec=ALONE)
    with pytest.raises(RunFailed) as caught:
        run.result(timeout=120)
    assert sentence in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_function_that_leaves_with_zero_has_no_result(work: Any) -> None:
    assert call(work.leave, 0, spec=ALONE).result(timeout=120) is None


def test_map_is_one_array_with_a_task_for_each_item(work: Any) -> None:
    import hpcaccel

    array = hpcaccel.map(work.add, [1, 2], iter([10, 20, 30]), spec=ALONE, cluster="local")
    assert isinstance(array, RunArray)
    assert len(array) == 2
    assert array.results(timeout=200) == [11, 22]
    assert array.name == "call"
    with pytest.raises(UserError, match="got no items"):
        hpcaccel.map(work.add, [], spec=ALONE, cluster="local")


def test_a_run_is_a_future_and_can_be_awaited(work: Any) -> None:
    run = call(work.add, 1, 2, spec=ALONE)
    future = run.as_future()

    async def waited() -> Any:
        return await run

    assert asyncio.run(waited()) == 3
    assert future.result(timeout=60) == 3
    slow = call(time.sleep, 60, spec=ALONE)
    with pytest.raises(TimeoutError, match="has not ended within 0 s"):
        slow.result(timeout=0)
    slow.cancel()
    failed = call(work.fail, spec=ALONE).as_future()
    assert isinstance(failed.exception(timeout=120), RunFailed)


def test_the_ranks_run_the_copy_lightly_and_without_submitits_handlers(work: Any) -> None:
    run = call(work.surroundings, spec={**SPEC, "code": {"copy": True}})
    found = run.result(60)
    assert found == {"term": True, "loaded": [], "file": str(run.dir.code / "work_of_mine.py")}


def test_a_file_whose_entrypoint_the_function_replaces(project: Project, work: Any) -> None:
    run = call(work.add, 5, 6, spec="job.yaml")
    assert run.result(60) == 11
    assert run.name == "demo"


def test_a_function_without_a_module(project: Project) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def twice(x):\n    return 2 * x", space)
    assert call(space["twice"], 21).result(60) == 42


def test_one_result_a_task(work: Any) -> None:
    array = submit(work.add, 1, 2, spec=SPEC, cluster="local", grid=["runtime.seed=1,2"])
    assert isinstance(array, RunArray)
    assert array.results(90) == [3, 3]


def test_a_result_that_was_torn_by_a_kill_is_no_obstacle(work: Any, project: Project) -> None:
    # an attempt that was killed while it wrote leaves its temporary file; the next one has the same job id
    torn = "cd runs/call/*/submitit && touch ${HPCACCEL_LOCAL_JOB}_0_result.pkl.save_tmp; cd -"
    spec = {**SPEC, "environment": {"python": sys.executable, "setup": [f"cd {project.path} && {torn}"]}}
    run = call(work.add, 1, 2, spec=spec)
    assert run.result(60) == 3


def test_what_cannot_be_pickled_is_refused_before_anything_is_made(project: Project) -> None:
    with pytest.raises(UserError, match="cannot pickle"):
        call(print, threading.Lock())
    assert project.left() == []


def test_a_result_that_will_never_come(project: Project, work: Any) -> None:
    run = project.queue()
    assert isinstance(run, Run)
    run.cancel()
    with pytest.raises(RunFailed, match="is cancelled"):
        run.result(60)


def test_the_pickles_of_scripts_are_opened_by_nobody(project: Project) -> None:
    run = project.queue()
    assert isinstance(run, Run)
    stub: Any = run.job.task(0).submission().function
    assert Path(stub.run_directory) == run.path
    with pytest.raises(HpcaccelError, match="is a placeholder"):
        stub()


def test_handlers_of_this_process_stay(work: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)]
    call(work.add, 1, 2)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)] == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
