"""Models, adapters, metrics and optimizers of other libraries under hpcaccel's Accelerator.

Each function is one check with a training of its own; all run in one process. Arguments: a folder for files, and names
of checks (none: all). Prints the names of the checks that have passed.
"""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import schedulefree
import torch
import torchmetrics
from safetensors import safe_open
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hpcaccel import Accelerator

FOLDER = Path(sys.argv[1])
WORDS = 32


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def words(seed):
    return torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(seed))


def train(accelerator, model, optimizer, steps=3):
    """Train on batches that differ between the ranks and the steps; return the losses."""
    losses = []
    for step in range(steps):
        batch = words(step * accelerator.num_processes + accelerator.process_index)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(accelerator, model, **kwargs):
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    return accelerator.prepare(model, torch.optim.AdamW(learning, lr=1e-2, **kwargs))


def whole(model):
    """A copy of the model's weights, the whole ones on every rank."""
    state = model.state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for name, value in state.items()
    }


def names_in(path):
    with safe_open(path, "pt") as file:
        return set(file.keys())


def assert_equal(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not wrong, wrong


def pretrained(strategy):
    """Accelerate's lines for saving a model of transformers, whose output layer is tied to its embedding."""
    accelerator = Accelerator(strategy=strategy)
    before = gpt2().state_dict()
    model, optimizer = prepared(accelerator, gpt2())
    train(accelerator, model, optimizer)
    path = FOLDER / f"pretrained-{strategy}"
    unwrapped: Any = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        path,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    trained = whole(unwrapped)
    assert not torch.equal(trained["transformer.wte.weight"], before["transformer.wte.weight"])
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert_equal(loaded.state_dict(), trained)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert sorted(file.name for file in path.iterdir() if file.suffix == ".safetensors") == ["model.safetensors"]
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=words(0)).logits
        assert torch.allclose(loaded.eval()(input_ids=words(0)).logits, expected, atol=1e-6)
    continued, optimizer = prepared(accelerator, loaded)
    train(accelerator, continued, optimizer)
    accelerator.end_training()


def adapters(strategy):
    """PEFT saves the adapters alone, and a base model with the loaded adapters equals the trained one."""
    accelerator = Accelerator(strategy=strategy, deterministic=True)
    base = llama()
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model, optimizer = prepared(accelerator, peft.get_peft_model(llama(), config))
    train(accelerator, model, optimizer)
    path = str(FOLDER / f"adapters-{strategy}")
    unwrapped: Any = accelerator.unwrap_model(model)
    assert isinstance(unwrapped, peft.PeftModel)
    state = accelerator.get_state_dict(model)
    unwrapped.save_pretrained(path, is_main_process=accelerator.is_main_process, state_dict=state)
    accelerator.wait_for_everyone()
    names = names_in(Path(path) / "adapter_model.safetensors")
    assert len(names) == 8
    assert all("lora_A" in name or "lora_B" in name for name in names), names
    loaded = peft.PeftModel.from_pretrained(llama(), path)
    trained = whole(unwrapped)
    assert_equal(loaded.state_dict(), trained)
    moved = {name for name, value in trained.items() if "lora_B" in name and value.any()}
    assert len(moved) == 4, moved
    frozen = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): value
        for name, value in trained.items()
        if "lora_" not in name
    }
    assert_equal(frozen, base.state_dict())
    saved = accelerator.save_state(str(FOLDER / f"adapters-{strategy}-state"))
    expected = train(accelerator, model, optimizer)
    accelerator.load_state(saved)
    assert_equal(whole(unwrapped), trained)
    assert train(accelerator, model, optimizer) == expected
    accelerator.end_training()


