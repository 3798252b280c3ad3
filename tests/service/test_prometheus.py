"""``/metrics``: values of active runs in Prometheus' text format."""

from __future__ import annotations

import re
from pathlib import Path

from hpcaccel.service.prometheus import prometheus_text
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.run_overview import RunRow, overview
from tests.view.conftest import HandMade

LABEL = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
LINE = re.compile(rf"# (?:HELP|TYPE) hpcaccel_\w+ .+|hpcaccel_\w+\{{{LABEL}(?:,{LABEL})*\}} -?[0-9.e+-]+")


def row(folder: Path, name: str, state: str) -> RunRow:
    made = HandMade(folder / "runs" / "gpt" / f"20261120-153012-{len(name):04x}", name=name)
    made.start(1)
    made.progress(1)
    for step in (1, 2, 3):
        made.metric(step, attempt=1, loss=4.0 - step / 4)
    status = RunStatus(run_id=made.run.run_id, name=name, state=state, attempts=1)  # type: ignore[arg-type]
    return RunRow.of(overview(made.run, status))


def test_values_of_active_runs_have_labels_and_help(tmp_path: Path) -> None:
    odd = 'odd "name"\\with\nlines'
    rows = [row(tmp_path, odd, "running"), row(tmp_path, "done", "completed")]
    text = prometheus_text(rows)
    lines = text.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert 'hpcaccel_runs{state="completed"} 1' in lines
    assert 'hpcaccel_runs{state="running"} 1' in lines
    labels = f'{{run_id="{rows[0].run_id}",name="odd \\"name\\"\\\\with\\nlines",cluster="local"}}'
    assert f"hpcaccel_run_step{labels} 3" in lines
    assert f"hpcaccel_run_loss{labels} 3.25" in lines
    assert rows[1].run_id not in text, "ended runs have no values"
