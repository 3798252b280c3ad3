from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.slurm.states import PartitionInfo
from hpcaccel.spec import load_spec, spec_from_values
from hpcaccel.submission.code.code_copy import plan_code
from hpcaccel.submission.entrypoint.entry import Entry
from hpcaccel.submission.entrypoint.script_lint import advice, advice_on_cluster
from hpcaccel.submission.submit.api import advice_afterwards, submit_prepared
from hpcaccel.submission.submit.prepare import prepare
from tests.slurm.fake_slurm import FakeSlurm
from tests.submission.conftest import Project

FOUR_LINES = "from hpcaccel import Accelerator\naccelerator = Accelerator()\nm = accelerator.prepare(m)\n"


def told(folder: Path, script: str, *, copy: bool = True, **runtime: Any) -> str:
    (folder / "train.py").write_text(script)
    (folder / "job.yaml").write_text(f"name: x\nentrypoint: {{script: train.py}}\nruntime: {runtime}\n")
    plan = plan_code(folder) if copy else None
    return " ".join(advice(load_spec(folder / "job.yaml"), Entry(folder / "train.py", folder), plan))


@pytest.mark.parametrize("line", ["for epoch in a.epochs(3): ...", "a.resume()", "a.steps(9)", "a.load_state()"])
def test_script_that_loads_a_checkpoint_gets_no_advice(tmp_path: Path, line: str) -> None:
    assert told(tmp_path, FOUR_LINES + line) == ""


def test_script_that_never_loads_a_checkpoint_gets_advice(tmp_path: Path) -> None:
    assert "train.py never loads a checkpoint" in told(tmp_path, FOUR_LINES)
    assert "train.py never loads a checkpoint" in told(tmp_path, FOUR_LINES, copy=False)


def test_checkpoint_loading_in_an_imported_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def run(accelerator):\n    accelerator.resume()\n")
    assert told(tmp_path, FOUR_LINES + "import loop") == ""


def test_script_without_hpcaccel_gets_advice_on_sigterm(tmp_path: Path) -> None:
    assert "to stop the ranks, hpcaccel sends SIGTERM" in told(tmp_path, "import torch\n")
    assert "Set runtime.stop to signals" in told(tmp_path, "import torch\n", stop="cooperative")
    assert told(tmp_path, "import torch\n", stop="signals") == ""


def test_script_that_only_logs_through_hpcaccel_does_not_notice_stops(tmp_path: Path) -> None:
    assert "sends SIGTERM" in told(tmp_path, "import hpcaccel\nhpcaccel.log({'loss': 1.0})\n")
    assert "sends SIGTERM" in told(tmp_path, "from hpcaccel import log\nlog({'loss': 1.0})\n")


def test_file_that_the_script_does_not_import_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(FOUR_LINES)
    assert "sends SIGTERM" in told(tmp_path, "import torch\n")


def test_unparsable_script_counts_as_not_using_hpcaccel(tmp_path: Path) -> None:
    assert "nor the files it imports from its folder use hpcaccel" in told(tmp_path, "this is not python\n")


@pytest.mark.parametrize(
    ("partition", "resilience", "told"),
    [
        ("cheap", {}, True),
        ("gpu,cheap", {}, True),
        (None, {}, False),  # the default partition
        ("cheap", {"chain": 5}, False),
        ("cheap", {"requeue": False}, False),
    ],
)
def test_partition_that_preempts_by_cancelling_gets_advice(
    tmp_path: Path, partition: str | None, resilience: dict[str, Any], told: bool
) -> None:
    slurm: Any = FakeSlurm(
        known_partitions=[
            PartitionInfo(name="gpu", default=True, preempt_mode="REQUEUE"),
            PartitionInfo(name="cheap", preempt_mode="CANCEL"),
        ]
    )
    values = {"name": "x", "entrypoint": {"command": ["true"]}, "resilience": resilience}
    if partition is not None:
        values["slurm"] = {"partition": partition}
    spec = spec_from_values(values, base=tmp_path)
    assert any("partition 'cheap' preempts" in sentence for sentence in advice_on_cluster(spec, slurm)) is told
    slurm.unreachable = "no answer"
    assert advice_on_cluster(spec, slurm) == ()


@pytest.mark.parametrize("grid", [None, ["args.lr=1,2"]])
def test_requeue_disabled_by_the_site_is_reported_if_requested(project: Project, grid: list[str] | None) -> None:
    told = []
    for project.slurm.may_requeue in (True, False):
        for overrides in (["resilience.requeue=true"], []):
            prepared = prepare("job.yaml", cluster="slurm", overrides=overrides, grid=grid, slurm=project.slurm)
            told.append(len(advice_afterwards(prepared, submit_prepared(prepared))))
    assert told == [0, 0, 1, 0]


@pytest.mark.parametrize(
    "script", ["import torch.nn as nn\nfrom hpcaccel import Accelerator\n", "from torch import nn\n"]
)
def test_missing_torch_is_reported_for_a_script_that_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    stop: dict[str, Any] = {"stop": "signals"}
    assert "needs torch" not in told(tmp_path, script, **stop)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "train.py needs torch, but the ranks would use hpcaccel's own Python" in told(tmp_path, script, **stop)
    assert "torch" not in told(tmp_path, "import numpy\n", **stop)
    spec = spec_from_values({"name": "x", "entrypoint": {"script": "train.py"}, "environment": {"venv": "/elsewhere"}})
    assert not any("needs torch" in one for one in advice(spec, Entry(tmp_path / "train.py", tmp_path), None))


def test_too_many_local_ranks_get_advice(project: Project) -> None:
    told = prepare("job.yaml", cluster="local", overrides=["ntasks_per_node=100000"]).advice
    assert any(
        "100,000 ranks, each a separate process, would start on this machine, which has" in sentence
        for sentence in told
    )
    assert not any("would start on this machine" in one for one in prepare("job.yaml", cluster="local").advice)
