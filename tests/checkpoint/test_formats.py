"""Conversion to and from safetensors, torch and DCP files: same bits, one tensor in memory at a time."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from hpcaccel.checkpoint import CheckpointEngine, TrainingState
from hpcaccel.checkpoint.formats import ConvertRequest, convert
from hpcaccel.checkpoint.formats.weight_writers import write_safetensors, write_torch
from hpcaccel.checkpoint.formats.weights import Weight, plain_names
from hpcaccel.checkpoint_files.contents import Contents
from hpcaccel.checkpoint_files.verify import verify
from hpcaccel.errors import CheckpointError
from tests.checkpoint.training import Net, Training
from tests.checkpoint.world import run_ranks


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """Directory with an hpcaccel and a DCP checkpoint of one training on two ranks, and the model's full weights."""
    directory = tmp_path_factory.mktemp("fsdp")
    whole = run_ranks(_save, directory)[0]
    return directory, whole


def _save(rank, directory):
    training = Training("fsdp", rank=rank)
    training.steps(2)
    for buffer in training.model.buffers():
        torch.distributed.broadcast(buffer, src=0)  # DCP would save any rank's copy
    path = CheckpointEngine(directory, rank=rank, world_size=2).save(training.state(), step=2)
    dcp.save(
        {"model": training.model.state_dict(), "optimizer": {"lr": 0.1}, "epoch": 3},
        checkpoint_id=path.parent / "stock",
    )
    return {name: value.numpy() for name, value in training.whole().items() if ":" not in name}


def same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == torch.from_numpy(value).dtype, name
        assert np.array_equal(found[name].numpy(), value), name


def test_sharded_model_converts_to_safetensors(fsdp, tmp_path):
    directory, whole = fsdp
    told = []
    done = convert(
        ConvertRequest(str(directory / "step_00000002"), str(tmp_path / "out"), "safetensors"),
        lambda *at: told.append(at),
    )
    assert [file.rsplit("/", 1)[1] for file in done["files"]] == ["model.safetensors"]
    assert told[-1] == (done["bytes"], done["bytes"])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    same(
        load_file(tmp_path / "out" / "model.safetensors"),
        {name: whole[name] for name in whole if name != "head.weight"},
    )
    with pytest.raises(CheckpointError, match="already contains a model"):
        convert(ConvertRequest(str(directory / "step_00000002"), str(tmp_path / "out"), "safetensors"))


def test_safetensors_split_by_size_have_an_index(fsdp, tmp_path):
    directory, whole = fsdp
    request = ConvertRequest(str(directory / "step_00000002"), str(tmp_path), "safetensors", max_shard_bytes=500)
    done = convert(request)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == done["bytes"]
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / name)
        assert sum(value.nbytes for value in part.values()) <= 500
        assert {index["weight_map"][key] for key in part} == {name}
        found |= part
    same(found, {name: whole[name] for name in whole if name != "head.weight"})
    from hpcaccel import load_sharded

    model = Net()
    load_sharded(model, tmp_path)
    same(model.state_dict(), whole)


def test_model_converts_to_a_torch_file_with_tied_weights(fsdp, tmp_path):
    directory, whole = fsdp
    convert(ConvertRequest(str(directory / "step_00000002"), str(tmp_path / "m.pt"), "torch"))
    for mapped in (False, True):
        found = torch.load(tmp_path / "m.pt", weights_only=True, mmap=mapped)
        same(found, whole)
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
        assert all(value.data_ptr() % 64 == 0 for value in found.values())
    assert verify(tmp_path / "m.pt").good


def test_whole_state_in_a_torch_file_resumes_without_hpcaccel(tmp_path):
    training = Training("plain")
    training.steps(2)
    path = CheckpointEngine(tmp_path).save(training.state(), step=2)
    losses = training.steps(3)
    convert(ConvertRequest(str(path), str(tmp_path / "all.pt"), "torch", whole=True))
    saved = torch.load(tmp_path / "all.pt", weights_only=True)
    again = Training("plain", seed=7)
    again.model.load_state_dict(saved["models"][0])
    again.optimizer.load_state_dict(saved["optimizers"][0])
    again.scheduler.load_state_dict(saved["schedulers"][0])
    torch.set_rng_state(saved["ranks"][0]["state"]["torch"])
    assert saved["manifest"]["step"] == 2
    convert(ConvertRequest(str(tmp_path / "all.pt"), str(tmp_path / "made"), "hpcaccel", part="models.0"))
    assert len(Contents(tmp_path / "made").tree["models"][0]) == len(saved["models"][0])
    assert again.steps(3) == losses
    assert again.digest() == training.digest()


