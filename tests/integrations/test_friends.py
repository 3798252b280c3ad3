"""``hpcaccel.Accelerator`` with the libraries that scripts use beside it, each the real package: transformers, PEFT,
datasets, torchmetrics, schedulefree, ``torch.compile``, and accelerate in the same process."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.runtime.data.loader import PreparedLoader
from tests.made_once import made_once
from tests.runtime.ranks import Ended, make_run, metrics, outcome, run_ranks
from tests.runtime.test_data import prepared

for package in ("accelerate", "datasets", "peft", "schedulefree", "torchmetrics", "transformers"):
    if find_spec(package) is None:  # importorskip() would import them, which takes long
        pytest.skip(f"needs {package}", allow_module_level=True)
pytestmark = pytest.mark.torch

PROGRAMS = Path(__file__).parent / "programs"
PRELOAD = (
    "accelerate",
    "datasets",
    "peft",
    "schedulefree",
    "torchmetrics",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)
EPOCHS, STEPS_PER_EPOCH, ROWS, ROWS_PER_STEP = 3, 6, 48, 8
KILLED_AT = 8  # in the middle of the second epoch


def run(program: str, arguments: Sequence[str], **options: Any) -> Ended:
    return run_ranks(str(PROGRAMS / program), arguments, preload=PRELOAD, **options)


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


class Training:
    """``friend_training.py``: once undisturbed, once stopped in the middle of an epoch and resumed."""

    def __init__(self, folder: Path, said: str) -> None:
        self.whole, self.run = RunDir(folder / "whole"), RunDir(folder / "run")
        self.undisturbed, self.stopped, self.resumed = (Ended(**one) for one in json.loads(said))

    def rows(self, run: RunDir, loader: str) -> list[int]:
        """The numbers of the rows that the ranks have read together, in the order of steps and ranks."""
        columns = [metrics(run, f"{loader}.{place}") for place in range(ROWS_PER_STEP)]
        return [int(column[step]) for step in sorted(columns[0]) for column in columns]


def train(folder: Path, strategy: str) -> str:
    def start(place: RunDir, *arguments: str, attempt: int = 1) -> Ended:
        words = ["--strategy", strategy, *arguments]
        return run("friend_training.py", words, run=place, attempt=attempt, blocked=True)

    whole, stopped = (make_run(folder / name, runtime={"deterministic": True}) for name in ("whole", "run"))
    ended = [start(whole), start(stopped, "--kill", f"1:{KILLED_AT}"), start(stopped, attempt=2)]
    return json.dumps([asdict(one) for one in ended])


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.chaos)])
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Training:
    make = partial(train, strategy=request.param)
    return Training(*made_once(tmp_path_factory, f"friends-training-{request.param}", make))


@pytest.mark.chaos
def test_training_stops_on_both_ranks_and_resumes_in_mid_epoch(training: Training) -> None:
    assert training.undisturbed.codes == [0, 0], training.undisturbed.outputs
    assert training.stopped.codes == [85, 85], training.stopped.outputs
    assert training.resumed.codes == [0, 0], training.resumed.outputs
    step = (outcome(training.run) or {})["step"]
    assert KILLED_AT <= step <= KILLED_AT + 2
    assert (read_json(training.run.progress(2)) or {})["resumed_step"] == step
    assert training.resumed.result()["step"] == training.undisturbed.result()["step"] == EPOCHS * STEPS_PER_EPOCH


@pytest.mark.parametrize("loader", ["table", "stream", "buffered"])
def test_each_row_of_datasets_is_read_once_an_epoch_in_a_new_order(training: Training, loader: str) -> None:
    found = training.rows(training.whole, loader)
    epochs = [found[start : start + ROWS] for start in range(0, EPOCHS * ROWS, ROWS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * EPOCHS
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert training.rows(training.run, loader) == found, "rows are repeated or left out after the resume"


def streams() -> dict[str, Any]:
    import datasets

    plain = datasets.Dataset.from_dict({"number": range(40)}).with_format("torch").to_iterable_dataset(num_shards=4)
    buffered = plain.shuffle(seed=3, buffer_size=8)
    return {
        "plain": plain,
        "shuffled shards": plain.shuffle(seed=3, buffer_size=1),
        "buffered": buffered,
        "buffered, then filtered": buffered.filter(lambda row: True),
        "buffered, then mixed": datasets.interleave_datasets(
            [plain, buffered.take(40)], stopping_strategy="all_exhausted"
        ),
    }


@pytest.mark.filterwarnings(
    "ignore:resuming epoch 1. .* are read and discarded", "ignore:.*set_vital", "ignore:To copy construct"
)
@pytest.mark.parametrize(
    "kind", ["plain", "shuffled shards", "buffered", "buffered, then filtered", "buffered, then mixed"]
)
@pytest.mark.parametrize("stateful", [False, True], ids=["DataLoader", "StatefulDataLoader"])
def test_stream_of_datasets_resumes_at_its_position(kind: str, stateful: bool) -> None:
    """The state of a stream with a shuffle buffer lacks the rows in the buffer: the stream is read from its start."""
    if stateful:
        pytest.importorskip("torchdata")

    def begin() -> PreparedLoader:
        loader = prepared(DataLoader(streams()[kind], batch_size=2), stateful=stateful)
        if loader._stream.bookmarks is not None:
            loader.bookmark_seconds = 0.0
        return loader

    whole = begin()
    expected = [[batch["number"].tolist() for batch in whole] for _ in range(2)][1]
    assert sorted(itertools.chain(*expected)) == sorted(list(range(40)) * (2 if "mixed" in kind else 1))
    stopped = begin()
    assert len(list(stopped)) == len(expected)
    begun = iter(stopped)
    found = [next(begun)["number"].tolist() for _ in range(7)]
    resumed = begin()
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    found += [batch["number"].tolist() for batch in resumed]
    assert found == expected


@pytest.mark.parametrize("model", ["adapters", "hooked", "averaged", "compiled"])
def test_losses_after_a_resume_are_those_of_the_undisturbed_training(training: Training, model: str) -> None:
    expected = metrics(training.whole, model)
    assert list(expected) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert metrics(training.run, model) == expected


def test_averaged_weights_of_a_schedule_free_optimizer_are_evaluated(training: Training) -> None:
    expected = metrics(training.whole, "evaluation")
    assert list(expected) == [STEPS_PER_EPOCH * epoch for epoch in range(1, EPOCHS + 1)]
    assert metrics(training.run, "evaluation") == expected


def test_checkpoint_has_only_the_adapters_of_a_model_with_hooks(training: Training) -> None:
    path = next(training.run.checkpoints.glob("step_*"))
    keys = json.loads(manifest.read_index(path, manifest.read(path)))["tensors"]
    models = [{key for key in keys if key.startswith(f"models.{place}.")} for place in range(4)]
    adapters, hooked, averaged, compiled = models
    assert any("lora_A" in key for key in adapters)
    assert any("base_layer" in key for key in adapters)
    assert hooked == set()
    assert len(list(path.rglob("adapters.pt"))) == 1
    assert "models.2.lm_head.weight" in averaged
    names = ["layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight", "table.weight"]
    assert compiled == {f"models.3.{name}" for name in names}
    assert training.resumed.result()["names"] == names
    assert not any("_orig_mod" in key for key in keys)


SHARDED_TOO = ("pretrained", "adapters", "compiled", "schedule_free")
CHECKS = [f"{name} {strategy}" for name in SHARDED_TOO for strategy in ("ddp", "fsdp")]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    def check(folder: Path) -> str:
        return json.dumps(asdict(run("friend_checks.py", [str(folder)])))

    _, said = made_once(tmp_path_factory, "friends-checks", check)
    return Ended(**json.loads(said))


@pytest.mark.chaos
@pytest.mark.parametrize("check", [*CHECKS, "metrics"])
def test_library_works_on_two_ranks(checked: Ended, check: str) -> None:
    assert checked.codes == [0, 0], "\n".join(checked.outputs)
    assert check in checked.result()["passed"]


TORCHRUNS = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("arguments", "launcher", "size"),
    [
        ("--first hpcaccel", "torchrun", 2),
        ("--first accelerate", "torchrun", 2),
        ("--first hpcaccel --apart", "torchrun", 2),
        ("--first hpcaccel", "srun", 2),
        ("--first hpcaccel --precision bf16", "alone", 1),
        ("--first accelerate --precision bf16", "alone", 1),
    ],
)
def test_accelerate_and_hpcaccel_in_one_process_keep_their_own_states(
    tmp_path: Path, arguments: str, launcher: str, size: int
) -> None:
    words = [*arguments.split(), "--output_dir", str(tmp_path)]
    ended = run("friend_accelerate.py", words, launcher=launcher, size=size)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
    found = ended.result()
    each = ("hpcaccel", "accelerate")
    precision = "bf16" if "bf16" in arguments else "no"
    assert found["ranks"] == {name: [0, size] for name in each}
    assert found["gathered"] == {name: [float(rank) for rank in range(size)] for name in each}
    assert found["accumulation"] == {"hpcaccel": 2, "accelerate": 1}
    assert found["syncing"] == [[[False, True], [True]]] * (64 // 4 // size)
    assert found["module"] == {name: name for name in each}
    assert found["our state"] == [size, precision]
    assert found["their state"] == ["accelerate.state", size, "no"]
    assert found["same data"]
    ours, theirs = (found["weight"][name][0] for name in each)
    assert min(theirs) > 0.6, "it has not learned"
    assert ours == pytest.approx(theirs, rel=1e-5 if precision == "no" else 0.02)
    # A Trainer of transformers, created afterwards, trains on all ranks.
    assert found["trainer"] == [4, size, 4]
    # Neither draws from the global generators or sets variables that the other reads. Under srun, hpcaccel sets those
    # of torchrun, so that libraries such as accelerate, which read no variables of Slurm, find the same ranks.
    assert found["drawn"] == dict.fromkeys(each, False)
    assert found["changed"] == {"hpcaccel": TORCHRUNS if launcher == "srun" else [], "accelerate": []}
    assert found["seeded"]["hpcaccel"] == found["seeded"]["accelerate"]
    # The Accelerator that has created torch's default group destroys it in end_training().
    if size == 1 or "accelerate" in arguments or "--apart" in arguments:
        assert found["afterwards"] == [1.0] * size
    else:
        assert "Default process group has not been initialized" in found["afterwards"]
