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
    """The user's module, next to the spec."""
    import importlib

    project.write("work_of_mine.py", MODULE)
    monkeypatch.syspath_prepend(str(project.path))
    yield importlib.import_module("work_of_mine")
    del sys.modules["work_of_mine"]


def call(function: Callable[..., Any], *args: Any, spec: Any = SPEC, **kwargs: Any) -> Run:
    run = submit(function, *args, spec=spec, cluster="local", **kwargs)
    assert isinstance(run, Run)
    return run


def test_result_is_the_return_value_of_rank_zero(work: Any) -> None:
    run = call(work.add, 1, b=2)
    assert run.result(60) == 3
    assert run.job.results() == [3, 103]
    assert run.job.done()


def test_error_of_a_function_is_raised_with_its_traceback(work: Any) -> None:
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
def test_missing_result_is_explained_without_a_traceback(
    work: Any, name: str, args: tuple[Any, ...], sentence: str
) -> None:
    run = call(getattr(work, name), *args, spec=ALONE)
    with pytest.raises(RunFailed) as caught:
        run.result(timeout=120)
    assert sentence in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_function_that_exits_with_zero_has_no_result(work: Any) -> None:
    assert call(work.leave, 0, spec=ALONE).result(timeout=120) is None


def test_map_submits_one_array_with_a_task_per_item(work: Any) -> None:
    import hpcaccel

    array = hpcaccel.map(work.add, [1, 2], iter([10, 20, 30]), spec=ALONE, cluster="local")
    assert isinstance(array, RunArray)
    assert len(array) == 2
    assert array.results(timeout=200) == [11, 22]
    assert array.name == "call"
    with pytest.raises(UserError, match="got no items"):
        hpcaccel.map(work.add, [], spec=ALONE, cluster="local")


def test_run_can_be_awaited_and_used_as_a_future(work: Any) -> None:
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


def test_ranks_run_the_code_copy_without_heavy_imports_or_handlers(work: Any) -> None:
    run = call(work.surroundings, spec={**SPEC, "code": {"copy": True}})
    found = run.result(60)
    assert found == {"term": True, "loaded": [], "file": str(run.dir.code / "work_of_mine.py")}


def test_function_replaces_the_entrypoint_of_a_spec_file(project: Project, work: Any) -> None:
    run = call(work.add, 5, 6, spec="job.yaml")
    assert run.result(60) == 11
    assert run.name == "demo"


def test_function_defined_in_main_can_be_submitted(project: Project) -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def twice(x):\n    return 2 * x", space)
    assert call(space["twice"], 21).result(60) == 42


def test_grid_of_a_function_returns_one_result_per_task(work: Any) -> None:
    array = submit(work.add, 1, 2, spec=SPEC, cluster="local", grid=["runtime.seed=1,2"])
    assert isinstance(array, RunArray)
    assert array.results(90) == [3, 3]


def test_temporary_result_of_a_killed_attempt_is_ignored(work: Any, project: Project) -> None:
    # an attempt killed while writing leaves its temporary file; the next attempt has the same job id
    torn = "cd runs/call/*/submitit && touch ${HPCACCEL_LOCAL_JOB}_0_result.pkl.save_tmp; cd -"
    spec = {**SPEC, "environment": {"python": sys.executable, "setup": [f"cd {project.path} && {torn}"]}}
    run = call(work.add, 1, 2, spec=spec)
    assert run.result(60) == 3


def test_unpicklable_argument_is_refused_before_anything_is_created(project: Project) -> None:
    with pytest.raises(UserError, match="cannot pickle"):
        call(print, threading.Lock())
    assert project.left() == []


def test_result_of_a_cancelled_run_raises_run_failed(project: Project, work: Any) -> None:
    run = project.queue()
    assert isinstance(run, Run)
    run.cancel()
    with pytest.raises(RunFailed, match="is cancelled"):
        run.result(60)


def test_pickle_of_a_script_run_holds_a_placeholder(project: Project) -> None:
    run = project.queue()
    assert isinstance(run, Run)
    stub: Any = run.job.task(0).submission().function
    assert Path(stub.run_directory) == run.path
    with pytest.raises(HpcaccelError, match="is a placeholder"):
        stub()


def test_submit_keeps_the_signal_handlers_of_this_process(work: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)]
    call(work.add, 1, 2)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)] == before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
