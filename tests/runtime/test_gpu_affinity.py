"""The names of GPUs and the CPUs near them, with stand-ins: nvidia-smi as a script, sysfs as a folder."""

from __future__ import annotations

import os
import subprocess
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import process_group, rank_env
from hpcaccel.runtime.distributed.world import World
from hpcaccel.utils import check_cuda_p2p_ib_support, get_gpu_info, set_numa_affinity
from hpcaccel.utils.environment import override_numa_affinity

pytestmark = pytest.mark.torch


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an nvidia-smi that reports these GPUs; without a call there is none."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, count: int, driver: str = "550.54.15") -> None:
        program = tmp_path / "nvidia-smi"
        rows = "\n".join(f"echo '{name}'" for _ in range(count))
        versions = "\n".join(f"echo {driver}" for _ in range(count))
        program.write_text(f"#!/bin/bash\ncase $1 in *=name) {rows};; *) {versions};; esac\n".replace("\n\n", "\n"))
        program.chmod(0o755)

    return make


def test_names_and_number_of_gpus(nvidia_smi: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        get_gpu_info()
    nvidia_smi("NVIDIA H100 80GB HBM3", 2)
    assert get_gpu_info() == (["NVIDIA H100 80GB HBM3"] * 2, 2)
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\nexit 9\n")
    with pytest.raises(subprocess.CalledProcessError):
        get_gpu_info()


@pytest.mark.parametrize(
    ("name", "count", "driver", "expected"),
    [
        ("NVIDIA H100", 2, "470.57.02", True),
        ("NVIDIA GeForce RTX 4090", 1, "535.104.05", True),
        ("NVIDIA GeForce RTX 4090", 2, "535.104.05", False),
        ("NVIDIA GeForce RTX 4090", 2, "550.40.07", True),
    ],
)
def test_peers_of_the_rtx_40_series_need_a_newer_driver(
    nvidia_smi: Any, name: str, count: int, driver: str, expected: bool
) -> None:
    assert check_cuda_p2p_ib_support()
    nvidia_smi(name, count, driver)
    assert check_cuda_p2p_ib_support() == expected


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs on one NUMA node each, and a sysfs that this test fills."""
    buses = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (0x17, 0xCA)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: buses[index])
    return tmp_path


def near(system: Path, bus: str, cpus: str) -> None:
    device = system / f"bus/pci/devices/0000:{bus}:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(f"{cpus}\n")


@pytest.fixture
def binding() -> Any:
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_process_is_bound_to_the_cpus_near_its_gpu(system: Path, binding: set[int]) -> None:
    last = max(binding)
    near(system, "17", "4090-4095")
    near(system, "ca", f"{last}-{last},4000-4003")
    override_numa_affinity(1, system=system)
    assert os.sched_getaffinity(0) == {last}
    os.sched_setaffinity(0, binding)
    override_numa_affinity(0, system=system)  # none of these CPUs exists here
    assert os.sched_getaffinity(0) == binding


def test_single_visible_gpu_is_meant_whatever_the_index(
    system: Path, binding: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    near(system, "17", str(min(binding)))
    override_numa_affinity(5, system=system)
    assert os.sched_getaffinity(0) == {min(binding)}


def test_index_without_a_gpu_is_an_error(system: Path) -> None:
    with pytest.raises(RuntimeMisuse, match="local_process_index=2: this process sees 2 GPUs"):
        override_numa_affinity(2, system=system)


def test_verbose_binding_is_logged(system: Path, binding: set[int], caplog: pytest.LogCaptureFixture) -> None:
    near(system, "17", str(min(binding)))
    caplog.set_level("INFO", "hpcaccel.runtime.distributed.gpu_affinity")
    override_numa_affinity(0, system=system)
    assert not caplog.messages
    override_numa_affinity(0, verbose=True, system=system)
    assert caplog.messages == [f"process 0 is bound to 1 CPUs: [{min(binding)}]"]


def test_binding_is_set_once_for_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append(0)))
    set_numa_affinity.cache_clear()
    set_numa_affinity(0)
    set_numa_affinity(0)
    assert len(asked) == 1


@pytest.mark.parametrize(("variable", "bound"), [("1", [3]), ("0", []), (None, [])])
def test_ranks_are_bound_if_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, bound: list[int]
) -> None:
    calls: list[int] = []
    monkeypatch.delenv("ACCELERATE_CPU_AFFINITY", raising=False)
    if variable is not None:
        monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", variable)
    monkeypatch.setattr("hpcaccel.runtime.distributed.world.set_numa_affinity", calls.append)
    monkeypatch.setattr(process_group, "known_environment", lambda: rank_env.ALONE)
    monkeypatch.setattr(process_group, "choose_device", lambda env, *, cpu: torch.device("cuda", 3))
    monkeypatch.setattr(process_group, "join", lambda *args, **options: None)
    monkeypatch.setattr(World, "_generations", 0)
    World(cpu=False, backend=None, init_method=None, timeout=timedelta(seconds=1))
    assert calls == bound
