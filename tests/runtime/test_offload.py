"""Models whose weights are in CPU memory or on disk: results equal to those of the whole model, files, hooks."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.big_modeling import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)
from hpcaccel.runtime.offload import mapped_tensors
from hpcaccel.runtime.offload.aligned_devices import offload_hook
from hpcaccel.runtime.offload.mapped_tensors import OffloadError
from hpcaccel.runtime.offload.read_ahead import ReadAhead
from hpcaccel.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    align_module_device,
    find_tied_parameters,
    has_offloaded_params,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    set_module_tensor_to_device,
)
from tests.runtime.ranks import run_ranks

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.wide = nn.Linear(24, 40)
        self.narrow = nn.Linear(40, 24)
        self.scale = nn.Parameter(torch.rand(24))
        self.register_buffer("shift", torch.rand(24))
        self.register_buffer("mask", torch.rand(24), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.narrow(torch.relu(self.wide(self.norm(hidden))))
        found: torch.Tensor = hidden + self.scale * inner * self.mask + self.shift
        return found


class Model(nn.Module):
    """Parameters on every level, buffers of both kinds, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(24, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(hidden)
        return found


WORDS = torch.arange(12) * 7 % 30
PARTS = ("embedding", "blocks.0", "blocks.1.norm", "blocks.1", "head")


def made(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().eval()


@torch.no_grad()
def result(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(WORDS)
    return found


def saved(folder: Path, model: nn.Module, *, shards: bool = True) -> Path:
    """A checkpoint as libraries write it: the tied weight once, several safetensors files and an index."""
    from safetensors.torch import save_file

    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    folder.mkdir()
    if not shards:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    places = {}
    for number in range(3):
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {key: state[key].contiguous() for key in list(state)[number::3]}
        save_file(part, folder / name, metadata={"format": "pt", "filler": "x" * number * 8})
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def offloaded(model: nn.Module) -> set[str]:
    return {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.is_meta}


# -- results


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("preload", [(), ("Block",)])
def test_cpu_and_disk_offload_give_equal_results_and_the_weights_back(
    tmp_path: Path, buffers: bool, preload: tuple[str, ...]
) -> None:
    expected = result(made())
    for kind in ("cpu", "disk"):
        model = made()
        if kind == "cpu":
            cpu_offload(model, torch.device("cpu"), offload_buffers=buffers, preload_module_classes=preload)
        else:
            disk_offload(model, tmp_path, offload_buffers=buffers, preload_module_classes=preload)
        assert offloaded(model) == {name for name, _ in made().named_parameters(remove_duplicate=False)}
        assert model.blocks[0].shift.is_meta is buffers
        assert not model.blocks[0].mask.is_meta
        for _ in range(3):
            assert torch.equal(result(model), expected)
        remove_hook_from_submodules(model)
        assert not offloaded(model)
        assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]
        assert torch.equal(result(model), expected)
        assert "forward" not in model.__dict__


@pytest.mark.parametrize("shards", [True, False])
@pytest.mark.parametrize("on_disk", [PARTS, ("blocks",), ("embedding",), ("head", "blocks.0"), ("",)])
def test_loaded_and_distributed_model_gives_equal_results(
    tmp_path: Path, shards: bool, on_disk: tuple[str, ...]
) -> None:
    checkpoint = saved(tmp_path / "saved", made(), shards=shards)
    with init_empty_weights():
        model = Model()
    parts = {"embedding": "cpu", "blocks": "cpu", "head": "cpu"}
    places = {**({} if "" in on_disk else parts), **dict.fromkeys(on_disk, "disk")}
    load_checkpoint_and_dispatch(model.eval(), checkpoint, places, offload_folder=tmp_path / "offloaded")
    fresh = made(1)
    for name, _ in fresh.named_buffers():
        if name.endswith("mask"):  # not in checkpoints
            set_module_tensor_to_device(model, name, "cpu", value=made().get_buffer(name))
    assert offloaded(model)
    assert not offloaded(model) - {
        name for name, _ in fresh.named_parameters(remove_duplicate=False) if name.startswith(on_disk)
    }
    for _ in range(2):
        assert torch.equal(result(model), result(made()))
    assert model.hf_device_map == places


def test_weights_in_safetensors_files_are_not_copied_into_the_folder(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "saved", made())
    with init_empty_weights():
        model = Model()
    load_checkpoint_and_dispatch(model, checkpoint, {"": "disk"}, offload_folder=tmp_path / "offloaded")
    assert os.listdir(tmp_path / "offloaded") == ["index.json"]
    index = json.loads((tmp_path / "offloaded/index.json").read_text())
    assert index["head.weight"] == index["embedding.weight"]
    assert {Path(entry["safetensors_file"]).parent for entry in index.values()} == {checkpoint.resolve()}


def test_other_dtype_is_that_of_the_loaded_model(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "saved", made())
    expected = result(made().to(torch.bfloat16))
    for places in ({"": "cpu"}, {"": "disk"}):
        with init_empty_weights():
            model = Model().eval()
        for block, right in zip(model.blocks, made().blocks, strict=True):
            block.mask = right.mask.to(torch.bfloat16)
        load_checkpoint_and_dispatch(model, checkpoint, places, offload_folder=tmp_path / "o", dtype="bfloat16")
        assert torch.equal(result(model), expected)


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=3, n_head=4)
        return transformers.GPT2LMHeadModel(config).eval()  # type: ignore[no-any-return]
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_with_tied_embeddings_compute_and_generate_equally(tmp_path: Path, kind: str) -> None:
    words = torch.arange(3, 13)[None]
    whole: Any = transformer(kind)
    with torch.no_grad():
        logits = whole(words).logits
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    text = whole.generate(words, **options)
    whole.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1

    def check(model: Any) -> None:
        with torch.no_grad():
            assert torch.equal(model(words).logits, logits)
        assert torch.equal(model.generate(words, **options), text)

    disked = disk_offload(transformer(kind), tmp_path / "disk")
    check(disked)
    assert os.path.samefile(*(tmp_path / "disk" / f"{name}.dat" for name in find_tied_parameters(whole)[0]))
    check(cpu_offload(transformer(kind), torch.device("cpu")))
    with init_empty_weights():
        model: Any = transformer(kind)
    model.tie_weights()
    base = model.base_model_prefix
    on_disk, in_memory = (
        ("h wte", "ln_f wpe") if kind == "gpt2" else ("layers.1 layers.2 embed_tokens", "layers.0 norm")
    )
    parts = {**dict.fromkeys(on_disk.split(), "disk"), **dict.fromkeys(in_memory.split(), "cpu")}
    places = {**{f"{base}.{name}": device for name, device in parts.items()}, "lm_head": "disk"}
    check(load_checkpoint_and_dispatch(model, tmp_path / "saved", places, offload_folder=tmp_path / "folder"))


def test_real_accelerates_device_map_of_transformers_is_undisturbed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    whole: Any = transformer("gpt2")
    whole.save_pretrained(tmp_path / "saved")
    places = {"wte": "cpu", "wpe": "cpu", "h": "disk", "ln_f": "cpu"}
    model = transformers.AutoModel.from_pretrained(
        tmp_path / "saved", device_map=places, offload_folder=tmp_path / "folder"
    )
    assert any(isinstance(getattr(part, "_hf_hook", None), accelerate_hooks.ModelHook) for part in model.modules())
    words = torch.arange(3, 13)[None]
    with torch.no_grad():
        assert torch.equal(model(words).last_hidden_state, whole.transformer(words).last_hidden_state)


@pytest.mark.chaos
def test_compiled_model_calls_the_hooks(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(result(compiled), result(made()))
    assert torch.equal(result(compiled), result(made()))


def test_copy_of_an_offloaded_model_is_independent(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path)
    result(model)
    other = copy.deepcopy(model)
    assert torch.equal(result(other), result(made()))
    hook, others = offload_hook(model.embedding), offload_hook(other.embedding)
    assert hook is not None
    assert others is not None
    assert hook.read_ahead is not others.read_ahead
    remove_hook_from_submodules(other)
    assert offloaded(model)
    assert not offloaded(other)
    with pytest.raises(RuntimeMisuse, match="remove_hook_from_submodules"):
        dispatch_model(made(), {"": "disk"}, offload_dir=tmp_path / "second").to(torch.float16).to("cpu")


# -- reading ahead


def test_next_modules_are_read_ahead_and_a_changed_order_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.order = [0, 1, 2, 3]

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for number in self.order:
                hidden = self.parts[number](hidden)
            return hidden

    monkeypatch.setattr("hpcaccel.runtime.offload.read_ahead.ENOUGH_BYTES", 1)
    torch.manual_seed(0)
    whole = Branches()
    model = disk_offload(copy.deepcopy(whole), tmp_path)
    hooks = [offload_hook(part) for part in model.parts]
    read: list[int] = []
    for number, hook in enumerate(hooks):
        assert hook is not None
        warm = hook.warm
        monkeypatch.setattr(hook, "warm", lambda number=number, warm=warm: (read.append(number), warm()))
    hidden = torch.rand(2, 8)
    for order, ahead in (([0, 1, 2, 3], [1, 2, 3]), ([0, 2, 1, 3], []), ([0, 2, 1, 3], [2, 1, 3])):
        whole.order = model.order = order
        read.clear()
        assert torch.equal(model(hidden), whole(hidden))
        if ahead:
            assert read == ahead


def test_copies_to_an_accelerator_are_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the device's streams and tensors: there is no accelerator here."""
    done: list[str] = []

    class Stream:
        def __init__(self, name: str = "side", device: Any = None) -> None:
            self.name = name

        def record_event(self) -> str:
            done.append(f"event on {self.name}")
            return "copied"

        def wait_event(self, event: str) -> None:
            done.append(f"{self.name} waits for {event}")

    class Copy:
        def record_stream(self, stream: Stream) -> None:
            done.append(f"memory is used by {stream.name}")

    class Device:
        bytes = 1
        takes_time = True

        def target(self) -> torch.device:
            return torch.device("cuda", 0)

        def read(self) -> Any:
            done.append("copy")
            return {"weight": Copy()}

        def warm(self) -> None:
            raise AssertionError

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        done.append(f"begin {stream.name}")
        yield
        done.append(f"end {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main"))
    ahead, first, second = ReadAhead(), Device(), Device()
    ahead.register(first)
    ahead.register(second)
    assert ahead.take(first) == {}
    ahead.start(first)
    assert list(ahead.take(second)) == ["weight"]
    assert done == [
        "begin side", "copy", "event on side", "end side", "main waits for copied", "memory is used by main",
    ]  # fmt: skip


def test_file_that_cannot_be_read_ahead_is_reported_where_it_is_needed(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path)
    result(model)
    (tmp_path / "blocks.1.wide.weight.dat").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read weights from .*blocks\.1\.wide\.weight\.dat"):
        result(model)


def test_forked_process_reads_for_itself(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path)
    expected = result(model)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        os._exit(0 if torch.equal(result(model), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(result(model), expected)


# -- files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (5, 3), (0, 4)])
def test_every_dtype_and_shape_survives_the_folder(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = (torch.rand(shape) * 3).to(dtype)
    index = offload_weight(weight, "a.b", tmp_path, {})
    assert index == {"a.b": {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}}
    found = load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"])
    assert found.dtype == dtype
    assert found.shape == weight.shape
    assert found.float().tolist() == weight.float().tolist()


def test_real_accelerate_reads_our_folder_and_we_read_its(tmp_path: Path) -> None:
    offload = pytest.importorskip("accelerate.utils.offload")
    state = {"a": torch.rand(4, 3), "b": torch.rand(2).to(torch.bfloat16), "c": torch.tensor(3)}
    offload_state_dict(tmp_path / "ours", state)
    offload.offload_state_dict(tmp_path / "theirs", state)
    for loader in (
        offload.OffloadedWeightsLoader(save_folder=tmp_path / "ours"),
        OffloadedWeightsLoader(save_folder=tmp_path / "theirs"),
    ):
        assert all(torch.equal(loader[name], value) for name, value in state.items())


def test_aligned_tensor_is_mapped_and_others_are_copied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))

    def read(offset: int) -> torch.Tensor:
        return mapped_tensors.read_tensor(mapped_tensors.MappedTensor(path, offset, torch.uint8, (8,)))

    mapped, copied = read(64), read(8)
    assert mapped.tolist() == list(range(64, 72))
    assert copied.tolist() == list(range(8, 16))
    mapped += 1  # private: the file is unchanged
    assert path.read_bytes() == bytes(range(200))
    assert copied.data_ptr() % mapped_tensors.ALIGNMENT == 0
    with pytest.raises(CheckpointError, match="has 200 bytes, but one of its tensors ends at byte 204"):
        read(196)


def test_writing_a_weight_again_does_not_change_its_hard_link(tmp_path: Path) -> None:
    weight = torch.rand(3)
    offload_state_dict(tmp_path, {"a": weight, "b": weight})
    assert os.path.samefile(tmp_path / "a.dat", tmp_path / "b.dat")
    offload_weight(torch.zeros(3), "a", tmp_path)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert torch.equal(loader["b"], weight)
    assert torch.equal(loader["a"], torch.zeros(3))
    assert PrefixedDataset(loader, "a")[""].sum() == 0


def test_file_that_replaces_another_is_read_by_its_own_header(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = {"a": torch.rand(3), "b": torch.rand(2)}
    save_file(weights, tmp_path / "one.safetensors")
    loader = OffloadedWeightsLoader(
        index={name: {"safetensors_file": str(tmp_path / "one.safetensors")} for name in "ab"}
    )
    assert torch.equal(loader["b"], weights["b"])
    save_file({**weights, "first": torch.rand(9).double()}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "one.safetensors")
    assert torch.equal(loader["b"], weights["b"])
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read weights from .*one\.safetensors: No such file"):
        loader["a"]


def test_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    disk_offload(nn.Sequential(nn.Linear(3, 4)), tmp_path)
    with pytest.raises(OffloadError, match=r"has the shape \(4, 3\) in .* but \(5, 3\) in the model"):
        disk_offload(nn.Sequential(nn.Linear(3, 5)), tmp_path)
    with pytest.raises(OffloadError, match=r"has no weights for 1\.weight, 1\.bias \(it has 0\.weight, 0\.bias\)"):
        disk_offload(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), tmp_path)
    with init_empty_weights():
        empty = nn.Linear(3, 4)
    with pytest.raises(OffloadError, match="weight is on the meta device and has no values"):
        disk_offload(empty, tmp_path / "new")


def test_misused_loading_is_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "saved", made())
    with pytest.raises(OffloadError, match="pass a folder as offload_folder"):
        load_checkpoint_in_model(made(), checkpoint, {"": "disk"})
    with pytest.raises(OffloadError, match=r"no device for head\.weight \(it has embedding, blocks\)"):
        load_checkpoint_in_model(made(), checkpoint, {"embedding": "cpu", "blocks": "cpu"})
    with pytest.raises(CheckpointError, match="only in the checkpoint: blocks"):
        load_checkpoint_in_model(nn.Embedding(30, 24), checkpoint, {"": "cpu"}, strict=True)
    with pytest.raises(RuntimeMisuse, match="need a device_map"):
        load_checkpoint_in_model(made(), checkpoint, dtype="float16")
    with pytest.raises(OffloadError, match="'float17' is not a torch dtype"):
        load_checkpoint_in_model(made(), checkpoint, {"": "cpu"}, dtype="float17")


def test_argument_that_is_no_module_and_weights_without_values_are_refused(tmp_path: Path) -> None:
    for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
        with pytest.raises(
            RuntimeMisuse, match=rf"nn\.Module, but is 'saved': call {load.__name__}\(model, checkpoint"
        ):
            load("saved", made(), "auto")  # type: ignore[operator]
    with pytest.raises(RuntimeMisuse, match=r"nn\.Module, but is a dict: call dispatch_model\(model, device_map\)"):
        dispatch_model({"": "cpu"}, made())  # type: ignore[arg-type]
    with init_empty_weights():
        empty = made()
    with pytest.raises(
        OffloadError, match=r"cannot move Model to cpu: .* no values \(embedding\.weight, .*Load and dis"
    ):
        dispatch_model(empty, {"": "cpu"})
    on_disk = r"puts the whole model on disk: pass a folder as offload_dir .* or offload_folder"
    with pytest.raises(OffloadError, match=on_disk):
        dispatch_model(made(), {"": "disk"})
    with pytest.raises(OffloadError, match=on_disk):
        Accelerator(cpu=True).prepare(made(), device_map={"": "disk"})
    distributed = disk_offload(made(), tmp_path / "folder")
    with pytest.raises(OffloadError, match="parts of the model are offloaded"):
        dispatch_model(distributed, {"": "cpu"})


def test_pickled_checkpoint_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"embedding.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="loading other types could run code"):
        load_checkpoint_in_model(made(), tmp_path / "pytorch_model.bin", {"": "cpu"})
    assert not (tmp_path / "ran").exists()


# -- hooks


def test_hooks_get_all_arguments_and_are_removed() -> None:
    class Add(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return args, {**kwargs, "factor": 2 * kwargs["factor"]}

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output + 1

    class Scale(nn.Module):
        def forward(self, value: torch.Tensor, *, factor: int) -> torch.Tensor:
            return value * factor

    module = Scale()
    add_hook_to_module(module, Add())
    add_hook_to_module(module, Add(), append=True)
    assert module(torch.tensor(5), factor=1).item() == 5 * 4 + 2
    add_hook_to_module(module, Add(), append=True)
    assert [type(hook) for hook in module._hf_hook.hooks] == [Add] * 3, "readers look at one level"
    remove_hook_from_submodules(module)
    assert module(torch.tensor(5), factor=1).item() == 5
    assert "forward" not in module.__dict__


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_weights_are_put_back_when_forward_raises(tmp_path: Path, kind: str) -> None:
    model = cpu_offload(made(), torch.device("cpu")) if kind == "cpu" else disk_offload(made(), tmp_path)
    whole = offloaded(model)
    with pytest.raises(IndexError):
        model(torch.tensor([30]))  # in the embedding, whose weight is tied to the head's
    assert offloaded(model) == whole
    handle = model.blocks[1].narrow.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result(model)  # in a block that has weights of its own
    assert offloaded(model) == whole
    hook = offload_hook(model.embedding)
    assert hook is not None
    assert hook.tied_params_map is not None
    assert not any(hook.tied_params_map.values())
    handle.remove()
    assert torch.equal(result(model), result(made()))


def test_each_hook_undoes_what_it_did_before_a_failed_forward() -> None:
    done: list[str] = []

    class Named(ModelHook):
        def __init__(self, name: str) -> None:
            self.name = name

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            done.append(f"before {self.name}")
            return args, kwargs

        def undo_pre_forward(self, module: nn.Module) -> None:
            done.append(f"undo {self.name}")

    module = nn.Linear(2, 2)
    for name in "abc":
        add_hook_to_module(module, Named(name), append=True)
    module(torch.ones(2))
    assert done == ["before a", "before b", "before c"]
    done.clear()
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert done == ["before a", "before b", "before c", "undo a", "undo b", "undo c"]


def test_cast_weights_return_to_their_storage_dtype_when_forward_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 5))
    assert model[0].weight.dtype == torch.bfloat16
    assert model(torch.ones(1, 4)).dtype == torch.float32
    assert model[0].weight.dtype == torch.bfloat16


