"""Signals at every place of a training, on some ranks or on all: they leave together, and the end is the same.

All cases run one after the other in the same two processes, for a start takes longer than any of them.
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
    """A class of its own: what is inside of DDP is compiled only where its code is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found


class Moment:
    """Where a training is, for a case to choose from."""

    def __init__(self, case: Case, rank: int, attempt: int) -> None:
        self.case, self.rank, self.attempt = case, rank, attempt
        self.step, self.times = 0, 0

    def __call__(self, place: str) -> None:
        """The training is at ``place``: the case may send its signals."""
        self.times += 1
        for number in self.case(place, self) or ():
            # os.kill may choose a thread of an earlier case, which does not hold it back.
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
    """A registered object, which is asked for its state in every save and gets it back in every load."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment

    def state_dict(self) -> dict[str, Any]:
        self.moment("save")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment("load")


def train(rank: int, name: str, attempt: int) -> str | int:
    """An attempt: the digest of what came out, or the code that it left with."""
    from hpcaccel import Accelerator

    moment = Moment(CASES[name], rank, attempt)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # as the shim does
    moment("start")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, deterministic=True, seed=1)
    model: nn.Module = Net()
    if name == "a compilation":

        def backend(graph: Any, inputs: Any) -> Any:
            moment("compilation")
            # A compiler, which a signal to all processes of the job would end.
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


def test_all_ranks_leave_together_and_the_end_is_the_same(tmp_path: Path) -> None:
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
    """Epochs of which the ranks have unequal parts, each as a whole in ``join_uneven_inputs``: the steps after each
    attempt, this rank's batches in it, and the weight."""
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


def test_a_stop_among_ranks_of_unequal_length_comes_when_the_epoch_is_over(tmp_path: Path) -> None:
    ((_, _, expected),), _ = run_ranks(_uneven, tmp_path / "whole", False)
    stopped, others = run_ranks(_uneven, tmp_path / "stopped", True)
    assert [(step, batches) for step, batches, _ in stopped] == [(4, 4), (12, 8)]
    assert [batches for _, batches, _ in others] == [3, 6]
    assert stopped[-1][2] == others[-1][2] == expected


@pytest.mark.parametrize("arguments", [[], ["--from-step", "3"]], ids=["rendezvous", "training"])
def test_signals_that_do_not_cease_change_nothing(tmp_path: Path, arguments: list[str]) -> None:
    """From when rank 0 waits for the others, or from a step on, through the last save and until the process is gone."""
    run = make_run(tmp_path / "run")
    ended = Ranks("besieged.py", *arguments, size=2, run=run, blocked=True).wait()
    assert ended.codes == [85, 85], ended.outputs
    left = outcome(run)
    assert left is not None
    assert left["resume"]
    assert left["checkpoint"] == (f"step_{left['step']:08d}" if arguments else None)
