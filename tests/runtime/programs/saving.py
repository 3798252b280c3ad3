"""Saves of two replicated ranks: together, on rank 0 only, with a late rank, numbered and with hooks."""

import json
import os
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from hpcaccel import Accelerator, ProjectConfiguration, checkpoint_files
from hpcaccel.errors import CheckpointError, RuntimeMisuse

folder = Path(sys.argv[1])
told = {}


class Count:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def start(**words):
    accelerator = Accelerator(cpu=True, **words)
    models = [nn.Linear(4, 4), nn.Linear(3, 3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    return accelerator, *accelerator.prepare(*models, *optimizers)


def train(accelerator, first, second, one, two):
    accelerator.backward(first(torch.rand(2, 4)).sum() + second(torch.rand(2, 3)).sum())
    one.step()
    two.step()


def heard(call):
    """The result of ``call``, and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = call()
    return value, [str(item.message) for item in caught]


@contextmanager
def refused(text, *kinds):
    """Check that the block raises an error whose message contains ``text``."""
    try:
        yield
    except kinds as error:
        if text not in str(error):
            raise
    else:
        raise AssertionError(f"nobody said {text!r}")


def manifest(path):
    found = checkpoint_files.committed(Path(path)) or [
        checkpoint_files.Checkpoint(Path(path), 0, checkpoint_files.read_manifest(Path(path)))
    ]
    return found[-1].manifest


def only_the_main_process_calls():
    accelerator, *trained = start(project_dir=folder / "guarded")
    train(accelerator, *trained)
    count = Count()
    accelerator.register_for_checkpointing(count, count)
    accelerator.register_for_checkpointing(count)
    count.value = 5
    torch.manual_seed(accelerator.process_index)
    for turn in range(2):
        train(accelerator, *trained)
        if accelerator.is_main_process:
            path, texts = heard(accelerator.save_state)
            assert len(texts) == (turn == 0), texts
            if texts:
                told["warning"] = texts[0]
            assert manifest(path)["missing_rng"] == [1]
            assert manifest(path)["world_size"] == 2
    noise = torch.get_rng_state()
    train(accelerator, *trained)
    count.value = 6
    # The same call on all ranks: it is not mistaken for one of the earlier calls.
    together = accelerator.save_state(folder / "guarded" / "mine")
    assert together == str(folder / "guarded" / "mine")
    assert "missing_rng" not in manifest(together)
    own = torch.rand(1)
    resumed = accelerator.load_state()
    assert resumed.step == 3, resumed
    assert count.value == 5
    assert torch.equal(torch.get_rng_state(), noise) is accelerator.is_main_process
    accelerator.load_state(together)
    assert count.value == 6
    assert torch.equal(torch.rand(1), own)
    # Load on all ranks and save at a step that rank 0 saved alone: the complete checkpoint replaces the partial one.
    accelerator.load_state()
    path = accelerator.save_state()
    accelerator.wait_for_everyone()
    told["after"] = manifest(path).get("missing_rng")
    accelerator.end_training()


def a_rank_comes_late():
    accelerator, *trained = start(project_dir=folder / "late")
    train(accelerator, *trained)
    if not accelerator.is_main_process:
        time.sleep(4)
    path, texts = heard(accelerator.save_state)
    assert Path(path).name == "step_00000001", path
    assert len(texts) == 1
    assert ("too late" in texts[0]) is not accelerator.is_main_process
    train(accelerator, *trained)
    path, texts = heard(accelerator.save_state)
    assert not texts
    assert "missing_rng" not in manifest(path)
    assert Path(path).name == "step_00000002", path
    if accelerator.is_main_process:
        (folder / "file").touch()
        with refused("cannot be saved", CheckpointError):
            heard(lambda: accelerator.save_state(folder / "file" / "below"))
    accelerator.end_training()


def numbered():
    config = ProjectConfiguration(project_dir=str(folder / "numbered"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator, *trained = start(project_config=config)
    assert accelerator.project_dir == accelerator.project_configuration.project_dir == str(folder / "numbered")
    for turn in range(3):
        train(accelerator, *trained)
        assert accelerator.save_iteration == turn
        assert Path(accelerator.save_state()).name == f"checkpoint_{turn}"
    kept = folder / "numbered" / "checkpoints"
    accelerator.wait_for_everyone()
    assert sorted(os.listdir(kept)) == ["checkpoint_1", "checkpoint_2"]
    accelerator.project_configuration.iteration = 2
    with refused(
        "checkpoint_2 already exists. Set the next free number with accelerator.project_configuration.",
        CheckpointError,
    ):
        accelerator.save_state()
    accelerator.end_training()

    # After a restart numbering continues, and a damaged checkpoint is skipped.
    config = ProjectConfiguration(project_dir=str(folder / "numbered"), automatic_checkpoint_naming=True)
    accelerator, *trained = start(project_config=config)
    if accelerator.is_main_process:
        file = next((kept / "checkpoint_2" / "step_00000003").glob("*.bin"))
        content = bytearray(file.read_bytes())
        content[0] ^= 1
        file.write_bytes(content)
    accelerator.wait_for_everyone()
    assert accelerator.load_state().path.parent.name == "checkpoint_1"
    assert accelerator.save_iteration == 3
    accelerator.end_training()


def hooks():
    accelerator, *trained = start(project_dir=folder / "hooks")
    first = accelerator.unwrap_model(trained[0])

    def save(models, weights, output_dir):
        """A common pattern: save on the main process only."""
        assert len(models) == len(weights) == 2
        if accelerator.is_main_process:
            Path(output_dir, "own").mkdir(exist_ok=True)
            torch.save(first.state_dict(), Path(output_dir, "own", "first.pt"))
            weights.pop(0)

    def load(models, input_dir):
        assert len(models) == 2
        first.load_state_dict(torch.load(Path(input_dir, "own", "first.pt"), weights_only=True))
        models.pop(0)

    handle = accelerator.register_save_state_pre_hook(save)
    for where in (None, folder / "hooks" / "mine"):
        loading = accelerator.register_load_state_pre_hook(load)
        train(accelerator, *trained)
        before = [accelerator.get_state_dict(model) for model in trained[:2]]
        before = [{name: value.clone() for name, value in state.items()} for state in before]
        path = accelerator.save_state(where)
        assert Path(path, "own", "first.pt").is_file()
        train(accelerator, *trained)
        accelerator.load_state(where)
        for model, state in zip(trained[:2], before, strict=True):
            assert all(torch.equal(value, state[name]) for name, value in accelerator.get_state_dict(model).items())
        loading.remove()
        with refused("register_load_state_pre_hook", CheckpointError):
            accelerator.load_state(where)
    handle.remove()

    def fail(models, weights, output_dir):
        if not accelerator.is_main_process:
            raise KeyError("as told")

    accelerator.register_save_state_pre_hook(fail)
    with refused("KeyError: 'as told' (rank 1", CheckpointError):
        accelerator.save_state(folder / "hooks" / "failed")
    accelerator.end_training()


def misuse():
    accelerator, *_ = start()
    for call, text in [
        (lambda: accelerator.register_for_checkpointing(Count(), 3, "x"), "item 1 has type int, item 2 has type str"),
        (lambda: accelerator.load_state("x", strict=False), "load_checkpoint_in_model"),
    ]:
        with refused(text, RuntimeMisuse):
            call()
    accelerator.end_training()


for check in (only_the_main_process_calls, a_rank_comes_late, numbered, hooks, misuse):
    os.environ["HPCACCEL_RUN_DIR"] = str(folder / "runs" / check.__name__)
    check()
print(json.dumps(told), flush=True)