class Odd:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def test_whole_conversion_is_loadable_with_weights_only(tmp_path):
    from collections import Counter, OrderedDict, defaultdict, deque

    value = {
        "numbers": [1, 2**70, 1.5, float("nan"), 1j, None, True],
        "bytes": b"x" * 5000,
        "tuple": (1, {2, 3}, frozenset({4}), deque([5], maxlen=3)),
        "dicts": [OrderedDict(a=1), Counter("aab"), defaultdict(list, b=[2]), {3: "three"}],
        "numpy": [np.arange(3, dtype=np.uint32), np.float32(0.5), np.array(["a", "b"]), np.datetime64("2026-11-21")],
        "torch": [torch.zeros(2, 3, dtype=torch.float8_e4m3fn), torch.float16, torch.Size([1]), torch.empty(0, 4)],
    }
    path = CheckpointEngine(tmp_path).save(TrainingState(objects={"odd": Odd(value)}), step=0)
    convert(ConvertRequest(str(path), str(tmp_path / "all.pt"), "torch", whole=True))
    found = torch.load(tmp_path / "all.pt", weights_only=True)["objects"]["odd"]
    assert found["bytes"] == value["bytes"]
    assert found["numbers"][:3] == [1, 2**70, 1.5]
    assert found["tuple"] == (1, {2, 3}, {4}, [5])
    assert found["dicts"] == [{"a": 1}, {"a": 2, "b": 1}, {"b": [2]}, {3: "three"}]
    assert found["numpy"][0].dtype == torch.uint32
    assert found["numpy"][0].tolist() == [0, 1, 2]
    assert found["numpy"][1:] == [0.5, ["a", "b"], "2026-11-21"]
    assert found["torch"][0].dtype == torch.float8_e4m3fn
    assert found["torch"][3].shape == (0, 4)


def test_write_torch_holds_one_tensor_in_memory_at_a_time(tmp_path):
    alive = 0

    def read():
        nonlocal alive
        tensor = torch.zeros(1000)
        alive += 1
        assert alive == 1
        import weakref

        weakref.finalize(tensor.untyped_storage(), gone)
        return tensor

    def gone():
        nonlocal alive
        alive -= 1

    weights = {f"w{number}": Weight(f"w{number}", torch.float32, (1000,), read) for number in range(4)}
    write_torch(tmp_path / "w.pt", weights, wrote=lambda count: None)
    assert set(torch.load(tmp_path / "w.pt", weights_only=True)) == set(weights)


# -- import


def resumed(path, *, seed=5):
    """Training that starts from the imported checkpoint in ``path``."""
    training = Training("plain", seed=seed)
    before = training.scheduler.state_dict()
    loaded = CheckpointEngine(path.parent / "run").load(path, training.state())
    assert loaded.step == 0
    assert loaded.per_rank is None
    assert training.scheduler.state_dict() == before
    assert not training.optimizer.state
    assert loaded.differences[0].startswith("contains only weights, imported from ")
    return training


@pytest.mark.parametrize("source", ["safetensors", "parts", "torch", "nested", "dcp", "ours", "ddp"])
def test_weights_of_every_source_format_convert_to_a_checkpoint(fsdp, tmp_path, source):
    directory, whole = fsdp
    tensors = {name: torch.from_numpy(value) for name, value in whole.items()}
    path = tmp_path / "source"
    part = None
    if source in ("safetensors", "parts"):
        size = 400 if source == "parts" else 10**9
        convert(ConvertRequest(str(directory / "step_00000002"), str(path), "safetensors", max_shard_bytes=size))
    elif source == "torch":
        torch.save(tensors, path)
    elif source == "nested":
        torch.save({"app.v2": {"net": tensors, "lr": 0.1}, "model": 3}, path)
        part = "app.v2.net"
    elif source == "ddp":
        torch.save(
            {"model": {f"module.{name}": value for name, value in tensors.items()}, "optimizer": {"a": {}}}, path
        )
    else:
        shutil.copytree(directory / ("stock" if source == "dcp" else "step_00000002"), path)
    convert(ConvertRequest(str(path), str(tmp_path / "made"), "hpcaccel", part=part))
    assert verify(tmp_path / "made").good
    same(resumed(tmp_path / "made").model.state_dict(), whole)


def test_tied_weight_missing_from_the_file_is_restored_by_the_model(fsdp, tmp_path):
    _, whole = fsdp
    tensors = {name: torch.from_numpy(value) for name, value in whole.items() if name != "head.weight"}
    save_file(tensors, tmp_path / "model.safetensors")
    convert(ConvertRequest(str(tmp_path), str(tmp_path / "made"), "hpcaccel"))
    same(resumed(tmp_path / "made").model.state_dict(), whole)


def _resume_sharded(rank, path):
    training = Training("fsdp", seed=5, rank=rank)
    loaded = CheckpointEngine(path.parent / "run", rank=rank, world_size=2).load(path, training.state())
    assert loaded.step == 0
    return {name: value.numpy() for name, value in training.whole().items() if ":" not in name}


def test_sharded_training_starts_from_imported_weights(fsdp, tmp_path):
    directory, whole = fsdp
    convert(ConvertRequest(str(directory / "stock"), str(tmp_path / "made"), "hpcaccel"))
    for found in run_ranks(_resume_sharded, tmp_path / "made"):
        same({name: torch.from_numpy(value) for name, value in found.items()}, whole)


