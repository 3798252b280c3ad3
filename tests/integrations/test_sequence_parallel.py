"""DeepSpeed's sequence parallelism on two ranks on the CPU (gloo); `make trainers` installs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.ranks import run_ranks

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

PROGRAM = str(Path(__file__).parent / "programs" / "train_sequence_parallel.py")


@pytest.mark.parametrize("arguments", [["1"], ["3"], ["2", "apart"]])
def test_split_sequences_train_as_on_one_process(arguments: list[str]) -> None:
    ended = run_ranks(PROGRAM, arguments, size=2, preload=("deepspeed",))
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    found = ended.result()
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
    assert len(set(found["losses"])) == 4
    assert found["weights"] < 1e-5
