"""Run.plot: the curves of a run's metrics."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from hpcaccel.errors import UserError
from hpcaccel.submission.runs.run_handle import Run

pytest.importorskip("matplotlib")


@pytest.fixture
def resumed(hand_made) -> Run:
    """Preempted at step 6, resumed from step 4, and running."""
    hand_made.start(1)
    hand_made.progress(1)
    for step in range(1, 7):
        hand_made.metric(step, attempt=1, loss=10.0 - step, lr=0.1)
    hand_made.end(1, reason="time_limit", decision="requeue", last_step=6, checkpoint_step=4)
    hand_made.start(2)
    hand_made.progress(2, resumed_step=4)
    for step in range(5, 9):
        hand_made.metric(step, attempt=2, loss=10.5 - step)
    return Run(hand_made.run.path)


def curves(axes) -> list[list[tuple[float, float]]]:
    """The points of each line with points, except the marks of attempts."""
    found = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]
    return [points for points in found if points and points[0][0] != points[-1][0]]


def picture(figure: Any) -> bytes:
    """What a notebook shows."""
    return bytes(figure._repr_png_())


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_curve_has_each_attempt_and_repeated_steps_apart(resumed: Run) -> None:
    (axes,) = resumed.plot().axes
    assert axes.get_ylabel() == "loss"
    assert sorted(curves(axes)) == sorted(
        [
            [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)],
            [(4, 6.0), (5, 5.0), (6, 4.0)],  # repeated by attempt 2
            [(5, 5.5), (6, 4.5), (7, 3.5), (8, 2.5)],
        ]
    )
    colours = {line.get_color() for line in axes.lines if np.shape(line.get_xydata())[0] == 4}
    assert len(colours) == 1
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["repeated by a later attempt"]


def test_later_attempts_are_marked_where_they_resumed_and_why(resumed: Run) -> None:
    (axes,) = resumed.plot().axes
    assert texts(axes) == ["attempt 2: time limit"]
    (mark,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert mark.get_xydata().tolist() == [[4, 0], [4, 1]]


def test_each_metric_has_its_own_axes(resumed: Run) -> None:
    figure = resumed.plot(["lr", "loss"])
    assert [axes.get_ylabel() for axes in figure.axes] == ["lr", "loss"]
    assert sorted(curves(figure.axes[0])) == [[(step, 0.1) for step in (1, 2, 3, 4)], [(4, 0.1), (5, 0.1), (6, 0.1)]]
    assert resumed.run_id in figure.get_suptitle()


def test_without_a_loss_the_first_metric_is_drawn(hand_made) -> None:
    hand_made.start(1)
    hand_made.metric(1, attempt=1, reward=1.0, length=3.0)
    hand_made.metric(2, attempt=1, reward=float("nan"), length=4.0)
    (axes,) = Run(hand_made.run.path).plot().axes
    assert axes.get_ylabel() == "reward"


def test_metrics_of_any_program_are_drawn(hand_made) -> None:
    hand_made.start(1)
    hand_made.run.foreign_metrics(1).write_text('{"step": 3, "loss": 2.0}\n{"step": 4, "loss": 1.5}\n')
    (axes,) = Run(hand_made.run.path).plot().axes
    assert curves(axes) == [[(3, 2.0), (4, 1.5)]]


def test_figure_is_a_picture_in_a_notebook_without_pyplot(resumed: Run) -> None:
    assert picture(resumed.plot()).startswith(b"\x89PNG")


def test_names_are_not_read_as_mathematics(hand_made) -> None:
    hand_made.start(1)
    hand_made.metric(1, attempt=1, **{r"$\broken{": 1.0})
    figure = Run(hand_made.run.path).plot()
    assert picture(figure)
    assert figure.axes[0].get_ylabel() == r"\$\\broken{".replace("\\\\", "\\")


def test_no_metrics_yet_is_an_error_that_says_how_to_log(hand_made) -> None:
    hand_made.start(1)
    with pytest.raises(UserError, match=r"has logged no metrics yet: there is nothing to plot\. A run logs with accel"):
        Run(hand_made.run.path).plot()


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("los", r"has not logged the metric 'los' \(logged: loss, lr\)\. Did you mean 'loss'\?"),
        (["loss", "accuracy"], r"has not logged the metric 'accuracy' \(logged: loss, lr\)$"),
        ([], r"metric=\[\] names no metric"),
    ],
)
def test_unknown_metric_is_an_error_with_the_known_ones(resumed: Run, metric: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resumed.plot(metric)  # type: ignore[arg-type]


def test_without_matplotlib_the_error_names_the_extra(resumed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hpcaccel.submission.runs.run_plot", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"plot\(\) needs matplotlib, which is not installed for .*hpcaccel\[plot\]"):
        resumed.plot()


def test_handles_do_not_import_matplotlib() -> None:
    code = "import sys, hpcaccel.submission.runs.run_handle; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
