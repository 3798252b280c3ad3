from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.launch import gpus
from hpcaccel.launch.gpus import count_gpus, find_gpus, has_other_devices

from .planning import PYTHON, config, plan, refusal

NVIDIA_SMI = """#!/bin/bash
echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'
echo '  MIG 1g.10gb     Device  0: (UUID: MIG-1)'
echo 'GPU 1: NVIDIA H100 (UUID: GPU-2)'
"""


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty sysfs, and a PATH without nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "sys"


@pytest.mark.parametrize(
    ("value", "count"), [("0,1,3", 3), ("", 0), ("-1", 0), ("2,-1,0", 1), ("NoDevFiles", 0), ("GPU-8932f937,GPU-1", 2)]
)
def test_visible_devices_decide(system: Path, value: str, count: int) -> None:
    assert count_gpus({"CUDA_VISIBLE_DEVICES": value}, system=system) == count
    assert count_gpus({"ZE_AFFINITY_MASK": value}, system=system) == count


def test_nvidia_smi_lists_gpus(system: Path, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    assert count_gpus({}, system=system) == 2
    assert find_gpus({}, system=system).variable == "CUDA_VISIBLE_DEVICES"


def test_nvidia_smi_without_a_driver_lists_none(system: Path, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/bash\necho 'GPU access blocked by the operating system'; exit 9\n")
    program.chmod(0o755)
    assert count_gpus({}, system=system) == 0


def test_kernel_lists_amds_gpus(system: Path) -> None:
    for number, units in enumerate((0, 440, 440)):
        node = system / f"class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\nmem_banks_count 1\n")
    assert count_gpus({}, system=system) == 2
    assert find_gpus({}, system=system).variable == "CUDA_VISIBLE_DEVICES"


def test_kernel_lists_intels_gpus_for_computing(system: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x8086", "0x038000"), ("0x8086", "0x030000"), ("0x1a03", "0x038000"), ("0x8086", "0x038000")]
    ):
        device = system / f"bus/pci/devices/0000:{number:02d}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert count_gpus({}, system=system) == 2
    assert find_gpus({}, system=system).variable == "ZE_AFFINITY_MASK"


def test_machine_without_gpus(system: Path) -> None:
    assert count_gpus({}, system=system) == 0


@pytest.mark.parametrize(
    ("flags", "calls"), [("--gpu-ids 0,1", 1), ("--num-processes 2", 1), ("--tpu", 0), ("--cpu", 0)]
)
def test_launcher_asks_nvidia_smi_once_if_at_all(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, calls: int
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI + f"echo >> {tmp_path}/calls\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    Path("calls").touch()
    found = plan(f"{flags} t.py", {"PATH": str(tmp_path)})
    assert len(Path("calls").read_text().splitlines()) == calls
    assert found.environ.get("CUDA_VISIBLE_DEVICES") == ("0,1" if "ids" in flags else None)


@pytest.fixture
def no_gpu(system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPUs, in whose folder ``t.py`` is; its folder of device files."""
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setattr(gpus.has_other_devices, "__kwdefaults__", {"devices": devices})
    monkeypatch.setattr(gpus.find_gpus, "__kwdefaults__", {"system": system})
    return devices


def test_gpu_ids_on_a_machine_without_gpus_are_refused(no_gpu: Path) -> None:
    for flags in ("--gpu-ids 0,2", "--gpu-ids 0", "--gpu-ids 0,1 --num-processes 2"):
        assert "this machine has no GPU. To try the script on CPUs, use --cpu" in refusal(f"{flags} t.py", {})
    assert refusal("--gpu-ids 0,2 t.py", {}).startswith("--gpu-ids 0,2: ")


def test_gpu_ids_that_are_all_or_in_the_file_are_no_mistake_without_gpus(no_gpu: Path) -> None:
    assert plan("--gpu-ids all t.py", {}).command == [PYTHON, "t.py"]
    assert plan("t.py", {}, config(gpu_ids="0", distributed_type="NO")).command == [PYTHON, "t.py"]


def test_gpu_ids_on_cpus_have_no_effect(no_gpu: Path) -> None:
    found = plan("--cpu --gpu-ids 0,2 t.py", {})
    assert (found.command, found.notes) == ([PYTHON, "t.py"], ["--gpu-ids with --cpu: no effect"])
    assert plan("--gpu-ids 0,2 t.py", {"ACCELERATE_USE_CPU": "1"}).notes == found.notes


@pytest.mark.parametrize("name", ["davinci0", "dri/renderD128", "nvidia0"])
def test_gpu_ids_may_be_those_of_accelerators_that_are_not_counted(no_gpu: Path, name: str) -> None:
    assert not has_other_devices(devices=no_gpu)
    (no_gpu / name).parent.mkdir(exist_ok=True)
    (no_gpu / name).touch()
    assert has_other_devices(devices=no_gpu)
    assert plan("--gpu-ids 0 t.py", {}).command == [PYTHON, "t.py"]


def test_gpu_ids_may_be_those_of_the_devices_in_the_file(no_gpu: Path) -> None:
    assert plan("--gpu-ids 0,1 t.py", {}, config(distributed_type="MULTI_NPU", num_processes=2)).command
