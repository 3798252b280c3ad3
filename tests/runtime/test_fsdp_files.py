"""Accelerate's files of sharded models and optimizers: written, read, merged, and exchanged with Accelerate itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.ranks import Ended, run_ranks

pytestmark = pytest.mark.torch


def check(ended: Ended) -> None:
    assert ended.codes == [0, 0], "\n".join(ended.outputs)


def test_sharded_model_and_optimizer_are_saved_and_loaded(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    check(run_ranks("fsdp_files.py", [str(tmp_path)]))


@pytest.mark.chaos
def test_files_of_accelerate_are_loaded_here_and_these_files_there(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    check(run_ranks("accelerate_fsdp.py", ["save", str(theirs)], fresh=True))
    check(run_ranks("fsdp_files.py", [str(ours), str(theirs)]))
    check(run_ranks("accelerate_fsdp.py", ["load", str(ours / "ours")], fresh=True))