def compiled(strategy):
    """A compiled model has the script's names in all files, and a save is loaded into a model that is not compiled."""
    accelerator = Accelerator(strategy=strategy, dynamo_backend="aot_eager")
    model, optimizer = prepared(accelerator, llama())
    assert hasattr(model, "_orig_mod") or hasattr(model, "_compiled_call_impl")
    train(accelerator, model, optimizer)
    names = set(llama().state_dict())
    state = accelerator.get_state_dict(model)
    assert set(state) == (names if accelerator.is_main_process or strategy == "ddp" else set())
    accelerator.save_model(model, FOLDER / f"compiled-{strategy}")
    unwrapped: Any = accelerator.unwrap_model(model)
    path = FOLDER / f"compiled-{strategy}-pretrained"
    unwrapped.save_pretrained(path, is_main_process=accelerator.is_main_process, state_dict=state)
    saved = accelerator.save_state(str(FOLDER / f"compiled-{strategy}-state"))
    trained = whole(unwrapped)
    expected = train(accelerator, model, optimizer)
    accelerator.end_training()
    assert names_in(FOLDER / f"compiled-{strategy}" / "model.safetensors") == names
    assert_equal(AutoModelForCausalLM.from_pretrained(path).state_dict(), trained)

    accelerator = Accelerator(strategy=strategy)
    model, optimizer = prepared(accelerator, llama())
    accelerator.load_state(saved)
    assert_equal(whole(accelerator.unwrap_model(model)), trained)
    found = train(accelerator, model, optimizer)
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-5), (found, expected)
    accelerator.end_training()


def schedule_free(strategy):
    """Modes are switched through the prepared optimizer; a save in either mode is restored in this mode."""
    accelerator = Accelerator(strategy=strategy, deterministic=True)
    model = llama()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for mode in ("train", "eval"):
        optimizer.train()
        train(accelerator, model, optimizer)
        trained = whole(accelerator.unwrap_model(model))
        optimizer.eval()
        averaged = whole(accelerator.unwrap_model(model))
        assert not torch.equal(averaged["lm_head.weight"], trained["lm_head.weight"])
        if mode == "train":
            optimizer.train()
        saved = accelerator.save_state(str(FOLDER / f"schedule-free-{strategy}-{mode}"))
        optimizer.train()
        expected = train(accelerator, model, optimizer)
        optimizer.train() if mode == "eval" else optimizer.eval()  # the other mode than at the save
        accelerator.load_state(saved)
        assert {group["train_mode"] for group in optimizer.param_groups} == {mode == "train"}
        optimizer.train()
        assert train(accelerator, model, optimizer) == expected
    accelerator.end_training()


def metrics():
    """Both ways of torchmetrics over several ranks give the values of a single process."""
    rows = 101
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(rows, 5, generator=generator)
    answers = torch.randint(5, (rows,), generator=generator)
    data = TensorDataset(scores, answers, torch.arange(rows))

    def collection(**kwargs):
        return torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.classification.MulticlassAccuracy(5, average="micro", **kwargs),
                "auroc": torchmetrics.classification.MulticlassAUROC(5, thresholds=None, **kwargs),  # keeps all rows
                "matrix": torchmetrics.classification.MulticlassConfusionMatrix(5, **kwargs),
            }
        )

    alone = collection(sync_on_compute=False)
    alone.update(scores, answers)
    expected = alone.compute()

    accelerator = Accelerator()
    gathering = collection(sync_on_compute=False).to(accelerator.device)  # each rank has all rows already
    seen = []
    for batch in accelerator.prepare(DataLoader(data, batch_size=8)):
        predictions, targets, numbers = accelerator.gather_for_metrics(batch)
        gathering.update(predictions, targets)
        seen += numbers.tolist()
    assert sorted(seen) == list(range(rows))
    found = gathering.compute()
    assert all(torch.allclose(found[name], value) for name, value in expected.items()), (found, expected)
    assert found["matrix"].sum() == rows

    # Each rank has rows of its own: compute() gathers the states, and so does sync().
    computing, syncing = collection(), collection(sync_on_compute=False)
    own = 0
    for predictions, targets, _ in Accelerator(even_batches=False).prepare(DataLoader(data, batch_size=8)):
        computing.update(predictions, targets)
        syncing.update(predictions, targets)
        own += len(targets)
    assert 0 < own < rows
    for metric in syncing.values(copy_state=False):
        metric.sync()
    for found in (computing.compute(), syncing.compute()):
        assert all(torch.allclose(found[name], value) for name, value in expected.items()), (found, expected)
    accelerator.end_training()


def main():
    checks = {f"{check.__name__} {way}": (check, way) for check in STRATEGIES for way in ("ddp", "fsdp")}
    passed = []
    for name, (check, *arguments) in (checks | {"metrics": (metrics,)}).items():
        if not sys.argv[2:] or name in sys.argv[2:]:
            check(*arguments)
            passed.append(name)
    print(json.dumps({"passed": passed}))


STRATEGIES = (pretrained, adapters, compiled, schedule_free)

main()
