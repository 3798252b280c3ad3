"""A run in a notebook: as HTML, and as a display that follows it."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hpcaccel.core import notebook
from hpcaccel.submission.runs import base_handle, progress_display
from hpcaccel.submission.runs.base_handle import Handle
from hpcaccel.submission.runs.notebook_display import NotebookDisplay, run_html
from hpcaccel.submission.runs.progress_display import follow
from hpcaccel.submission.runs.run_handle import Run
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.submission.runs.watch import BackgroundQuery, Watcher

RUNNING = RunStatus(run_id="r", name="gpt", state="running")
COMPLETED = replace(RUNNING, state="completed", reason="completed")


class Cell:
    """Stands in for IPython's shell: records what is published."""

    def __init__(self) -> None:
        self.published: list[dict[str, Any]] = []
        self.display_pub = SimpleNamespace(publish=lambda **words: self.published.append(words))
        self.kernel = object()

    @property
    def texts(self) -> list[str]:
        return [one["data"]["text/html"] for one in self.published]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    """This process passes for a kernel."""
    cell = Cell()
    for module in (base_handle, progress_display):
        monkeypatch.setattr(module, "notebook_shell", lambda: cell)
    monkeypatch.setattr(progress_display, "LOOK_SECONDS", 0.01)
    return cell


def watcher(hand_made, status: RunStatus = RUNNING) -> Watcher:
    return Watcher(hand_made.run, BackgroundQuery(lambda: status, seconds=0.0))


@pytest.fixture
def training(hand_made):
    hand_made.start(1)
    hand_made.progress(1, total_steps=400)
    hand_made.metric(1, attempt=1, time=10.0, loss=5.5)
    hand_made.metric(101, attempt=1, time=20.0, loss=2.41349)
    return hand_made


def test_html_has_state_step_values_and_time_left(training) -> None:
    text = run_html(watcher(training).look())
    assert "<b>gpt</b> · attempt 1 · running" in text
    assert '<progress value="101" max="400"></progress> step 101/400 · loss 2.413 · 30s left' in text


def test_text_of_users_is_escaped(hand_made) -> None:
    hand_made.start(1)
    hand_made.metric(1, attempt=1, **{"<img src=x>": 1.0})
    status = replace(RUNNING, name="<script>alert(1)</script>", detail="a & <b>")
    text = run_html(watcher(hand_made, status).look(), lines=["<i>&"])
    for tag in ("<script", "<img", "<i>"):
        assert tag not in text
    for shown in ("&lt;script&gt;", "a &amp; &lt;b&gt;", "&lt;img src=x&gt; 1", "&lt;i&gt;&amp;"):
        assert shown in text


def test_display_is_published_once_and_then_updated_when_something_changes(training, cell: Cell) -> None:
    watching = watcher(training)
    with NotebookDisplay(cell) as shown:
        shown.show(watching.look())
        shown.show(watching.look())
        training.metric(102, attempt=1, time=20.1, loss=2.0)
        shown.show(watching.look())
    assert [one["update"] for one in cell.published] == [False, True]
    assert len({one["transient"]["display_id"] for one in cell.published}) == 1
    assert "attempt 1 started: 2 ranks on n1" in cell.texts[0]
    assert "loss 2 " in cell.texts[1]
    assert cell.published[1]["data"]["text/plain"].startswith("gpt · running  step 102/400  loss 2")


def test_interrupted_wait_says_that_the_run_continues(training, cell: Cell) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), NotebookDisplay(cell) as shown:
        follow(watcher(training), shown, sleep=interrupted)
    assert "not followed any longer; the run continues" in cell.texts[-1]


def test_wait_in_a_notebook_shows_the_progress(training, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    training.end(1, last_step=400)
    run = Run(training.run.path)
    assert run.wait().state == "completed"
    assert "completed" in cell.texts[-1]
    assert "attempt 1 completed at step 400" in cell.texts[-1]
    cell.published.clear()
    run.wait(progress=False)
    Handle._outcome(run)  # what the thread of as_future calls
    assert cell.published == []


def test_wait_outside_of_a_notebook_shows_the_progress_on_request(training, capsys) -> None:
    training.end(1, last_step=400)
    run = Run(training.run.path)
    run.wait()
    assert capsys.readouterr() == ("", "")
    run.wait(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "attempt 1 completed at step 400" in err


def test_wait_with_progress_keeps_its_deadline(training, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(training.run.path)
    monkeypatch.setattr(run, "_watcher", lambda: watcher(training))
    with pytest.raises(TimeoutError, match="has not ended in time; it continues"):
        run.wait(0.05)
    assert "the run continues" in cell.texts[-1]


def test_run_is_shown_with_its_job_and_directory(training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.end(1, last_step=400)
    run = Run(training.run.path)
    text = run._repr_html_()
    assert "<b>gpt</b> · attempt 1 · completed" in text
    assert f"job local-1 · {run.path}" in text


@pytest.mark.parametrize(("shell", "is_notebook"), [(SimpleNamespace(kernel=1), True), (SimpleNamespace(), False)])
def test_a_notebook_is_told_from_a_terminal(monkeypatch: pytest.MonkeyPatch, shell: object, is_notebook: bool) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert notebook.notebook_shell() is (shell if is_notebook else None)
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook.notebook_shell() is None
