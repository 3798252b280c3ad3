"""Devices of all vendors: their names, and a training on stand-in devices of a vendor and of torch_xla.

``programs/vendor`` and ``programs/vendor_xla`` have the stand-ins. Their tensors carry out every operation on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcaccel.checkpoint.device_generator import device_generator
from hpcaccel.errors import RankEnvironmentError, RuntimeMisuse
from hpcaccel.runtime.compat import availability
from hpcaccel.runtime.distributed import device_backend, xla_device
from hpcaccel.runtime.distributed.device_mesh import build, choose_device, count_gpus
from hpcaccel.runtime.distributed.mesh_layout import MeshLayout
from hpcaccel.runtime.distributed.rank_env import ALONE, detect
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.rng import generators
from hpcaccel.runtime.training.scaling import make_scaler

from .ranks import ROOT, Ended, run_ranks

pytestmark = pytest.mark.torch

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


class Stream:
    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


class Module(SimpleNamespace):
    """A stand-in for ``torch.xpu``: a generator, a stream, and two devices."""

    def __init__(self, **more: Any) -> None:
        self.selected: list[torch.device] = []
        self.stream, self.generator = Stream(), torch.Generator().manual_seed(1)
        super().__init__(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: 2,
            current_device=lambda: 1,
            set_device=self.selected.append,
            current_stream=lambda device: self.stream,
            manual_seed=self.generator.manual_seed,
            get_rng_state=lambda device="xpu": self.generator.get_state(),
            set_rng_state=lambda state, device="xpu": self.generator.set_state(state),
            get_device_name=lambda: "Max 1550",
            **more,
        )


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """This machine has two Intel GPUs."""
    module = Module()
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr("torch.get_device_module", lambda device=None: module)
    for name in device_backend.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    yield module
    monkeypatch.setattr(device_backend, "_used", None)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "several", "backend"),
    [
        ("cpu", "MULTI_CPU", "gloo"),
        ("cuda", "MULTI_GPU", "cpu:gloo,cuda:nccl"),
        ("xpu", "MULTI_XPU", "cpu:gloo,xpu:xccl"),
        ("hpu", "MULTI_HPU", "cpu:gloo,hpu:hccl"),
        ("xla", "XLA", "xla"),
    ],
)
def test_each_kind_has_accelerates_type_and_torchs_backend(kind: str, several: str, backend: str) -> None:
    device = torch.device(kind)
    assert device_backend.distributed_type(device) == several
    assert device_backend.backend_name(device) == backend


def test_every_multi_device_type_of_accelerate_belongs_to_a_kind() -> None:
    types = {kind.distributed_type for kind in device_backend.KINDS.values()} - {None}
    assert {kind for kind in DistributedType if kind.name.startswith("MULTI_")} | {DistributedType.XLA} == types
    assert DistributedType.TPU is DistributedType.XLA


def test_mps_devices_cannot_train_together() -> None:
    with pytest.raises(RuntimeMisuse, match=r"no collectives between mps devices: start one process"):
        device_backend.backend_name(torch.device("mps"))


def test_ddp_gets_an_index_only_where_devices_have_one() -> None:
    devices = [torch.device("cuda", 3), torch.device("xpu", 1), torch.device("cpu"), torch.device("hpu", 0)]
    assert list(map(device_backend.device_ids, devices)) == [[3], [1], None, None]


def test_rocm_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_backend.vendor("cuda") == "CUDA"
    monkeypatch.setattr("torch.version.hip", "6.4")
    assert device_backend.vendor("cuda") == "ROCm"
    # The profiler's activity for ROCm is that of CUDA.
    assert device_backend.profiler_activity("rocm") is torch.profiler.ProfilerActivity.CUDA


def test_profiler_activities_are_found_by_name_in_any_case() -> None:
    activities = torch.profiler.ProfilerActivity
    assert device_backend.profiler_activity("xpu") is activities.XPU
    assert device_backend.profiler_activity("privateuse1") is activities.PrivateUse1
    with pytest.raises(RuntimeMisuse, match=r"unknown activity 'gpu'.*cuda.*xpu"):
        device_backend.profiler_activity("gpu")


# -- which device ------------------------------------------------------------------------------------------------------


def test_rank_gets_the_xpu_of_its_local_rank(xpu: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    device = choose_device(detect(TORCHRUN), cpu=False)
    assert device == torch.device("xpu", 1)
    assert xpu.selected == [device]
    assert (device_backend.device_count(), device_backend.vendor("xpu")) == (2, "XPU (Intel)")
    assert availability.get_current_device_type() == ("xpu", "MULTI_XPU")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1,2")
    assert count_gpus({"ZE_AFFINITY_MASK": "0,1,2"}) == 3
    xpu.device_count = lambda: 1
    monkeypatch.delenv("ZE_AFFINITY_MASK")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    with pytest.raises(RankEnvironmentError, match=r"see only 1 \(XPU \(Intel\); ROCR_VISIBLE_DEVICES=\)"):
        choose_device(detect(TORCHRUN), cpu=False)


def test_device_that_its_own_runtime_has_chosen_is_kept(xpu: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("hpu"))
    xpu.current_device = lambda: 0
    assert choose_device(detect(TORCHRUN), cpu=False) == torch.device("hpu", 0)


def test_cuda_is_used_if_another_vendors_package_has_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert device_backend.accelerator() == "cuda"


def test_vendors_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch_mlu.py").write_text("raise ImportError('libcnrt.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    device_backend._load_vendors_packages.cache_clear()
    assert device_backend.accelerator() == device_backend.accelerator() == "cpu"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("no MLU (Cambricon) device is used: torch_mlu cannot be imported: libcnrt.so")
    device_backend._load_vendors_packages.cache_clear()


# -- functions ---------------------------------------------------------------------------------------------------------


def test_barriers_wait_for_the_devices_stream_or_for_all_its_work(xpu: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    device_backend.synchronize(torch.device("xpu", 1))
    assert xpu.stream.waited == 1
    waited: list[str] = []
    without_streams = SimpleNamespace(synchronize=lambda: waited.append("all"))
    monkeypatch.setattr("torch.get_device_module", lambda device=None: without_streams)
    device_backend.synchronize(torch.device("mps"))
    assert waited == ["all"]
    device_backend.synchronize(torch.device("cpu"))


def test_generators_of_the_device_are_seeded_read_and_written(xpu: Module) -> None:
    read, write = device_generator(torch.device("xpu", 1)) or (None, None)
    assert read is not None
    assert write is not None
    device_backend.set_device(torch.device("xpu", 1))
    generators.seed_generators(5)
    states = generators.capture()
    assert torch.equal(read(), torch.Generator().manual_seed(5).get_state())
    write(torch.Generator().manual_seed(9).get_state())
    generators.put_back(states)
    assert torch.equal(read(), torch.Generator().manual_seed(5).get_state())
    assert device_backend.generator_of("xpu") is not None
    assert device_backend.generator_of("npu") is None
    assert generators.check_rng_types(["xpu", "torch", "mlu"]) == ("xpu", "torch", "mlu")
    assert device_generator("cpu") is device_generator(None) is None


def test_own_time_is_measured_by_the_devices_events(xpu: Module) -> None:
    assert device_backend.timing_event(torch.device("xpu", 0)) is None
    xpu.Event = torch.Event
    assert device_backend.timing_event(torch.device("xpu", 0)) is torch.Event
    assert device_backend.timing_event(torch.device("cpu")) is None


def test_xla_has_neither_shards_nor_fp16() -> None:
    with pytest.raises(RuntimeMisuse, match="not supported on XLA devices"):
        build(MeshLayout(1, 2, 1), torch.device("xla"), sharded=True)
    with pytest.raises(RuntimeMisuse, match=r"no fp16 units\. Use bf16"):
        make_scaler(torch.device("xla"), "fp16")


def test_xla_is_used_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert not xla_device.is_wanted()
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert not xla_device.is_wanted(), "torch_xla is not installed"
    monkeypatch.setattr(xla_device, "find_spec", lambda name: object())
    assert xla_device.is_wanted()


def test_processes_that_torch_xla_has_spawned_know_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"world_size": 8, "global_ordinal": 5, "local_ordinal": 1, "local_process_count": 4}
    runtime = SimpleNamespace(get_master_ip=lambda: "10.0.0.1", **{name: lambda n=n: n for name, n in places.items()})
    monkeypatch.setattr(xla_device, "import_module", lambda name: runtime)
    monkeypatch.setenv("MASTER_PORT", "8476")
    found = xla_device.place_of_spawned(ALONE)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.master_addr, found.master_port, found.source) == ("10.0.0.1", 8476, "xla")
    launched = detect(TORCHRUN)
    assert xla_device.place_of_spawned(launched) is launched, "torchrun's variables count"


# -- trainings on stand-in devices -------------------------------------------------------------------------------------


def train(tmp_path: Path, kind: str, *, precision: str = "no", size: int = 1) -> dict[str, Any]:
    ended: Ended = run_ranks("vendor_device.py", (kind, str(tmp_path), precision), size=size)
    assert ended.codes == [0] * size, ended.outputs
    warned = any("the shapes of the batches change" in text for text in ended.outputs)
    return ended.result() | {"warned": warned}


@pytest.mark.parametrize(("size", "precision"), [(1, "fp16"), (2, "bf16")])
def test_training_on_a_vendors_device(tmp_path: Path, size: int, precision: str) -> None:
    """Model, batches and optimizer state are on the device, its generator is saved, and ties survive the move."""
    found = train(tmp_path, "npu", precision=precision, size=size)
    names = ("npu", "MULTI_NPU", "hccl", "PreparedDDP") if size > 1 else ("npu", "NO", None, "Tied")
    assert (found["device"], found["type"], found["backend"], found["wrapped"]) == names
    assert (found["tied"], found["on_device"], found["same"]) == (True, True, True)
    assert found["again"] == found["after"]
    assert sum(found["losses"][-5:]) < sum(found["losses"][:5])
    assert {"set_device", "empty_cache"} <= set(found["calls"])
    assert ("allreduce_" in found["calls"]) == ("synchronize" in found["calls"]) == (size > 1)
    assert not found["warned"]
    # The checkpoint continues on a machine without such a device.
    on_cpu = train(tmp_path, "cpu")
    assert (on_cpu["device"], on_cpu["loaded"]) == ("cpu", found["loaded"])


@pytest.mark.parametrize("size", [1, 2])
def test_training_with_torch_xla(tmp_path: Path, size: int) -> None:
    """Steps are compiled batch by batch, and gradients averaged once per step, before the clipping."""
    found = train(tmp_path, "xla", size=size)
    backend = "xla" if size > 1 else None
    assert (found["device"], found["type"], found["backend"], found["wrapped"]) == ("xla", "XLA", backend, "Tied")
    assert (found["tied"], found["on_device"], found["same"]) == (True, True, True)
    assert found["again"] == found["after"]
    assert sum(found["losses"][-5:]) < sum(found["losses"][:5])
    assert found["synced"] >= 28, "before each batch"
    assert found["reduced"] == (28 if size > 1 else 0)
    assert ("broadcast_master_param" in found["calls"]) == (size > 1)
    assert found["warned"] == (size == 1), "the last of 65 samples; with two ranks all batches are filled up"


# -- the page ----------------------------------------------------------------------------------------------------------


def test_page_has_each_kind_and_its_program_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "accelerators.md").read_text()
    assert [kind for kind in device_backend.KINDS if f"`{kind}`" not in page and kind != "cpu"] == []
    types = [kind.distributed_type.name for kind in device_backend.KINDS.values() if kind.distributed_type is not None]
    assert [name for name in types if f"`{name}`" not in page] == []
    here = Path(__file__).read_text()
    assert [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in here] == []
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    ended = run_ranks(str(tmp_path / "train.py"), size=2)
    assert ended.codes == [0, 0], ended.outputs
    assert "2 x cpu, MULTI_CPU" in ended.outputs[0]
