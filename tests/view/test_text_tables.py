"""Tests of text tables: narrow terminals never cut names, states and metrics, and a pipe gets everything."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest

from hpcaccel.submission.runs.progress_display import display
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.submission.runs.watch import Snapshot
from hpcaccel.view.run_overview import Overview, overview
from hpcaccel.view.run_tables import print_runs, print_status
from hpcaccel.view.sweep_tables import print_trials
from hpcaccel.view.text_tables import COLUMNS_THERE, Column, console_for, print_facts, print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """The visible lines, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue()).splitlines()


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.fixture
def failed(hand_made) -> Overview:
    hand_made.start(1)
    hand_made.metric(120, attempt=1, loss=2.413)
    hand_made.end(1, reason="failed", error_class="rendezvous_failed", detail="rank 3 did not come")
    status = RunStatus(run_id=hand_made.run.run_id, name="gpt", state="failed", attempts=1)
    return replace(overview(hand_made.run, status), name="llama-large-pretraining", job_id="4711", total_steps=400)


def test_name_of_failed_run_is_not_cut_at_80_columns(failed, terminal):
    print_runs([failed, replace(failed, name="a", state="running", error_class="")], stream=terminal)
    head, first, second = terminal.lines()

    assert max(map(len, terminal.lines())) <= 80
    assert first.split() == [failed.run_id, "llama-large-pretraining", "4711", "failed", "120/400", "2.413"]
    assert second.split()[1:4] == ["a", "4711", "running"]
    assert head.split() == ["RUN", "NAME", "JOB", "STATE", "STEP", "LOSS"]


@pytest.mark.parametrize("columns", [20, 40, 60, 100, 140, 200])
def test_name_state_and_loss_are_not_cut_at_any_width(failed, terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_runs([failed], stream=terminal)
    row = terminal.lines()[1].split()
    assert row[:2] == [failed.run_id, "llama-large-pretraining"]
    assert "failed" in row
    assert "2.413" in row
    assert ("(rendezvous_failed)" in row) == (columns >= 100)
    assert ("1970-01-01" in row) == (columns >= 140)


def test_output_to_a_pipe_is_complete_without_trailing_spaces(failed):
    out = io.StringIO()
    print_runs([replace(failed, name="x" * 300), failed], stream=out)
    print_status(replace(failed, path="/scratch/" + "y" * 300, detail="word " * 100), stream=out)

    assert "x" * 300 + "  4711" in out.getvalue()
    assert "(rendezvous_failed)" in out.getvalue()
    assert f"directory   /scratch/{'y' * 300}\n" in out.getvalue()
    assert ("word " * 100).rstrip() + "\n" in out.getvalue()
    assert [line for line in out.getvalue().splitlines() if line != line.rstrip()] == []


def test_path_longer_than_the_terminal_is_not_cut(failed, terminal):
    print_status(replace(failed, path="/scratch/" + "y" * 300, detail="some words " * 10), stream=terminal)
    assert f"directory   /scratch/{'y' * 300}" in terminal.lines()
    state = next(place for place, line in enumerate(terminal.lines()) if line.startswith("state"))
    assert terminal.lines()[state + 1].startswith(" " * 12)
    assert max(len(line) for line in terminal.lines() if "scratch" not in line) <= 80


def test_trial_table_keeps_state_and_metrics_at_80_columns(terminal):
    params = ["args.learning_rate", "args.weight_decay", "args.optimizer.momentum"]
    row = {"trial": 12, "state": "complete", "validation/perplexity": 23.4567, "train/loss": 0.123456,
           **dict.fromkeys(params, 0.000123), "step": 1200, "seconds": 812.5, "gpu_seconds": 6500.0, "worker": 3,
           "attempts": 1}  # fmt: skip
    left_out = print_trials([row, {**row, "state": "running"}], params=params, stream=terminal)

    head, first, second = terminal.lines()
    assert max(map(len, terminal.lines())) <= 80
    assert head.split()[:4] == ["trial", "state", "validation/perplexity", "train/loss"]
    assert head.split()[4:] == ["learning_rate", "weight_decay"]
    assert first.split()[:4] == ["12", "complete", "23.46", "0.1235"]
    assert second.split()[1] == "running"
    assert left_out == ["args.optimizer.momentum", "step", "seconds", "gpu_seconds", "worker", "attempts"]


def test_parameters_with_equal_last_parts_keep_their_paths(terminal):
    params = ["args.encoder.depth", "args.decoder.depth", "args.step"]
    row = {"trial": 1, "state": "complete", "x" * 20: 1.0, **dict.fromkeys(params, 2), "attempts": 1}
    print_trials([row], params=params, stream=terminal)
    assert terminal.lines()[0].split()[3:] == ["args.encoder.depth", "args.decoder.depth"]


def test_columns_are_dropped_and_shortened_in_their_order(terminal):
    columns = (
        Column(title="NAME"),
        Column(title="FIRST", leaves=0),
        Column(title="WORDS", wraps=10),
        Column(title="SECOND", shortens=1, leaves=2, short_title="2ND"),
    )
    row: list[Any] = ["n" * 30, "f" * 30, "some words of a sentence", ("s" * 40, "s" * 4)]
    assert print_table(columns, [row], console=console_for(terminal)) == ["FIRST"]
    lines = terminal.lines()
    assert lines[0].split() == ["NAME", "WORDS", "2ND"]
    assert lines[1].split()[0] == "n" * 30
    assert " ".join(" ".join(line[32:].split()) for line in lines[1:]) == "some words of a sentence ssss"


def test_wide_characters_take_two_columns(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    print_table(
        (Column(title="NAME"), Column(title="STATE")),
        [["訓練", "done"], ["abcd", "done"]],
        console=console_for(terminal),
    )
    assert terminal.lines()[1:] == ["訓練  done", "abcd  done"]


def test_table_without_rows_has_its_header():
    out = io.StringIO()
    print_table((Column(title="A"), Column(title="B")), [], console=console_for(out))
    print_facts([], console=console_for(out))
    assert out.getvalue() == "A  B\n"


def test_table_for_a_terminal_over_ssh_has_its_width(failed, monkeypatch):
    monkeypatch.setenv(COLUMNS_THERE, "80")
    out = io.StringIO()
    print_runs([failed], stream=out)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert out.getvalue().splitlines()[0].split() == ["RUN", "NAME", "JOB", "STATE", "STEP", "LOSS"]


def test_live_display_cuts_no_value(terminal):
    status = RunStatus(run_id="r", name="gpt", state="running", attempts=1)
    values = {"loss": 2.4131, "tokens_per_second": 12_300.0, "validation/perplexity": 23.45}
    snapshot = Snapshot(
        status=status, attempts=[], requests=[], step=120, total_steps=400, values=values, seconds_left=80.0
    )
    with display(stream=terminal) as shown:
        shown.show(snapshot)
    text = "\n".join(terminal.lines())
    assert "step 120/400  loss 2.413" in text
    assert "…" not in text
