"""Stop signals at every point of a training, on some or all ranks: all leave together and resume to the same weights.

All cases run in sequence in the same two processes, because a start takes longer than any case.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpcaccel.runtime.child_signals import SIGNALS
from tests.checkpoint.world import run_ranks
from tests.runtime.ranks import Ranks, make_run, outcome

STEPS = 12


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 64.0)


class Net(nn.Module):
    """Not a plain Sequential: inside DDP, torch compiles only modules whose code is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


class Moment:
    """The position of a training, by which a case chooses when to send signals."""

    def __init__(self, case: Case, rank: int, attempt: int) -> None:
        self.case, self.rank, self.attempt = case, rank, attempt
        self.step, self.times = 0, 0

    def __call__(self, place: str) -> None:
        """Send the signals that the case wants at ``place``."""
        self.times += 1
        for number in self.case(place, self) or ():
            # os.kill may choose a thread of an earlier case, which does not block the signal.
            signal.pthread_kill(threading.main_thread().ident or 0, number)


Case = Callable[[str, Moment], Any]


def at(place: str, *, rank: int, step: int = 0, attempt: int = 1) -> Case:
    def case(here: str, moment: Moment) -> Any:
        found = (here, moment.rank, moment.attempt) == (place, rank, attempt) and moment.step >= step
        return [signal.SIGTERM] if found else None

    return case


def to_workers(here: str, moment: Moment) -> Any:
    if (here, moment.attempt, moment.step) == ("step", 1, 3):
        workers = [child for child in multiprocessing.active_children() if child.pid is not None]
        for worker in workers:
            for number in SIGNALS:
                os.kill(int(worker.pid or 0), number)
        return [signal.SIGUSR2] if workers else None
    return None


CASES: dict[str, Case] = {
    "nowhere": lambda here, moment: None,
    "one rank": at("step", rank=1, step=3),
    "all at different steps": lambda here, moment: (
        [signal.SIGTERM] if (here, moment.attempt, moment.step) == ("step", 1, 3 + moment.rank) else None
    ),
    "between two micro-batches": at("micro-batch", rank=0, step=3),
    "evaluation of all ranks": at("evaluation", rank=0, step=3),
    "evaluation of rank 0 alone": at("evaluation alone", rank=0),
    "a save that is due": at("save", rank=1),
    "the last save, again and again": lambda here, moment: (
        [signal.SIGTERM, signal.SIGUSR2]
        if moment.attempt == 1 and (here == "save" or (here, moment.step) == ("step", 3))
        else None
    ),
    "before there is an Accelerator": at("start", rank=1),
    "before resume": at("prepared", rank=0),
    "a load": lambda here, moment: (
        at("step", rank=0, step=3)(here, moment) or at("load", rank=1, attempt=2)(here, moment)
    ),
    "a compilation": at("compilation", rank=1),
    "the workers too": to_workers,
}