def test_parts_on_an_accelerator_stay_there_and_tied() -> None:
    """With a stand-in for the accelerator. Its cache is cleared once by the distribution, and not for each tensor."""
    ended = run_ranks("vendor_offload.py", size=1, launcher="alone")
    assert ended.codes == [0], ended.outputs
    assert ended.result() == {
        "devices": [*["npu:0"] * 4, "meta", "meta", "npu:0", "npu:0"],
        "right": True, "state": True, "state_on": ["cpu"], "state_tied": True,
        "kept": True, "tied": True, "cleared": [1, 1],
    }  # fmt: skip


def test_hook_without_gradients_leaves_the_mode_as_it_was() -> None:
    hook, module = ModelHook(), nn.Linear(2, 2)
    hook.no_grad = True
    add_hook_to_module(module, hook)
    assert not module(torch.ones(2)).requires_grad
    with pytest.raises(RuntimeError):
        module(torch.ones(3))
    assert torch.is_grad_enabled()
    hook.no_grad = False
    assert module(torch.ones(2)).requires_grad
    with torch.no_grad():
        assert not module(torch.ones(2)).requires_grad


def test_weights_are_there_only_inside_forward(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path)
    seen: list[bool] = []
    model.blocks[1].norm.register_forward_hook(lambda *_: seen.append(model.blocks[0].wide.weight.is_meta))
    model.blocks[1].wide.register_forward_pre_hook(lambda *_: seen.append(model.blocks[1].scale.is_meta))
    result(model)
    assert seen == [True, False]
    assert has_offloaded_params(model.blocks[1])
    assert not has_offloaded_params(model.blocks)
    with align_module_device(model.blocks[0].wide):
        assert torch.equal(model.blocks[0].wide.weight, made().blocks[0].wide.weight)
    assert model.blocks[0].wide.weight.is_meta


