"""``Exactness``: when a checkpoint is bit-exact, and the reasons that it gives when it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hpcaccel.runtime.checkpointing.prepared_objects import PreparedObjects
from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.training.exactness import Exactness
from tests.runtime.loader_kinds import KINDS
from tests.runtime.test_data import Hooks, prepared

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*set_vital")]


class Training:
    """A script with its loaders, and the part of the loop that counts steps."""

    def __init__(
        self,
        *loaders: DataLoader[Any],
        deterministic: bool = True,
        begins: bool = True,
        models: Sequence[nn.Module] = (),
        **options: Any,
    ) -> None:
        self.hooks = Hooks()
        self.in_use = LoadersInUse()
        self.prepared = PreparedObjects(models=list(models))
        self.exactness = Exactness(
            settings=Settings(deterministic=deterministic),
            prepared=self.prepared,
            in_use=self.in_use,
            device=torch.device("cpu"),
        )
        self.loaders = [self.prepare(loader, **options) for loader in loaders]
        if begins:
            self.exactness.begin()

    def prepare(self, loader: DataLoader[Any], **options: Any) -> PreparedLoader:
        made = prepared(loader, hooks=self.hooks, in_use=self.in_use, **options)
        self.prepared.loaders.append(made)
        return made

    def step(self) -> None:
        self.exactness.has_gradients = True
        self.hooks.step += 1
        self.exactness.stepped(self.hooks.step, 0)

    def doubts(self) -> list[str]:
        return self.exactness.doubts(self.hooks.step, 0)


def plain(samples: int = 12, **options: Any) -> DataLoader[Any]:
    return DataLoader(list(range(samples)), batch_size=2, **options)  # type: ignore[arg-type]


def one_epoch(training: Training, between: Callable[[], object] = lambda: None) -> list[list[str]]:
    """The doubts at a save after each step, taken when the next batch is requested."""
    said: list[list[str]] = []
    training.hooks.step_is_over = lambda: said.append(training.doubts()) if training.hooks.step else None  # type: ignore[method-assign]
    for _ in training.loaders[0]:
        between()
        training.step()
    return said


def test_steps_on_a_prepared_loader_are_exact() -> None:
    assert one_epoch(Training(plain())) == [[]] * 6


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.loader.get("num_workers", 0) == 0])
def test_steps_on_every_known_kind_of_loader_are_exact(name: str) -> None:
    if "torchdata" in name:
        pytest.importorskip("torchdata")
    kind = KINDS[name]
    expected = ["it is unknown how OwnLoader reads its data"] if kind.own_class == "another" else []
    assert set(map(tuple, one_epoch(Training(kind.make(), **kind.options)))) == {tuple(expected)}


def test_missing_determinism_is_the_only_reason_given() -> None:
    training = Training(plain(), deterministic=False)
    training.step()
    assert training.doubts() == ["saved without runtime.deterministic"]


def test_steps_without_a_prepared_loader_or_its_batch_are_not_exact() -> None:
    training = Training()
    training.step()
    assert training.doubts() == ["no DataLoader was prepared"]
    training = Training(plain())
    training.step()
    assert training.doubts() == ["step 1 took no batch from a prepared DataLoader"]


def test_batches_of_a_loader_outside_the_checkpoint_are_not_exact() -> None:
    """``prepare_data_loader`` creates such loaders."""
    training = Training(plain())
    outside = training.prepare(plain())
    training.prepared.loaders.remove(outside)
    for _ in outside:
        training.step()
        assert training.doubts()[0] == "step 1 took no batch from a prepared DataLoader"
        break


def test_second_step_on_one_batch_is_not_exact() -> None:
    training = Training(plain())
    for _ in training.loaders[0]:
        training.step()
        assert training.doubts() == []
        training.step()
        assert training.doubts() == ["step 2 took no batch from a prepared DataLoader"]
        break


def test_batch_kept_for_the_next_step_is_not_exact() -> None:
    training = Training(plain())
    batches = iter(training.loaders[0])
    following = next(batches)
    for _ in range(3):
        _, following = following, next(batches)
        training.step()
    text = "the steps of an epoch used different numbers of batches (2, then 1): a batch may"
    assert training.doubts()[0].startswith(text)


def test_skipped_batch_gives_the_same_reason_as_a_kept_batch() -> None:
    training = Training(plain())
    batches = iter(training.loaders[0])
    next(batches)
    for _ in batches:
        training.step()
    assert training.doubts()[-1].endswith("a batch that is kept is not saved")


def test_last_accumulation_of_an_epoch_may_have_fewer_batches() -> None:
    training = Training(plain())
    for number, _ in enumerate(training.loaders[0]):
        if number % 4 == 3 or training.loaders[0].at_last_batch:
            training.step()
            assert training.doubts() == []


def test_saves_in_the_middle_of_a_step_are_not_exact() -> None:
    training = Training(plain())
    assert "saved before the first step" in training.doubts()[0]
    batches = iter(training.loaders[0])
    next(batches)
    training.step()
    assert training.doubts() == []
    next(batches)
    assert training.doubts() == ["saved after a batch was read and before its step: a resume skips this batch"]
    training.exactness.has_gradients = True
    assert "gradients are not saved" in training.doubts()[0]
    training.step()
    assert training.doubts() == []
    training.exactness.in_backward = True
    assert "after its forward pass" in training.doubts()[0]


def test_save_within_an_evaluation_is_not_exact_and_after_it_is_exact() -> None:
    training = Training(plain(), plain(4))
    for _ in training.loaders[0]:
        training.step()
        for _ in training.loaders[1]:
            assert "after a batch was read and before its step" in training.doubts()[0]
        assert training.doubts() == []


def test_loader_and_its_skipping_view_count_as_one_loader() -> None:
    training = Training(plain())
    for loader in (training.loaders[0].skipping(2), training.loaders[0]):
        for _ in loader:
            training.step()
            assert training.doubts() == []


def test_loaders_used_one_after_the_other_are_not_exact() -> None:
    training = Training(plain(), plain())
    for _ in training.loaders[0]:
        training.step()
    assert training.doubts() == []
    for _ in training.loaders[1]:
        training.step()
        assert "one after the other" in training.doubts()[0]


def test_partly_read_unprepared_loader_is_not_exact() -> None:
    training = Training(plain())
    other = iter(plain())
    next(other)
    assert one_epoch(training)[0] == ["a DataLoader that was not prepared is partly read"]
    list(other)
    for _ in plain():
        break
    assert one_epoch(Training(plain()))[0] == []


def test_changes_of_a_loader_since_the_save_are_listed() -> None:
    saved = Training(plain()).loaders[0].state_dict()
    for loader, expected in (
        (plain(), ()),
        (plain(num_workers=2), ("DataLoader workers: False at the save, True now",)),
        (plain(14), ("DataLoader samples: 12 at the save, 14 now",)),
    ):
        resumed = Training(loader).loaders[0]
        resumed.load_state_dict(saved)
        assert resumed.changes == expected
