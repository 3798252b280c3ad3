"""Pipelines on any number of ranks, compared with the whole model on each rank."""

import sys

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from hpcaccel import PartialState, prepare_pippy
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.inference import build_pipeline, pippy_forward

state = PartialState(cpu=True)
size, rank = state.num_processes, state.process_index
is_last = state.is_last_process


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, mask=None):
        x = x + self.dropout(torch.tanh(self.linear(x)))
        return x if mask is None else x * mask.unsqueeze(-1)


class Chain(nn.Module):
    """The layers are in a list, as those of a transformer are."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Branches(Chain):
    """Each layer uses the inputs, and the output is nested and has constants. One input is not used at all."""

    def forward(self, ids, mask=None, unused=None, *, scale=None, twice=False):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.head(x) * (2 if twice else 1)
        if scale is not None:
            x = x * scale
        return {"logits": x, "rest": [ids.sum(1), None, ("name", 3)]}


class Unlucky(Chain):
    def forward(self, ids):
        return super().forward(ids) if int(ids.sum()) > 3 else self.embed(ids)


class WithLoss(Chain):
    def forward(self, ids):
        x = super().forward(ids)
        return x.mean(), x


def made(kind):
    torch.manual_seed(0)
    return kind().eval()


def ids(rows):
    return torch.randint(0, 20, (rows, 5), generator=torch.Generator().manual_seed(rows))


def check(found, right, *, everywhere=False):
    if is_last or everywhere:
        (ours, form), (theirs, same) = tree_flatten(found), tree_flatten(right)
        assert form == same
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other)
            else:
                assert one == other
    else:
        assert found is None


@torch.no_grad()
def any_number_of_rows():
    for chunk_rows, num_chunks, gather in ((1, None, False), (3, None, True), (2, 3, False)):
        whole = made(Chain)
        model = prepare_pippy(made(Chain), example_args=(ids(chunk_rows),), num_chunks=num_chunks, gather_output=gather)
        assert len(model.hf_split_points) == size - 1
        for rows in (1, 2, 5, 2 * size, 13):
            check(model(ids(rows)), whole(ids(rows)), everywhere=gather)
        # Only the inputs of rank 0 count.
        check(model(ids(7)) if rank == 0 else model(), whole(ids(7)), everywhere=gather)


@torch.no_grad()
def inputs_for_later_stages_and_nested_outputs():
    points = ["layers.1", "layers.2", "head"][-(size - 1) :]
    whole = made(Branches)
    batch = {"mask": torch.arange(25).reshape(5, 5) % 3 > 0, "scale": torch.rand(5, 1, 1), "unused": ids(5)}
    batch["scale"] = torch.linspace(1, 2, 5).reshape(5, 1, 1)
    example = {name: value[:2] for name, value in batch.items()}
    for gather in (False, True):
        model = prepare_pippy(
            made(Branches),
            split_points=points,
            example_args=(ids(2),),
            example_kwargs={"twice": True, **example},
            gather_output=gather,
        )
        assert model.hf_split_points == points
        right = whole(ids(5), twice=True, **batch)
        check(model(ids(5), twice=True, **batch), right, everywhere=gather)
        # Positional and keyword arguments are matched by the signature.
        positional = (ids(5), batch["mask"], batch["unused"])
        check(model(*positional, scale=batch["scale"], twice=True), right, everywhere=gather)
    with pytest.raises(RuntimeMisuse, match="built for the argument True, but called with False"):
        model(ids(5), twice=False, **batch)
    with pytest.raises(
        RuntimeMisuse, match="built for the arguments ids, mask, unused, scale, twice, but called with ids:"
    ):
        model(ids(5))


def evaluation_mode():
    """In training mode, too, as models are right after their construction; and without gradients."""
    whole = made(Chain)
    model = prepare_pippy(made(Chain).train(), example_args=(ids(2),), gather_output=True)
    assert model.training
    assert all(layer.dropout.training for layer in model.layers)
    found = model(ids(4))
    check(found, whole(ids(4)), everywhere=True)
    assert not found.requires_grad
    model.eval()
    with torch.inference_mode():
        check(model(ids(4)), whole(ids(4)), everywhere=True)
    model.forward = model._original_forward
    check(model(ids(4)), whole(ids(4)), everywhere=True)


def no_example():
    with pytest.raises(RuntimeMisuse, match="needs an example of the model's inputs"):
        prepare_pippy(made(Chain))
    for example, name in ((ids(2), "Tensor"), ({"ids": ids(2)}, "dict")):
        with pytest.raises(RuntimeMisuse, match=rf"example_args must be a tuple: .* It is a {name}"):
            prepare_pippy(made(Chain), example_args=example)
    with pytest.raises(RuntimeMisuse, match="does not take these arguments: missing a required argument: 'ids'"):
        prepare_pippy(made(Branches), example_kwargs={"mask": ids(2)})
    with pytest.raises(
        RuntimeMisuse, match=r"same number of rows \(dimension 0\): they are int64\[2, 5\], int64\[3, 5\]"
    ):
        prepare_pippy(made(Branches), example_args=(ids(2), ids(3)))


def wrong_settings():
    def refused(match, kind=Chain, **options):
        model = made(kind)
        before = dict(model.layers[1].__dict__)
        with pytest.raises(RuntimeMisuse, match=match):
            prepare_pippy(model, example_args=(ids(2),), **options)
        assert "forward" not in model.__dict__
        assert model.layers[1].__dict__.keys() == before.keys()

    refused(r"split_points has 0 module names \(none\)", split_points=[])
    refused(r"split_points has 5 module names", split_points=[f"layers.{n}" for n in range(4)] + ["head"])
    points = [f"layers.{n}" for n in range(size - 2)]
    refused("no module 'heat'. Did you mean 'head'", split_points=[*points, "heat"])
    refused("make .* stages instead of .*: 'layers' is called 0 times", split_points=[*points, "layers"])
    refused("pass 'auto' or a list", split_points="balanced")
    refused("num_chunks=0", num_chunks=0)
    refused("torch.export cannot trace Unlucky: ", kind=Unlucky)
    refused(r"returns a tensor of shape \[\] for 2 rows.*labels", kind=WithLoss)
    with pytest.raises(RuntimeMisuse, match=r"prepare_pippy of [23] chunks of 2 rows"):
        prepare_pippy(made(Chain), example_args=(ids(2),), num_chunks=2 + (rank == 0))
    with pytest.raises(RuntimeMisuse, match="meta device"):
        prepare_pippy(made(Chain).to("meta"), example_args=(ids(2),))
    with pytest.raises(RuntimeMisuse, match=r"has 1 part with parameters .* start at most 1 rank$"):
        prepare_pippy(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), example_args=(torch.rand(2, 6),))


def wrong_calls():
    """An error on rank 0 is one on all ranks, and the pipeline remains usable."""
    model = prepare_pippy(made(Chain), example_args=(ids(2),))
    with pytest.raises(RuntimeMisuse, match="pipeline already"):
        prepare_pippy(model, example_args=(ids(2),))
    with pytest.raises(RuntimeMisuse, match=r"for rows of int64\[5\], but called with int64\[4\]"):
        model(ids(3)[:, :4])
    with pytest.raises(RuntimeMisuse, match=r"for rows of int64\[5\], but called with float32\[5\]"):
        model(ids(3).float())
    with pytest.raises(RuntimeMisuse, match="does not take these arguments"):
        model()
    with pytest.raises(RuntimeMisuse, match=r"number of rows \(dimension 0\): they are int64\[0, 5\]"):
        model(ids(3)[:0])
    check(model(ids(3)), made(Chain)(ids(3)))


@torch.no_grad()
def helpers():
    whole = made(Chain)
    points = [f"layers.{n}" for n in range(4)][: size - 1]
    schedule = build_pipeline(made(Chain), points, (ids(2),), {}, 2)
    for gather in (False, True):
        check(pippy_forward(schedule.step, 2, gather, ids(7)), whole(ids(7)), everywhere=gather)

    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    pipe = pipeline(made(Chain), (ids(2),), split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
    torchs = ScheduleGPipe(pipe.build_stage(rank, device=state.device), 3)
    for gather in (False, True):
        check(pippy_forward(torchs.step, 3, gather, ids(5)), whole(ids(5)), everywhere=gather)
    with pytest.raises(RuntimeMisuse, match="without a tensor"):
        pippy_forward(torchs.step, 3, False, "text")


@torch.no_grad()
def alone():
    whole = made(Chain)
    model = prepare_pippy(made(Chain).train(), example_args=(ids(2),), gather_output=True)
    assert model.hf_split_points == []
    for rows in (1, 5):
        assert torch.equal(model(ids(rows)), whole(ids(rows)))
    assert torch.equal(model(ids=ids(3)), whole(ids(3)))
    no_example()


SEVERAL = (
    any_number_of_rows, inputs_for_later_stages_and_nested_outputs, evaluation_mode, no_example, wrong_settings,
    wrong_calls, helpers,
)  # fmt: skip

for one in SEVERAL if size > 1 else (alone,):
    if len(sys.argv) == 1 or one.__name__ in sys.argv[1:]:
        one()
        state.wait_for_everyone()
        state.print(f"passed {one.__name__}")
