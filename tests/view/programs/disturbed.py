"""A training whose steps are sleeps, with delays and a kill at known times. Prints each event with the time of the
script's clock, as a line of JSON."""

import json
import os
import signal
import time

attempt = int(os.environ["HPCACCEL_ATTEMPT"])


def tell(what: str, **facts: float) -> None:
    print(json.dumps({"what": what, "time": time.time(), **facts}), flush=True)


tell("begun")
time.sleep(1.0)  # before the imports
import torch  # noqa: E402

from hpcaccel import Accelerator  # noqa: E402
from hpcaccel.runtime import accelerator_setup  # noqa: E402, F401 - what the constructor would import

STEPS, STEP_SECONDS = 70, 0.05


class SlowToSave:
    def state_dict(self) -> dict[str, int]:
        time.sleep(0.6)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        time.sleep(0.8)


tell("imported")
accelerator = Accelerator()
tell("formed")
time.sleep(1.5)
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.register_for_checkpointing(SlowToSave())
tell("prepared")
accelerator.resume()
tell("loaded")
for step in accelerator.steps(STEPS):
    begun = time.time()
    time.sleep(0.7 if step == accelerator.resume().step else 0)  # the first step of an attempt takes longer
    time.sleep(0.25 if attempt == 3 and 52 <= step < 58 else 0)  # slow steps
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(STEP_SECONDS)
    if attempt == 1:  # a script may also log nothing
        accelerator.log({"loss": 1.0})
    tell("step", step=step + 1, seconds=time.time() - begun)
    begun = time.time()
    accelerator.checkpoint()
    took = time.time() - begun
    if took > 0.3:
        tell("saved", seconds=took)
    if attempt == 1 and step + 1 == 35:
        time.sleep(1.7)  # a hang before the kill
        tell("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 2 and step + 1 == 44:
        tell("waits to be stopped")
    if attempt == 2 and step + 1 >= 44:
        time.sleep(0.05)
tell("over")
time.sleep(0.9)