def test_tied_weights_are_one_tensor_while_both_modules_run() -> None:
    class Inner(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, outer: nn.Module) -> bool:
            return self.weight is outer.weight

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))
            self.inner = Inner(self.weight)

        def forward(self) -> bool:
            same: bool = self.inner(self)
            return same

    model = cpu_offload(Outer(), torch.device("cpu"))
    assert model() is True
    hook = offload_hook(model)
    assert hook is not None
    assert hook.tied_params_map is not None
    assert [len(devices) for devices in hook.tied_params_map.values()] == [0]


def test_hook_for_a_single_module_and_wrong_tensors() -> None:
    module = nn.Linear(3, 2)
    expected = module(torch.ones(3)).tolist()
    attach_align_device_hook(module, torch.device("cpu"), offload=True)
    assert module.weight.is_meta
    assert module(torch.ones(3)).tolist() == expected
    plain = nn.Linear(3, 2)
    add_hook_to_module(
        plain, AlignDevicesHook(torch.device("cpu"), offload=True, weights_map={"weight": torch.ones(2)})
    )
    with pytest.raises(OffloadError, match=r"offloaded weight weight has the shape \(2,\), but \(2, 3\) in the model"):
        plain(torch.ones(3))
    with pytest.raises(OffloadError, match="Linear has no parameter and no buffer 'wait'"):
        set_module_tensor_to_device(nn.Linear(2, 2), "wait", "cpu")
    with pytest.raises(ValueError, match="weight is on the meta device"):
        set_module_tensor_to_device(nn.Linear(2, 2, device="meta"), "weight", "cpu")


