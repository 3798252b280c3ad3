"""``hpcaccel plot``: writes the curves of a run to a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcaccel.cli.main import program
from tests.view.conftest import hand_made as hand_made

pytest.importorskip("matplotlib")


@pytest.fixture
def run(hand_made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with two metrics; the current directory is empty."""
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    hand_made.start(1)
    for step in (1, 2):
        hand_made.metric(step, attempt=1, loss=1.0 / step, lr=0.1)
    return str(hand_made.run.path)


def call(*words: str) -> Result:
    return CliRunner().invoke(program(), ["plot", *words])


@pytest.mark.parametrize(("out", "begins"), [("run.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_plot_is_written_and_its_path_printed(run: str, out: str, begins: bytes) -> None:
    result = call(run, *([] if out == "run.png" else ["-o", out]))
    assert result.exit_code == 0, result.output
    assert result.output == f"{Path(out).absolute()}\n"
    assert Path(out).read_bytes().startswith(begins)


def test_metrics_are_chosen_by_name(run: str) -> None:
    assert call(run, "--metric", "lr", "--metric", "loss", "-o", "both.svg").exit_code == 0
    assert call(run, "-o", "loss.svg").exit_code == 0
    assert [Path(name).read_text().count('id="axes_') for name in ("loss.svg", "both.svg")] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "los"], "has not logged the metric 'los' (logged: loss, lr). Did you mean 'loss'?"),
        (["-o", "run.txt"], "--out 'run.txt' does not have a supported suffix (allowed: .png, .svg, .pdf)"),
        (["-o", "gone/run.png"], "/gone does not exist"),
    ],
)
def test_wrong_arguments_are_refused(run: str, words: list[str], message: str) -> None:
    result = call(run, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert list(Path.cwd().iterdir()) == []
