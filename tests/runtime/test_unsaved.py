"""A checkpoint is not called bit-exact if the training uses generators or buffers that it does not contain."""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpcaccel.runtime.rng.script_generators import generators_in
from tests.runtime.loader_kinds import collate
from tests.runtime.test_exactness import Training, one_epoch, plain

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*set_vital")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(1),
        lambda: random.Random(1),
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
    ],
    ids=["torch", "python", "numpy", "numpy's old one"],
)
def test_used_generator_of_the_script_is_reported(make: Callable[[], Any]) -> None:
    augments, unused = make(), make()

    def draw() -> None:
        if isinstance(augments, torch.Generator):
            torch.rand((), generator=augments)
        else:
            augments.random()

    training = Training(plain())
    assert one_epoch(training, draw)[-1] == ["generators that are not saved in checkpoints have been used: augments"]
    registered = Training(plain())
    registered.prepared.registered.append(SimpleNamespace(it=augments))  # type: ignore[arg-type]
    assert one_epoch(registered, draw)[-1] == []
    assert unused is not None


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self.transform = SimpleNamespace(rng=np.random.default_rng(3))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(self.transform.rng.random()))


def test_used_generator_of_a_dataset_is_reported() -> None:
    own = Training(DataLoader(Augmented(), batch_size=2, collate_fn=collate))
    assert one_epoch(own)[-1] == ["generators that are not saved in checkpoints have been used: dataset.transform.rng"]
    copied = Training(DataLoader(Augmented(), batch_size=2, num_workers=1))
    copied.exactness.stepped(1, 0)
    assert any("workers draw from copies" in text and "dataset.transform.rng" in text for text in copied.doubts())


def test_state_dict_of_a_map_style_dataset_does_not_hide_its_generator() -> None:
    dataset: Any = Augmented()
    dataset.state_dict = dataset.load_state_dict = dict
    training = Training(DataLoader(dataset, batch_size=2, collate_fn=collate))
    assert one_epoch(training)[-1] == [
        "generators that are not saved in checkpoints have been used: dataset.transform.rng"
    ]


class Augment:
    shared = random.Random(4)

    def __init__(self) -> None:
        self.inner = SimpleNamespace(rng=np.random.default_rng(1))
        self.rng = random.Random(1)

    def __call__(self) -> float:
        return self.rng.random()


def drawn(text: str) -> list[str]:
    return [f"generators that are not saved in checkpoints have been used: {text}"]


def test_used_generators_in_the_scripts_objects_are_reported() -> None:
    aug = Augment()
    assert one_epoch(Training(plain()), lambda: aug())[-1] == drawn("aug.rng")
    assert one_epoch(Training(plain()), lambda: aug.inner.rng.random())[-1] == drawn("aug.inner.rng")
    assert one_epoch(Training(plain()), lambda: aug.shared.random())[-1] == drawn("aug.shared")
    draw = random.Random(2).random
    assert one_epoch(Training(plain()), lambda: draw())[-1] == drawn("draw.self")
    several = [Augment()]
    assert one_epoch(Training(plain()), lambda: several[0]())[-1] == drawn("several.0.rng")
    bound = functools.partial(Augment().__call__)
    assert one_epoch(Training(plain()), bound)[-1] == drawn("between.func.self.rng")


def noise() -> Iterator[float]:
    rng = random.Random(3)
    while True:
        yield rng.random()


def test_used_generator_in_a_generator_function_is_reported() -> None:
    source = noise()
    next(source)
    assert one_epoch(Training(plain()), lambda: next(source))[-1] == drawn("source.rng")


def test_used_generator_of_the_scripts_module_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "augmenting.py").write_text("import random\nrng = random.Random(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    draw = __import__("augmenting").rng.random
    try:
        assert one_epoch(Training(plain()), lambda: draw())[-1] == drawn("augmenting.rng")
    finally:
        del sys.modules["augmenting"]


class Noisy(nn.Module):
    """Draws from its own generator, and counts in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = torch.Generator().manual_seed(1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("mean", torch.zeros(()))

    def draw(self) -> None:
        torch.rand((), generator=self.gen)

    def count(self) -> None:
        self.calls.data += 1  # does not increase the tensor's version

    def remember(self) -> None:
        self.mean += 1

    def make_cache(self) -> None:
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def spoil(self) -> None:
        self.mask = torch.eye(2).to_sparse()


def changed(name: str) -> list[str]:
    return [f"buffers that are not saved (persistent=False) have changed: {name}"]


@pytest.mark.parametrize(
    ("doing", "expected"),
    [
        ("draw", drawn("model.1.0.gen")),
        ("remember", []),
        ("count", changed("model.1.0.calls")),
        ("make_cache", changed("model.1.0.cache")),
        ("spoil", changed("model.1.0.mask")),
    ],
)
def test_changed_generators_and_buffers_of_a_model_are_reported(doing: str, expected: list[str]) -> None:
    training = Training(plain(), models=[nn.Sequential(nn.Linear(1, 1), nn.Sequential(Noisy()))])
    inner: Any = training.prepared.models[0][1][0]  # type: ignore[index]
    assert one_epoch(training, getattr(inner, doing))[-1] == expected


def test_generator_created_after_the_training_began_is_reported() -> None:
    training = Training(plain())
    rng = None

    def begin() -> None:
        nonlocal rng
        rng = rng or np.random.default_rng(training.hooks.step)
        rng.random()

    assert one_epoch(training, begin)[-1] == [
        "generators created after the training began are not saved in checkpoints: rng"
    ]


def test_generators_first_seen_after_a_step_are_reported_once() -> None:
    """As in scripts whose training begins only with their first step."""
    training = Training(plain(), begins=False)
    assert one_epoch(training) == [[]] * 6
    rng = random.Random(1)
    training = Training(plain(), begins=False)
    said = one_epoch(training)
    assert said == [
        ["changes to the script's generators and unsaved buffers before its first step are unknown"],
        *[[]] * 5,
    ]
    assert rng is not None


def test_objects_that_refer_to_each_other_are_searched_once() -> None:
    parts = [SimpleNamespace() for _ in range(100)]
    for part in parts:
        vars(part).update({f"part_{number}": other for number, other in enumerate(parts)})
    parts[-1].rng = random.Random(1)
    begin = time.monotonic()
    assert [name for name, _ in generators_in(parts[0], "it")] == ["it.part_99.rng"]
    assert time.monotonic() - begin < 5  # hours if objects were visited again
