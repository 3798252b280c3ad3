"""A rank exits at once, whatever its loaders' workers do: at its end, on an exception, on a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.ranks import make_run, outcome, run_ranks

ENDS = {"ok": 0, "raise": 1, "exit": 3, "interrupt": 1, "rank": 85, "group": 85}
REASONS = {"ok": "completed", "rank": "stop", "group": "stop"}
IN_MAKE_TEST = [("ok", "persistent", "torchrun"), ("raise", "persistent", "srun"), ("group", "persistent", "srun")]
ROWS = [(how, kind, launcher) for how in ENDS for kind in ("plain", "persistent") for launcher in ("torchrun", "srun")]


@pytest.mark.parametrize(
    ("how", "kind", "launcher"),
    [pytest.param(*row, marks=() if row in IN_MAKE_TEST else pytest.mark.chaos) for row in ROWS],
)
def test_loader_workers_do_not_delay_a_ranks_exit(tmp_path: Path, how: str, kind: str, launcher: str) -> None:
    """If the runtime did not end persistent workers, the rank would wait for them and be killed after 5 minutes."""
    run = make_run(tmp_path / "run")
    ended = run_ranks("leaving.py", [how, kind], run=run, launcher=launcher, blocked=True)
    code = ENDS[how]
    assert [code_of(one) for one in ended.codes] == [code, code], ended.outputs
    assert ("Traceback" in "".join(ended.outputs)) == (how in ("raise", "interrupt")), ended.outputs
    if how != "exit":
        said = outcome(run)
        assert (said and said["reason"]) == REASONS.get(how), ended.outputs


def code_of(code: int) -> int:
    """After a KeyboardInterrupt Python kills itself with SIGINT, while a forked rank exits with 1."""
    return 1 if code == -2 else code
