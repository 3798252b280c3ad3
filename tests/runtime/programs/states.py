"""Uses the states in every way; rank 0 prints the results of all ranks as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.states.accelerator_state import AcceleratorState, is_initialized
from hpcaccel.runtime.states.gradient_state import GradientState
from hpcaccel.runtime.states.partial_state import PartialState

found: dict[str, Any] = {}


def note(name: str, value: Any) -> None:
    """Record each rank's value, in rank order."""
    values: list[Any] = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    found[name] = values


def place(state: Any) -> list[Any]:
    return [
        state.process_index, state.num_processes, state.local_process_index, state.is_main_process,
        state.is_local_main_process, state.is_last_process, state.use_distributed, str(state.device),
        str(state.distributed_type),
    ]  # fmt: skip


def printed(state: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        state.print("word")
    return out.getvalue()


assert not is_initialized()
assert PartialState._shared_state == {} == AcceleratorState._shared_state
state = PartialState(cpu=True)
assert PartialState._shared_state
note("before", place(state))
note("backend", state.backend)
note("printed", printed(state))

# -- some ranks only -----------------------------------------------------------------------------------------------

calls = []


@state.on_main_process
def main() -> str:
    """Documented."""
    calls.append("main")
    return "main"


@Accelerator.on_main_process
def main_before_accelerator() -> None:
    calls.append("early")


@state.on_process(process_index=1)
def second() -> None:
    calls.append("second")


@state.on_local_process(local_process_index=1)
def local_second() -> None:
    calls.append("local second")


returned = main()
assert main.__name__ == "main"
assert main.__doc__ == "Documented."
main_before_accelerator()
second()
local_second()
state.on_last_process(lambda: calls.append("last"))()
state.on_local_main_process(lambda: calls.append("local main"))()
note("calls", calls)
note("returned", returned)

# -- rank order ----------------------------------------------------------------------------------------------------

store = None if not dist.is_initialized() else dist.distributed_c10d._get_default_store()
order = 0
with state.main_process_first():
    if store is not None:
        order = store.add("order", 1)
note("order", order)
with contextlib.suppress(ValueError), state.local_main_process_first():
    if state.is_local_main_process:
        raise ValueError("the others are not to wait for ever")

# -- splits --------------------------------------------------------------------------------------------------------

prompts = ["a", "bb", "ccc", "dddd", "eeeee"]
with state.split_between_processes(prompts) as part:
    note("part", part)
with state.split_between_processes(prompts, apply_padding=True) as part:
    lengths = torch.tensor([len(prompt) for prompt in part])
    written = [prompt.upper() for prompt in part]
note("gathered", [state.gather(lengths).tolist(), state.gather(written)])
note("metrics", [state.gather_for_metrics(lengths).tolist(), state.gather_for_metrics(written)])
nested = state.gather_for_metrics({"text": written, "length": lengths, "mean": lengths.double().mean(), "rank": "r"})
note("nested", [nested["text"], nested["length"].tolist(), nested["mean"].numel(), nested["rank"]])
with state.split_between_processes(prompts[:1]) as part:
    note("few", [part, state.gather(part), state.gather_for_metrics(part)])

# -- with an Accelerator -------------------------------------------------------------------------------------------

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
note("after", place(state) == place(accelerator) == place(accelerator.state) == place(AcceleratorState()))
assert is_initialized()
assert AcceleratorState().mixed_precision == "no"
assert accelerator.state.deepspeed_plugin is None
assert accelerator.multi_device is False
gradients = GradientState()
assert (gradients.num_steps, gradients.in_dataloader, gradients.remainder) == (2, False, -1)
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(12.0).reshape(12, 1), batch_size=2))
seen = []
for _ in loader:
    with accelerator.accumulate():
        seen.append([gradients.sync_gradients, gradients.in_dataloader, gradients.end_of_dataloader])
        assert gradients.active_dataloader is loader
        assert gradients.dataloader_references == [None, loader]
assert gradients.sync_gradients is accelerator.sync_gradients
note("gradients", [seen, gradients.in_dataloader])

accelerator.end_training()
note("ended", [printed(accelerator), printed(state), place(accelerator) == place(state), dist.is_initialized()])
found["ended_of"] = place(accelerator.state)[:2]
model = torch.nn.Linear(2, 2)
assert accelerator.unwrap_model(model) is model
try:
    accelerator.wait_for_everyone()
except RuntimeError:
    raise
except Exception as error:
    found["waited"] = str(error)

# -- a reset, and a process group made by the script ---------------------------------------------------------------

again = Accelerator(cpu=True)
AcceleratorState._reset_state()
half = Accelerator(cpu=True, mixed_precision="bf16")
assert AcceleratorState().mixed_precision == "bf16"
note("group kept", dist.is_initialized())
half.destroy_process_group()
assert not dist.is_initialized()
if accelerator.num_processes > 1:
    dist.init_process_group("gloo")
    own = Accelerator(cpu=True)
    note("own group", [own.num_processes, own.process_index])
    own.end_training()
    found["own group stays"] = dist.is_initialized()
    PartialState().destroy_process_group()
    found["own group destroyed"] = not dist.is_initialized()
    behind = Accelerator(cpu=True)
    dist.destroy_process_group()
    fresh = Accelerator(cpu=True)
    note("destroyed behind its back", [fresh.num_processes, fresh.gather(torch.tensor(fresh.process_index)).tolist()])
    assert fresh.distributed_type == DistributedType.MULTI_CPU
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(found))
