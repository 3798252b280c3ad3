"""Context parallelism: sequences split over ranks, with the results of one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel import context_parallel as module
from hpcaccel.runtime.parallel.context_parallel import adapt_model, context_parallel
from hpcaccel.runtime.parallel.split_attention import positions

from .ranks import ROOT, run_ranks

pytestmark = pytest.mark.torch

PAGE = (ROOT / "docs" / "context-parallel.md").read_text()


def train(ranks: int, **how: Any) -> dict[str, Any]:
    preload = ("transformers",) if how.get("model") else ()
    ended = run_ranks("context.py", [json.dumps(how)], size=ranks, preload=preload)
    assert ended.codes == [0] * ranks, "\n".join(ended.outputs)
    return ended.result()


def is_like_one_process(found: dict[str, Any]) -> bool:
    close: bool = found["losses"] == pytest.approx(found["expected"], rel=1e-5) and found["weights"] < 1e-5
    return close and len(set(found["losses"])) > len(found["losses"]) // 2


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "how", "kind", "batches"),
    [
        (2, {"sizes": {"cp_size": 2}}, "DTensor", 1),
        (4, {"sizes": {"cp_size": 2, "dp_replicate_size": 2}}, "DTensor", 2),
        (2, {"sizes": {"cp_size": 2}, "strategy": "ddp", "length": 6}, "Parameter", 1),
        pytest.param(4, {"sizes": {"cp_size": 4}}, "DTensor", 1, marks=pytest.mark.chaos),
        pytest.param(4, {"sizes": {"cp_size": 2}, "strategy": "ddp"}, "Parameter", 2, marks=pytest.mark.chaos),
    ],
)
def test_model_trains_as_on_one_process(ranks: int, how: dict[str, Any], kind: str, batches: int) -> None:
    """Also where a sequence cannot be cut into twice as many pieces (6 tokens), and the parts are contiguous."""
    found = train(ranks, **how)
    assert is_like_one_process(found), found
    assert found["shards"] == [kind]
    assert found["distinct_batches"] == batches
    assert found["layout"]["context"] == how["sizes"]["cp_size"]


def test_checkpoint_of_shards_and_sequence_parts_continues_anywhere(tmp_path: Path) -> None:
    saved = train(4, sizes={"cp_size": 2, "dp_shard_size": 2}, save=str(tmp_path))
    assert is_like_one_process(saved), saved
    assert saved["type"] == "FSDP"
    for ranks, sizes in ((4, {"cp_size": 2, "dp_shard_size": 2}), (2, {})):
        found = train(ranks, sizes=sizes, load=str(tmp_path))
        assert len(found["losses"]) == 1, "it continues after the second step"
        assert is_like_one_process(found), found


@pytest.mark.chaos
def test_model_of_transformers_gets_positions_and_no_mask() -> None:
    pytest.importorskip("transformers")
    found = train(2, sizes={"cp_size": 2}, model="llama", mask=True)
    assert is_like_one_process(found), found


def test_length_that_cannot_be_divided_is_an_error_on_every_rank() -> None:
    ended = run_ranks("context.py", [json.dumps({"sizes": {"cp_size": 2}, "length": 15})], size=2)
    assert 0 not in ended.codes
    for output in ended.outputs:
        assert "sequences of 15 tokens cannot be divided over 2 ranks. Pad them to 16 tokens" in output


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("length", "sequences of 15 tokens cannot be divided over 2 ranks. Pad them to 16 tokens"),
        ("rows", r"buffers differ: shapes \[\(2, 16\)\] and \[\(3, 16\)\]"),
        ("values", "with different values. Pass the loader to prepare"),
    ],
)
def test_bad_input_of_one_rank_is_an_error_on_every_rank_of_its_group(bad: str, message: str) -> None:
    ended = run_ranks("context_of_one_rank.py", [bad], size=2)
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    for output in ended.outputs:
        assert re.search(message, output)


def test_ranks_of_a_group_draw_the_same_random_samples() -> None:
    ended = run_ranks("context_of_one_rank.py", ["draws"], size=4)
    assert ended.codes == [0] * 4, "\n".join(ended.outputs)
    first, second, third, fourth = ended.result()["drawn"]
    assert first == second
    assert third == fourth
    assert first != third


@pytest.mark.chaos
def test_first_program_of_the_page_runs_with_the_command_of_the_page(tmp_path: Path) -> None:
    (program, *_) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "long.py").write_text(program)
    (line,) = re.findall(r"`hpcaccel (launch --cpu[^`]*)`", PAGE)
    command = [sys.executable, "-m", "hpcaccel", *line.split()]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split("loss")[1]) < 5


def test_block_changes_nothing_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    tokens = torch.arange(5)
    with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[0]):
        assert tokens.tolist() == [0, 1, 2, 3, 4]
    assert accelerator.context_parallel_rank == 0
    assert accelerator.deepspeed_ulysses_dl_adapter("loader", None) == "loader"
    accelerator.end_training()


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_tokens_are_dealt_out_as_by_torch() -> None:
    assert positions(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert positions(6, 2).tolist() == [[0, 1, 2], [3, 4, 5]]
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    for length, size in ((8, 2), (24, 3), (32, 4)):
        order = balancer._HeadTailLoadBalancer(length, size, "cpu")._generate_indices()
        assert positions(length, size).flatten().tolist() == order.flatten().tolist()


class Mesh:
    """A stand-in for the dimension of two ranks."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type

    def size(self) -> int:
        return 2

    def get_group(self) -> None:
        return None


