"""Collective calls that only some ranks make. Each case prints the rank's error and the seconds until it was raised."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
from torch.utils.data import DataLoader

from hpcaccel import Accelerator
from hpcaccel.errors import HpcaccelError
from hpcaccel.runtime.compat.out_of_memory import find_executable_batch_size
from hpcaccel.runtime.handlers import InitProcessGroupKwargs


def gather_on_main(accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(2))
    else:
        time.sleep(8)


def gather_and_end(accelerator: Accelerator) -> None:
    """The other ranks continue to the end of the program."""
    if accelerator.is_main_process:
        accelerator.gather(torch.ones(2))


def barrier_and_gather(accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
    accelerator.gather(torch.ones(2))


def gather_and_loop(accelerator: Accelerator) -> None:
    """The other ranks go on training and wait for the main process's next step, which it does not make."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(torch.randn(64, 4), batch_size=4))
    for _ in accelerator.epochs(2):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.checkpoint()
            if accelerator.is_main_process:
                accelerator.gather(torch.ones(2))


def prepare_on_main(accelerator: Accelerator) -> None:
    """The other ranks prepare a loader only."""
    model, loader = torch.nn.Linear(1, 1), DataLoader(torch.randn(64, 4), batch_size=4)
    if accelerator.is_main_process:
        model = accelerator.prepare(model)
    loader = accelerator.prepare(loader)


def barrier_in_the_middle(accelerator: Accelerator) -> None:
    """All ranks but the main process wait; it has already exited with code 0."""
    if accelerator.is_main_process:
        sys.exit(0)
    accelerator.wait_for_everyone()


def too_large_for_one(accelerator: Accelerator) -> None:
    """The main process waits for the gradients of the others in its backward pass, which cannot be interrupted."""

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        model = accelerator.prepare(torch.nn.Linear(4, 1))
        if not accelerator.is_main_process:
            raise RuntimeError("CUDA out of memory. Tried to allocate a test")
        accelerator.backward(model(torch.ones(batch_size, 4)).sum())

    train()


def one_fails(accelerator: Accelerator) -> None:
    if accelerator.process_index == accelerator.num_processes - 1:
        raise ValueError("a bug of the script's own")
    accelerator.wait_for_everyone()


def one_fails_late(accelerator: Accelerator) -> None:
    """The other ranks have been waiting for 3 s."""
    if accelerator.process_index == accelerator.num_processes - 1:
        time.sleep(3)
    one_fails(accelerator)


def one_is_late(accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        time.sleep(4)
    accelerator.wait_for_everyone()
    total = accelerator.reduce(torch.ones(()))
    print(json.dumps({"total": total.item()}), flush=True)


def main() -> None:
    case, timeout = sys.argv[1], float(sys.argv[2])
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    began = time.monotonic()
    try:
        globals()[case](accelerator)
    except HpcaccelError as error:
        print(json.dumps({"error": type(error).__name__, "said": str(error), "seconds": time.monotonic() - began}))
        sys.stdout.flush()
        raise


main()