def test_pipeline_of_models_keeps_one_on_the_device() -> None:
    first, second = nn.Linear(2, 3), nn.Linear(3, 2)
    expected = second(first(torch.ones(2)))
    _, hook = cpu_offload_with_hook(first, torch.device("cpu"))
    cpu_offload_with_hook(second, torch.device("cpu"), prev_module_hook=hook)
    assert torch.equal(second(first(torch.ones(2))), expected)
    hook.offload()
    hook.remove()
    assert not hasattr(first, "_hf_hook")


# -- the page


PAGE = (Path(__file__).parents[2] / "docs" / "big-models.md").read_text()


def test_programs_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole: Any = transformer("llama")
    whole.save_pretrained(tmp_path / "checkpoint", max_shard_size="20KB")
    monkeypatch.chdir(tmp_path)
    text = whole.generate(torch.tensor([[3, 14, 15, 9, 2]]), max_new_tokens=5, do_sample=False).tolist()
    programs = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(programs) == 4
    for program in programs:
        exec(program, {})
    shown = capsys.readouterr().out
    assert str(text) in shown
    assert "\nLinear4bit\n" in shown
    assert "\n{'0': 'cpu', '1': 'disk', '2': 'disk', '3': 'disk'}\n" in shown
    Accelerator().end_training()