TOKENS = torch.zeros(2, 8)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no ranks to compare buffers with."""
    monkeypatch.setattr(module, "_from_all", lambda report, group: [report])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got 0 buffers and 0 dimensions"),
        ({"buffers": [TOKENS], "buffer_seq_dims": [1, 1]}, "got 1 buffers and 2 dimensions"),
        ({"buffers": [TOKENS], "buffer_seq_dims": [2]}, r"has shape \(2, 8\) and no dimension 2"),
        ({"buffers": [torch.zeros(8, requires_grad=True)], "buffer_seq_dims": [0]}, "requires a gradient"),
        ({"buffers": [TOKENS, torch.zeros(6)], "buffer_seq_dims": [1, 0]}, r"different lengths: \[8, 6\]"),
        ({"buffers": [TOKENS[:, :5]], "buffer_seq_dims": [1]}, "Pad them to 8 tokens"),
        ({"buffers": [TOKENS], "buffer_seq_dims": [1], "no_restore_buffers": {TOKENS[:1]}}, "is not in buffers"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_buffers_that_cannot_be_cut_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message), context_parallel(Mesh(), **given):  # type: ignore[arg-type]
        pass


@pytest.fixture
def of_torch(monkeypatch: pytest.MonkeyPatch, alone: None) -> list[Any]:
    """torch's context and its choice of a strategy, replaced by stand-ins that record their arguments."""
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental import _attention

    calls: list[Any] = []

    @contextmanager
    def stand_in(mesh: Any, **given: Any) -> Iterator[None]:
        calls.append(given)
        yield

    monkeypatch.setattr(experimental, "context_parallel", stand_in)
    monkeypatch.setattr(_attention, "set_rotate_method", calls.append)
    return calls


def attend(**options: Any) -> torch.Tensor:
    query = torch.ones(1, 1, 4, 2)
    return F.scaled_dot_product_attention(query, query, query, **options)


def test_gpus_use_the_context_of_torch_and_calls_are_checked(of_torch: list[Any]) -> None:
    unsplit, places = torch.zeros(2, 8), torch.zeros(8)
    plain = F.scaled_dot_product_attention
    with context_parallel(
        Mesh("cuda"),  # type: ignore[arg-type]
        strategy="alltoall",
        buffers=[unsplit, places],
        buffer_seq_dims=[-1, 0],
        no_restore_buffers={places},
    ):
        assert attend(is_causal=True).shape == (1, 1, 4, 2)
        with pytest.raises(RuntimeMisuse, match="supports no attention mask"):
            attend(attn_mask=torch.ones(4, 4, dtype=torch.bool))
        with pytest.raises(RuntimeMisuse, match="4 queries and 3 keys"):
            F.scaled_dot_product_attention(torch.ones(1, 1, 4, 2), *[torch.ones(1, 1, 3, 2)] * 2)
        nested = context_parallel(Mesh("cuda"), buffers=[unsplit], buffer_seq_dims=[1])  # type: ignore[arg-type]
        with pytest.raises(RuntimeMisuse, match="inside another"), nested:
            pass
    strategy, given = of_torch
    assert strategy == "alltoall"
    assert given["buffers"][0] is unsplit
    assert given["buffer_seq_dims"] == [1, 0]
    assert [one is places for one in given["no_restore_buffers"]] == [True]
    assert F.scaled_dot_product_attention is plain


def test_block_without_attention_is_warned_of(of_torch: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with context_parallel(Mesh("cuda"), buffers=[TOKENS], buffer_seq_dims=[1]):  # type: ignore[arg-type]
        pass
    assert of_torch[0] == "allgather"
    assert "did not attend to those of other ranks" in caplog.text


class Reader(nn.Module):
    """Has a config as models of transformers have."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.config.get_text_config = lambda: self.config
        self.self_attn = nn.Identity()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        return position_ids


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_attn_implementation": "eager"}, "needs attn_implementation='sdpa', and this Reader has 'eager'"),
        ({"_attn_implementation": "flash_attention_2"}, "from_pretrained"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of other kinds: sliding_attention"),
        ({"sliding_window": 4}, "layers of other kinds: sliding_attention"),
    ],
)
def test_model_whose_attention_cannot_be_split_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeMisuse, match=message):
        adapt_model(Reader(**config))


def test_positions_are_given_only_in_the_block(of_torch: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reader(_attn_implementation="sdpa", sliding_window=None)
    for _ in range(2):
        adapt_model(model)  # as in two calls of prepare
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 2)
    tokens = torch.zeros(3, 4, dtype=torch.long)
    assert model(tokens) is None
    with context_parallel(Mesh("cuda"), buffers=[TOKENS], buffer_seq_dims=[1]):  # type: ignore[arg-type]
        assert model(tokens).tolist() == [[2, 3, 4, 5]] * 3
        assert model(tokens, position_ids=tokens) is tokens
        changed = module._without_mask(nn.Identity(), (), {"attention_mask": tokens})
        assert changed == ((), {"attention_mask": None, "is_causal": True})
    assert module._without_mask(nn.Identity(), (), {"attention_mask": tokens}) is None
