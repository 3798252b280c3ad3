"""Warning about a loss that the script has already divided by the accumulation steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hpcaccel.runtime.training.accumulation import warn_if_divided  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.ones(3, requires_grad=True)
Y = torch.tensor(4.0, requires_grad=True)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: X.sum() / 4,
        lambda: X.sum() * 0.25,
        lambda: 0.25 * X.sum(),
        lambda: X.sum() / torch.tensor(4.0),
        lambda: (X.sum() / 4).double(),
        lambda: torch.div(X.sum(), 4).squeeze(),
    ],
)
def test_loss_divided_by_the_steps_causes_a_warning_with_its_line(loss: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match=r"test_double_scaling_check\.py:\d+: this loss has already been divided by 4"):
        assert warn_if_divided(loss(), 4)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: X.mean(),
        lambda: X.sum() / 3,
        lambda: X.sum() / 4 + 0.5 * X.sum(),
        lambda: X.sum() / Y,
        lambda: X.sum() * Y,
        lambda: X.sum(),
        lambda: torch.ones(2).sum() / 4,
    ],
)
def test_other_losses_cause_no_warning(loss: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_if_divided(loss(), 4)
        assert not warn_if_divided(X.sum() / 1, 1)
