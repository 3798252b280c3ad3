"""jobs/notebook in a real kernel: launch ranks, submit a job, follow it in the cell, plot its curve."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.jobs import local
from tests.kernels import CellOutput, started_kernel

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "jobs" / "notebook" / "train.ipynb"
TIMEOUT_SECONDS = 240


def outputs_of(notebook: Any, source: str) -> list[Any]:
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source]
    return list(cell.outputs)


def text_of(outputs: list[Any]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def steps_in(shown: CellOutput) -> set[str]:
    texts = (data.get("text/plain", "") for data in shown.displayed)
    return {found[1] for text in texts if (found := re.search(r"step (\d+)", text))}


def test_example_notebook_trains_submits_follows_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shutil.copy(EXAMPLE, tmp_path / "train.ipynb")
    notebook = nbformat.read(tmp_path / "train.ipynb", as_version=4)
    for cell in notebook.cells:  # a free port: other tests may use the default
        cell.source = cell.source.replace("num_processes=2)", "num_processes=2, use_port=0)")
    client = NotebookClient(
        notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    launched = text_of(outputs_of(notebook, "notebook_launcher(train"))
    assert all(f"rank {rank} of 2: loss 0." in launched for rank in range(2))
    (shown,) = outputs_of(notebook, "hpcaccel.submit(")
    assert "<b>sine</b>" in shown.data["text/html"]
    assert str(tmp_path / "runs" / "sine") in shown.data["text/html"]
    followed, result = outputs_of(notebook, "run.result()")
    for part in ("completed", "step 160/160", "loss 0.", "attempt 1 started: 2 ranks", "attempt 1 completed"):
        assert part in followed.data["text/html"]
    assert 0 < float(result.data["text/plain"]) < 1
    (plot,) = outputs_of(notebook, "run.plot()")
    assert plot.data["image/png"]


def test_example_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


def test_code_of_the_page_is_that_of_the_example() -> None:
    blocks = re.findall(
        r"^```python\n(.*?)\n```", (ROOT / "docs" / "notebooks.md").read_text(), re.MULTILINE | re.DOTALL
    )
    sources = "\n".join(cell.source for cell in nbformat.read(EXAMPLE, as_version=4).cells)
    assert len(blocks) == 5
    assert [block for block in blocks if block not in sources] == []


def test_run_is_followed_live_and_an_interrupt_leaves_it_running(tmp_path: Path) -> None:
    with started_kernel(tmp_path, XDG_STATE_HOME=os.environ["XDG_STATE_HOME"]) as kernel:
        assert not kernel.run(
            "import hpcaccel\n"
            "def train():\n"
            "    import pathlib, time\n"
            "    for step in range(1, 1000):\n"
            "        hpcaccel.log({'loss': 1 / step}, step=step)\n"
            "        time.sleep(0.05)\n"
            "        if pathlib.Path('enough').exists():\n"
            "            return step\n"
            "run = hpcaccel.submit(train, cluster='local', spec={'name': 'toy', 'slurm': {'time': 5}})"
        ).error
        try:
            kernel.start("run.wait()")
            kernel.wait_until(lambda shown: len(steps_in(shown)) >= 3)
            kernel.interrupt()
            shown = kernel.finish()
            assert shown.updates >= 3
            assert shown.error.startswith("KeyboardInterrupt")
            assert "the run continues" in shown.displayed[-1]["text/html"]
            assert kernel.run("print(hpcaccel.find_run('toy').status().state)").stdout == "running\n"
            (tmp_path / "enough").touch()
            ended = kernel.run("run.result() > 3")
            assert ended.displayed[-1]["text/plain"] == "True", ended.traceback
            assert "completed" in ended.displayed[-2]["text/html"]
        finally:
            for file in (tmp_path / "runs").rglob("local.json"):
                local.kill(RunDir(file.parent))
