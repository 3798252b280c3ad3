"""A check that the tests of several trainers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcaccel.core.durable_files import read_json
from tests.runtime.ranks import Ended, make_run, metrics, outcome, request_stop


def check_exact_resume(
    train: Callable[..., Ended], tmp_path: Path, options: Sequence[str], *, kill: int
) -> dict[int, float]:
    """Stop a training by a SIGTERM to rank 1 in step ``kill``, resume it, and compare all losses with those of an
    undisturbed training. Returns the losses by step."""
    undisturbed = make_run(tmp_path / "undisturbed")
    ended = train(undisturbed, *options)
    assert ended.codes == [0, 0], ended.outputs
    run = make_run(tmp_path / "run")
    request_stop(run)
    stopped = train(run, *options, "--kill", f"1:{kill}")
    assert stopped.codes == [85, 85], stopped.outputs
    assert kill <= (outcome(run) or {})["step"] <= kill + 2
    resumed = train(run, *options, attempt=2)
    assert resumed.codes == [0, 0], resumed.outputs
    assert (read_json(run.progress(2)) or {})["resumed_step"] == (outcome(run) or {})["step"]
    assert metrics(run) == metrics(undisturbed)
    return metrics(undisturbed)
