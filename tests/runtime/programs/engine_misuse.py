"""What cannot be combined with DeepSpeed's engine, on a stand-in: prints each error."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import deepspeed_standin
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator, AcceleratorState, DeepSpeedPlugin, DistributedType
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.utils import DummyOptim, DummyScheduler, GatheredParameters, get_active_deepspeed_plugin

deepspeed_standin.install()
errors: dict[str, str] = {}


def expect(name, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except RuntimeMisuse as error:
        errors[name] = str(error)
    else:
        errors[name] = "no error"


def parts():
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2)


student, teacher = DeepSpeedPlugin(zero_stage=2), DeepSpeedPlugin(zero_stage=3)
accelerator = Accelerator(deepspeed_plugins={"student": student, "teacher": teacher}, mixed_precision="bf16")
assert accelerator.distributed_type == DistributedType.DEEPSPEED
assert accelerator.deepspeed_plugin is student is get_active_deepspeed_plugin(accelerator.state)
assert accelerator.scaler is None
assert accelerator.state.get_deepspeed_plugin("teacher") is teacher
expect("unknown plugin", accelerator.state.select_deepspeed_plugin, "nobody")
accelerator.state.select_deepspeed_plugin("teacher")
frozen = nn.Linear(4, 1)
assert type(accelerator.prepare(frozen, parts()[2])[0]).__name__ == "DeepSpeedEngine"
accelerator.state.select_deepspeed_plugin("student")

model, optimizer, loader = parts()
expect("two models", accelerator.prepare, model, nn.Linear(1, 1), optimizer, loader)
expect("optimizer alone", accelerator.prepare, optimizer)
expect("no loader", accelerator.prepare, model, optimizer)
expect("dummy without section", accelerator.prepare, model, DummyOptim(model.parameters()), loader)
engine, prepared, loader = accelerator.prepare(model, optimizer, loader)
assert accelerator.prepare(engine) is engine
expect("original again", accelerator.prepare, model)
other = parts()
expect("second engine", accelerator.prepare, *other)
assert accelerator.unwrap_model(engine) is model
inputs, targets = next(iter(loader))
seen = []
model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
model.bfloat16()  # as the real engine does
outputs = engine(inputs)
assert seen == [torch.bfloat16]
assert outputs.dtype == torch.float32
with accelerator.no_sync(engine):
    accelerator.backward(outputs.mean())
assert accelerator.step == 0
assert engine.calls == ["backward"]
model.float()
engine.module.zero_grad()
accelerator.backward(model(inputs).mean())
assert (engine.calls, accelerator.step) == (["backward", "backward", "step"], 0)
prepared.step()
assert accelerator.step == 1
accelerator.backward(model(inputs).mean())  # without optimizer.step(): counted by the next backward pass
accelerator.backward(model(inputs).mean())
assert accelerator.step == 3
expect("clip by value", accelerator.clip_grad_value_, engine.parameters(), 1.0)
assert not accelerator.optimizer_step_was_skipped
engine.optimizer.overflow = True
assert accelerator.optimizer_step_was_skipped
with GatheredParameters(engine.parameters()):
    pass
assert set(accelerator.get_state_dict(engine)) == {"weight", "bias"} == set(accelerator.get_state_dict(model))
accelerator.free_memory()
assert engine.calls[-1] == "destroy"
AcceleratorState._reset_state()  # keeps the process group

config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}}}
config |= {"gradient_accumulation_steps": 4}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), dynamo_backend="eager")
model, optimizer, loader = parts()
expect("two optimizers", accelerator.prepare, model, optimizer, loader)
dummy = DummyOptim(model.parameters(), lr=0.5)
schedule = DummyScheduler(dummy, lr_scheduler_callable=lambda found: torch.optim.lr_scheduler.StepLR(found, 1))
engine, optimizer, loader, schedule = accelerator.prepare(model, dummy, loader, schedule)
assert accelerator.gradient_accumulation_steps == 4
assert optimizer.param_groups[0]["lr"] == 0.5
assert engine.calls == ["compile eager"]
assert schedule.get_last_lr() == [0.5]
assert accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 2
expect("empty tensors", accelerator.save, {"weight": torch.empty(0)}, "nowhere.bin")
accelerator.end_training()

expect("fsdp", Accelerator, deepspeed_plugin=DeepSpeedPlugin(), strategy="fsdp")
expect("both names", Accelerator, deepspeed_plugin=student, deepspeed_plugins=teacher)
expect("no plugin", Accelerator, deepspeed_plugin="zero3.json")
expect("fp8", Accelerator, deepspeed_plugin=DeepSpeedPlugin(), mixed_precision="fp8")
half = DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": True}})
expect("two precisions", Accelerator, deepspeed_plugin=half, mixed_precision="fp16")
accelerator = Accelerator(deepspeed_plugin=half)
assert accelerator.mixed_precision == "bf16"
expect("after the end", accelerator.prepare, *parts())
accelerator.end_training()
print(json.dumps(errors))