class Told:
    """A registered object: each save reads its state, and each load restores it."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment

    def state_dict(self) -> dict[str, Any]:
        self.moment("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment("load")


def train(rank: int, name: str, attempt: int) -> str | int:
    """Run one attempt. Returns the digest of the final weights, or the exit code."""
    from hpcaccel import Accelerator

    moment = Moment(CASES[name], rank, attempt)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # as the shim does
    moment("start")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, deterministic=True, seed=1)
    model: nn.Module = Net()
    if name == "a compilation":

        def backend(graph: Any, inputs: Any) -> Any:
            moment("compilation")
            # A compiler process, which a signal to all processes of the job would kill.
            compiler = subprocess.run(["bash", "-c", "kill -TERM $$; kill -USR2 $$; exit 7"], check=False)
            assert compiler.returncode == 7
            return graph

        model = torch.compile(model, backend=backend)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    workers = 1 if name == "the workers too" else 0
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers)
    validation = DataLoader(Numbers(), batch_size=16)
    model, optimizer, loader, evaluated = accelerator.prepare(model, optimizer, loader, validation)
    accelerator.register_for_checkpointing(Told(moment))
    moment("prepared")
    try:
        for _ in accelerator.epochs(3):
            for x in loader:
                with accelerator.accumulate(model):
                    accelerator.backward((model(x) - x.mean(1, keepdim=True)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                moment.step = accelerator.step
                if not accelerator.sync_gradients:
                    moment("micro-batch")
                    continue
                moment("step")
                if moment.step % 3 == 0:
                    _evaluate(accelerator, model, evaluated, lambda: moment("evaluation"))
                accelerator.checkpoint()
            if accelerator.is_main_process:
                _evaluate(None, accelerator.unwrap_model(model), validation, lambda: moment("evaluation alone"))
    except SystemExit as left:
        accelerator.end_training()
        return int(left.code or 0)
    digest = hashlib.sha256()
    for value in accelerator.unwrap_model(model).state_dict().values():
        digest.update(value.numpy().tobytes())
    assert accelerator.step == STEPS
    accelerator.end_training()
    return digest.hexdigest()


def _evaluate(accelerator: Any, model: nn.Module, loader: Any, told: Callable[[], None]) -> None:
    model.eval()
    with torch.no_grad():
        for x in loader:
            told()
            y = model(x)
            if accelerator is not None:
                accelerator.gather_for_metrics(y)
    model.train()


def _with_log(rank: int, folder: Path) -> tuple[dict[str, list[str | int]], str]:
    with contextlib.redirect_stdout(io.StringIO()) as log:
        results = _all_cases(rank, folder)
    return results, log.getvalue()


def _all_cases(rank: int, folder: Path) -> dict[str, list[str | int]]:
    os.environ |= {"HPCACCEL_PROTOCOL": "1"}
    results: dict[str, list[str | int]] = {}
    for name in CASES:
        found = results[name] = []
        os.environ["HPCACCEL_RUN_DIR"] = str(folder / name)
        while not found or isinstance(found[-1], int):
            os.environ["HPCACCEL_ATTEMPT"] = str(len(found) + 1)
            found.append(train(rank, name, len(found) + 1))
            assert len(found) < 5, f"{name}: {found}"
    return results


def test_stopped_ranks_leave_together_and_resume_to_the_same_weights(tmp_path: Path) -> None:
    for name in CASES:
        make_run(tmp_path / name, checkpoint={"every_steps": 5})
    (results, log), (others, _) = run_ranks(_with_log, tmp_path)
    assert results == others
    digest = results.pop("nowhere")
    assert len(digest) == 1
    expected = {name: [85, 85, *digest] if name == "a load" else [85, *digest] for name in results}
    assert results == expected
    said = "a stop was requested during an evaluation: the training stops at the next training step"
    assert said in log


def _uneven(rank: int, folder: Path, stop: bool) -> list[tuple[int, int, float]]:
    """Train epochs with unequal parts for the ranks, each in one ``join_uneven_inputs``. Returns for each attempt the
    steps, this rank's batches and the weight."""
    from hpcaccel import Accelerator

    found: list[tuple[int, int, float]] = []
    while True:
        accelerator = Accelerator(cpu=True, project_dir=str(folder), seed=1, even_batches=False)
        model, batches = nn.Linear(1, 1), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(torch.arange(7.0).reshape(7, 1)), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        left = False
        try:
            for _ in accelerator.epochs(3):
                with accelerator.join_uneven_inputs([model], even_batches=False):
                    for (x,) in loader:
                        accelerator.backward(model(x).mean())
                        optimizer.step()
                        optimizer.zero_grad()
                        batches += 1
                        if stop and not found and (batches, rank) == (2, 1):
                            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                accelerator.checkpoint()
        except SystemExit:
            left = True
        found.append((accelerator.step, batches, accelerator.unwrap_model(model).weight.item()))
        accelerator.end_training()
        if not left:
            return found


def test_stop_with_uneven_inputs_waits_for_the_end_of_the_epoch(tmp_path: Path) -> None:
    ((_, _, expected),), _ = run_ranks(_uneven, tmp_path / "whole", False)
    stopped, others = run_ranks(_uneven, tmp_path / "stopped", True)
    assert [(step, batches) for step, batches, _ in stopped] == [(4, 4), (12, 8)]
    assert [batches for _, batches, _ in others] == [3, 6]
    assert stopped[-1][2] == others[-1][2] == expected


@pytest.mark.parametrize("arguments", [[], ["--from-step", "3"]], ids=["rendezvous", "training"])
def test_continuous_signals_do_not_change_how_ranks_stop(tmp_path: Path, arguments: list[str]) -> None:
    """They start while rank 0 waits for the others, or at a step, and go on until the process has exited."""
    run = make_run(tmp_path / "run")
    ended = Ranks("besieged.py", *arguments, size=2, run=run, blocked=True).wait()
    assert ended.codes == [85, 85], ended.outputs
    left = outcome(run)
    assert left is not None
    assert left["resume"]
    assert left["checkpoint"] == (f"step_{left['step']:08d}" if arguments else None)