def test_dtype_option_casts_only_floating_point_tensors(fsdp, tmp_path):
    directory, whole = fsdp
    convert(ConvertRequest(str(directory / "step_00000002"), str(tmp_path), "safetensors", dtype="bfloat16"))
    found = load_file(tmp_path / "model.safetensors")
    assert found["body.1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(found["body.0.weight"], torch.from_numpy(whole["body.0.weight"]).bfloat16())


def test_unsupported_conversion_is_refused_with_the_reason(fsdp, tmp_path):
    directory, _ = fsdp
    ours, stock = str(directory / "step_00000002"), str(directory / "stock")
    two = nn.Linear(1, 1), nn.Linear(2, 2)
    several = str(CheckpointEngine(tmp_path / "two").save(TrainingState(models=list(two)), step=0))
    nested = str(tmp_path / "nested.pt")
    torch.save({"net": {"w": torch.zeros(1)}, "other": {}}, nested)
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    there = tmp_path / "there.pt"
    there.touch()
    for request, words in [
        (ConvertRequest(several, "x", "torch"), "contains 2 models: select one with --model"),
        (ConvertRequest(ours, "x", "torch", model=1), "has no model 1"),
        (ConvertRequest(ours, "x", "torch", part="model"), "--part applies to checkpoints of other programs"),
        (ConvertRequest(stock, "x", "torch", model=0), "--model applies to hpcaccel's checkpoints"),
        (ConvertRequest(stock, "x", "torch", part="no"), "--part 'no': 'no' is not a nested dict or list in"),
        (ConvertRequest(nested, "x", "torch", part="net.w"), f"'w' is not a nested dict or list in net of {nested}"),
        (ConvertRequest(stock, "x", "torch", whole=True), "--whole converts an hpcaccel checkpoint"),
        (ConvertRequest(ours, "x", "torch", dtype="int8"), "floating-point"),
        (ConvertRequest(nested, "x", "torch"), "is the model (keys: net, other). Select it with --part"),
        (ConvertRequest(str(tmp_path / "list.pt"), "x", "torch"), "contains a list"),
        (ConvertRequest(ours, str(there), "torch"), "already exists"),
        (ConvertRequest(ours, str(there), "safetensors"), "is a file"),
        (ConvertRequest(ours, str(tmp_path), "hpcaccel"), "already exists"),
        (ConvertRequest(str(tmp_path / "nothing"), "x", "torch"), "does not exist"),
    ]:
        with pytest.raises(CheckpointError) as caught:
            convert(request)
        assert words in str(caught.value), (request, str(caught.value))
    convert(ConvertRequest(several, str(tmp_path / "second.pt"), "torch", model=1))
    assert torch.load(tmp_path / "second.pt", weights_only=True)["weight"].shape == (2, 2)


def test_conversion_of_a_damaged_checkpoint_fails_and_leaves_no_files(fsdp, tmp_path):
    from tests.checkpoint.test_damage import flip

    path = tmp_path / "source"
    shutil.copytree(fsdp[0] / "step_00000002", path)
    chunk = Contents(path).tensors["models.0.body.4.weight"].chunks[0]
    flip(path / chunk.file, chunk.offset + 1)
    for to in ("safetensors", "torch", "hpcaccel"):
        with pytest.raises(CheckpointError, match=r"models\.0\.body\.4\.weight.* differs from the committed CRC"):
            convert(ConvertRequest(str(path), str(tmp_path / "out"), to))
        out = tmp_path / "out"
        assert not out.exists() or not list(out.iterdir())
    assert sorted(item.name for item in tmp_path.iterdir()) in (["out", "source"], ["source"])


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": null}', '{"weight_map": {"a": 3}}', '{"metadata": {}}'])
def test_damaged_index_is_one_clear_error(tmp_path, text):
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.zeros(2)}, source / "model.safetensors")
    (source / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json is not an index of weight files, or is damaged"):
        convert(ConvertRequest(str(source), str(tmp_path / "out.pt"), "torch"))
    assert any("not an index" in problem for problem in verify(source).problems)


def test_cleanup_that_fails_does_not_hide_the_first_error(tmp_path, monkeypatch, caplog):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    def read():
        raise CheckpointError("the source is damaged")

    monkeypatch.setattr("pathlib.Path.rmdir", refuse)
    weight = Weight("a", torch.float32, (2,), read)
    with pytest.raises(CheckpointError, match="the source is damaged"):
        write_safetensors(tmp_path / "out", [weight], max_shard_bytes=100, wrote=lambda count: None)
    assert f"{tmp_path / 'out'} was not removed: Permission denied" in caplog.text


def test_plain_names_removes_the_prefixes_of_wrappers():
    names = ["module._orig_mod.layers.0._checkpoint_wrapped_module.weight", "module.head.bias"]
    assert list(plain_names(names).values()) == ["layers.0.weight", "head.bias"]
    assert list(plain_names(["module.a", "b"]).values()) == ["module.a", "b"]
