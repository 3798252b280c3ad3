"""A training with trackers; with ``--die-at`` the first attempt is killed at that step, before its checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hpcaccel import Accelerator
from hpcaccel.tracking import GeneralTracker, on_main_process

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--die-at", type=int)
parser.add_argument("--own-steps", action="store_true", help="count micro-batches, as many scripts do")
args = parser.parse_args()


class Recorder(GeneralTracker):
    """A tracker defined by the script."""

    name = "recorder"
    requires_logging_directory = False

    @on_main_process
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.heard

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.heard.append(["config", values])

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.heard.append([sorted(values), step, kwargs])

    @on_main_process
    def resumed(self, step: int) -> None:
        self.heard.append(["resumed", step])

    @on_main_process
    def finish(self) -> None:
        args.out.write_text(json.dumps(self.heard))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=["tensorboard", Recorder()])
accelerator.init_trackers("digits", config={"lr": 0.1, "layers": [1, 2]})
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(16 * accelerator.num_processes, 1), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.log({"accuracy": 0.0})
micro = accelerator.resume().step * 2
for _ in accelerator.epochs(1):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        micro += 1
        accelerator.log(
            {"loss": loss.detach(), "attempt": accelerator._session.place.attempt},
            **({"step": micro} if args.own_steps else {}),
        )
        if micro == 3:
            accelerator.log(
                {"accuracy": 0.5, "parts": {"a": 1, "b": torch.tensor(2.0)}}, log_kwargs={"recorder": {"x": 1}}
            )
        if accelerator.step == args.die_at and not Path(f"{args.out}.died").exists():
            accelerator.wait_for_everyone()
            accelerator._session.loop.context.metrics.flush()
            if accelerator.is_main_process:
                Path(f"{args.out}.died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        accelerator.checkpoint()
board = accelerator.get_tracker("tensorboard")
board.log_images({"picture": torch.zeros(1, 3, 4, 4)}, step=4)
accelerator.get_tracker("tensorboard", unwrap=True).add_text("note", "written by the package itself")
accelerator.get_tracker("recorder", unwrap=True).append(["own", accelerator.process_index])
names = [tracker.name for tracker in accelerator.trackers]
accelerator.end_training()
print(json.dumps({"trackers": names, "wanted": len(accelerator.log_with)}))
