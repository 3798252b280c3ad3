"""A small training through ``Accelerator``, and a save and a load of its checkpoint.

Each rank also computes the whole training alone, in float64 on the CPU, so that a wrong loss or parameter names the
rank that has it.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcaccel.checkpoint_files.verify import checkpoints_in, verify
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.selftest.check_runner import CheckFailed, CheckRunner, Fault

__all__ = ["SmallTraining", "check_checkpoint", "check_training"]

STEPS = 3
BATCH, WIDTH = 8, 32
RATE = 0.1
TOLERANCE = 1e-3
"""Relative difference from the computation in float64. float32 and TF32 are well below it."""


class SmallTraining:
    """A model, its optimizer, and the Accelerator that prepared them."""

    def __init__(self, *, cpu: bool) -> None:
        self.accelerator = Accelerator(cpu=cpu)
        self.model, optimizer = _new()
        self.prepared, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    @property
    def parameters(self) -> torch.Tensor:
        """All parameters as one vector in float64 on the CPU."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().double().cpu()

    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        """One step with ``inputs``, shape ``(BATCH, WIDTH)``. Returns the loss."""
        loss: torch.Tensor = self.prepared(inputs.to(self.accelerator.device)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _new() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def _inputs(step: int, rank: int) -> torch.Tensor:
    """The batch of a rank. In the first step, all ranks have the same one."""
    generator = torch.Generator().manual_seed(1000 * step + (rank if step else 0))
    return torch.randn(BATCH, WIDTH, generator=generator)


def _alone(world_size: int, rank: int) -> tuple[list[float], torch.Tensor]:
    """The losses of ``rank`` and the final parameters, computed without other ranks."""
    model, _ = _new()
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        parts = [model(_inputs(step, one).double()).square().mean() for one in range(world_size)]
        losses.append(float(parts[rank].detach()))
        torch.stack(parts).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


def check_training(runner: CheckRunner, training: SmallTraining) -> None:
    """Compute one gradient without the other ranks, then train a few steps, and compare all results with those in
    float64. The losses of the first step, which has equal batches, and the final parameters must be equal on all ranks.

    Raises:
        CheckFailed: a loss, a gradient or a parameter is wrong.
    """
    accelerator = training.accelerator
    rank, count = accelerator.process_index, accelerator.num_processes
    expected, expected_parameters = _alone(count, rank)
    runner.step("a gradient without the other ranks")
    _check_own_gradient(training, rank)
    losses = []
    for step in range(STEPS):
        runner.step(f"step {step + 1}")
        losses.append(training.step(_inputs(step, rank)))
    found = [float(loss) for loss in losses]
    runner.measure(losses=found, expected=expected)
    # From here on, the gradients of all ranks have an effect, so these faults name no rank.
    for step, (loss, right) in enumerate(zip(found, expected, strict=True)):
        if not abs(loss - right) <= TOLERANCE * abs(right):
            message = f"the loss of step {step + 1} on rank {rank} is {loss:.6g}, and should be {right:.6g}"
            raise CheckFailed(Fault(kind="wrong_training", message=message, ranks=()))
    parameters = training.parameters
    if (error := _relative_error(parameters, expected_parameters)) > TOLERANCE:
        message = f"the parameters on rank {rank} are wrong after {STEPS} steps (largest relative error {error:.2g})"
        raise CheckFailed(Fault(kind="wrong_training", message=message, ranks=()))
    runner.step("compare the ranks")
    for message in _differences(accelerator, losses[0], parameters):
        runner.report(Fault(kind="different_ranks", message=message, ranks=()))


def _check_own_gradient(training: SmallTraining, rank: int) -> None:
    inputs = _inputs(0, rank)
    reference = _new()[0].double()
    gradients = []
    losses = []
    for model, batch in ((training.model, inputs.to(training.accelerator.device)), (reference, inputs.double())):
        loss = model(batch).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([one.flatten() for one in found]).double().cpu())
        losses.append(float(loss.detach()))
    if not abs(losses[0] - losses[1]) <= TOLERANCE * losses[1]:
        message = f"a loss computed on rank {rank} is {losses[0]:.6g}, and should be {losses[1]:.6g}"
        raise CheckFailed(Fault(kind="wrong_training", message=message))
    if (error := _relative_error(*gradients)) > TOLERANCE:
        message = f"a gradient computed on rank {rank} is wrong (largest relative error {error:.2g})"
        raise CheckFailed(Fault(kind="wrong_training", message=message))


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((found - expected).abs().max() / expected.abs().max())
    return error if math.isfinite(error) else math.inf


def _differences(accelerator: Accelerator, loss: torch.Tensor, parameters: torch.Tensor) -> Iterator[str]:
    """Each rank's first loss, and the sum and the weighted sum of its parameters."""
    weights = torch.arange(parameters.numel(), dtype=torch.float64) / parameters.numel()
    own = torch.stack([loss.double().cpu(), parameters.sum(), parameters @ weights])
    every: Any = accelerator.gather(own[None])
    for name, column in (("first loss", 0), ("parameters", 1), ("parameters", 2)):
        if not torch.equal(every[:, column], every[:1, column].expand_as(every[:, column])):
            yield f"the {name} are not equal on all ranks: {every[:8, column].tolist()}"


def check_checkpoint(runner: CheckRunner, training: SmallTraining, folder: Path) -> None:
    """Save a checkpoint to ``folder``, check its checksums, load it into other parameters, and remove it.

    Args:
        folder: a folder that all nodes share. It must not exist.

    Raises:
        CheckFailed: the checkpoint is damaged, or the loaded parameters are not the saved ones.
    """
    accelerator = training.accelerator
    saved = training.parameters
    runner.step(f"save to {folder}")
    accelerator.save_state(str(folder))
    accelerator.wait_for_everyone()
    if not folder.is_dir():
        message = f"the checkpoint {folder} of the other ranks is not visible on this node: the folder is not shared"
        runner.report(Fault(kind="not_shared", message=message))
    elif accelerator.is_main_process:
        runner.step("verify the checksums")
        if problems := [text for found in checkpoints_in(folder) for text in verify(found).problems]:
            runner.report(Fault(kind="checkpoint", message=f"{folder} is damaged: {problems[0]}"))
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    runner.step("load")
    accelerator.load_state(str(folder))
    if not torch.equal(saved, training.parameters):
        raise CheckFailed(Fault(kind="checkpoint", message="the loaded parameters are not those that were saved"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
