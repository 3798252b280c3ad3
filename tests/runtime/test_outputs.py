"""Sharded models are trained whatever they return, or say why they cannot be."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hpcaccel.runtime.parallel.fsdp_outputs import LARGEST, tensors_in
from tests.runtime.ranks import run_ranks


def test_sharded_models_learn_through_objects_of_any_class() -> None:
    ended = run_ranks("outputs.py")
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    found = ended.result()
    assert len(found["results"]) == 36
    for name, (difference, way) in found["results"].items():
        assert difference < 1e-12, name
        assert way > 1e-4, name
    for words in found["refused"]:
        assert " returned function, in which no tensor is found that leads back to it. Return the tensors" in words
    assert found["refused"][0].startswith("the backward pass has not found the sharded model's parameters. Block")
    assert found["refused"][1].startswith("2 sharded parameters (first.weight, first.bias) have gradients that are not")


def test_what_torch_finds_by_itself_is_no_hidden_tensor() -> None:
    x = torch.ones(2, requires_grad=True)
    plain, hidden = x * 2, x * 3
    output = {"loss": plain, "more": (plain, [SimpleNamespace(value=hidden, again=plain)]), "leaf": x, "n": 3}
    assert [(tensor is plain, is_hidden) for tensor, is_hidden in tensors_in(output)] == [(True, False), (False, True)]
    output["itself"] = output
    assert len(list(tensors_in(output))) == 2


def test_an_output_that_leads_to_very_much_is_not_looked_through() -> None:
    tensor = torch.ones(1, requires_grad=True) * 2
    assert not list(tensors_in([[tensor], *([] for _ in range(LARGEST))]))
