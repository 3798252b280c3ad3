"""Sharded models train whatever type they return, or raise an error with the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hpcaccel.runtime.parallel.fsdp_outputs import LARGEST, ShardedModels, _add_hooks, tensors_in
from tests.runtime.ranks import run_ranks


@pytest.mark.parametrize("finder", ["torch's", "tree_flatten"])
def test_sharded_models_train_through_outputs_of_any_class(finder: str) -> None:
    """Also with releases of torch that find tensors by tree_flatten."""
    ended = run_ranks("outputs.py", [finder])
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    found = ended.result()
    assert len(found["results"]) == 44
    for name, (difference, way) in found["results"].items():
        assert difference < 1e-12, name
        assert way > 1e-4, name
    for words in found["refused"]:
        assert (
            " returned an object of type function, in which no tensor with a grad_fn was found. Return the tensors"
            in words
        )
    assert found["refused"][0].startswith(
        "FSDP2 could not restore the sharded model's parameters in the backward pass. Block"
    )
    assert found["refused"][1].startswith("the gradients of 2 sharded parameters (first.weight, first.bias) were not")


def test_each_output_tensor_is_found_once() -> None:
    x = torch.ones(2, requires_grad=True)
    plain, hidden = x * 2, x * 3
    output = {"loss": plain, "more": (plain, [SimpleNamespace(value=hidden, again=plain)]), "leaf": x, "n": 3}
    output["itself"] = output
    tensors, is_whole = tensors_in(output)
    assert [id(tensor) for tensor in tensors] == [id(plain), id(hidden)]
    assert is_whole


def test_search_of_a_very_large_output_is_cut_off() -> None:
    tensor = torch.ones(1, requires_grad=True) * 2
    assert tensors_in([[tensor], *([] for _ in range(LARGEST - 3))]) == ([tensor], True)
    assert tensors_in([[tensor], *([] for _ in range(LARGEST))]) == ([], False)


class Sharded(torch.nn.Linear):
    """The part of a sharded module that the hook uses."""

    def _get_fsdp_state(self) -> SimpleNamespace:
        return SimpleNamespace(_pre_backward=lambda grad: grad)


def test_error_says_that_the_output_search_was_cut_off() -> None:
    models = ShardedModels()
    small, large = Sharded(1, 1), Sharded(1, 1)
    models.modules += [large, small]
    tensor = small(torch.ones(1))
    _add_hooks(large, (), SimpleNamespace(loss=tensor, all=[[] for _ in range(LARGEST)]))
    assert "an object of type SimpleNamespace, in which only the first 10,000 objects were searched" in (
        models.cause() or ""
    )
    _add_hooks(small, (), lambda: tensor)
    assert "Sharded returned an object of type function, in which no tensor with" in (models.cause() or "")
    _add_hooks(small, (), tensor)
    _add_hooks(large, (), SimpleNamespace(loss=tensor))
    assert models.cause() is None
