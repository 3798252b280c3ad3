"""Tests of the sampler: stand-in NVML, cgroup trees made by hand, and real processes on the local backend."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.samples import GpuSample, Sample, read_samples
from hpcaccel.node.samples.gpu_usage import GpuReader
from hpcaccel.node.samples.host_usage import HostReader, JobCgroup
from hpcaccel.node.samples.job_processes import JobProcesses
from hpcaccel.node.samples.node_sampler import SampleFile, interval_seconds

from .conftest import LocalRun
from .stand_in_nvml import FakeGpu, FakeNvml

Make = Callable[..., LocalRun]

GIB = 1 << 30
A, B, C = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-1", "GPU-cccccccc-2"


class Proc:
    """A stand-in for /proc."""

    def __init__(self, root: Path, run: RunDir) -> None:
        self.root, self._run = root, run
        root.mkdir(exist_ok=True)

    def add(self, pid: int, *, rank: int | None = None, ours: bool = True, cpu: int = 0, start: int = 7) -> Path:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        words = [f"HPCACCEL_RUN_DIR={self._run.path}" if ours else "HOME=/root", f"RANK={rank}"]
        (folder / "environ").write_text("\0".join(words if rank is not None else words[:1]) + "\0")
        fields = ["S", *["0"] * 10, str(cpu), "50", *["0"] * 6, str(start), "0"]
        (folder / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}")
        (folder / "status").write_text("Name:\tpython\nRssAnon:\t    1024 kB\nRssFile:\t 9 kB\nRssShmem:\t  512 kB\n")
        (folder / "io").write_text("rchar: 9\nread_bytes: 1000\nwrite_bytes: 20\n")
        return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    made.samples(1).mkdir(parents=True)
    return made


@pytest.fixture
def proc(tmp_path: Path, run: RunDir) -> Proc:
    return Proc(tmp_path / "proc", run)


def reader(nvml: FakeNvml, proc: Proc, run: RunDir, *, whole_job: bool = True, local: bool = False, **env: str):
    return GpuReader(nvml, JobProcesses(run, proc=proc.root), env, local=local, whole_job=whole_job)


# -- GPUs -------------------------------------------------------------------------------------------------------------


def test_gpu_is_sampled_with_what_the_driver_tells(proc: Proc, run: RunDir) -> None:
    gpu = FakeGpu(A, utilization=93, used=30 * GIB, milliwatts=312_400, energy_mj=5_000, pids=[41])
    proc.add(41, rank=3)
    (found,) = reader(FakeNvml([gpu]), proc, run, SLURM_GPUS_ON_NODE="1").read(15.0)
    assert found == GpuSample(
        uuid=A, name=gpu.name, utilization=93.0, memory_used=30 * GIB, memory_total=80 * GIB, power_watts=312.4,
        energy_mj=5_000, ranks=[3],
    )  # fmt: skip


def test_values_that_the_driver_does_not_tell_are_unknown(proc: Proc, run: RunDir) -> None:
    gpu = FakeGpu(A, utilization=None, milliwatts=None, energy_mj=None, pids=[1])
    (found,) = reader(FakeNvml([gpu]), proc, run, SLURM_GPUS_ON_NODE="1").read(15.0)
    assert (found.utilization, found.power_watts, found.energy_mj, found.idle_seconds) == (None, None, None, 0.0)


def test_processes_are_known_with_an_old_driver(proc: Proc, run: RunDir) -> None:
    proc.add(41, rank=2)
    (found,) = reader(FakeNvml([FakeGpu(A, pids=[41])], is_old=True), proc, run, SLURM_GPUS_ON_NODE="1").read(15.0)
    assert found.ranks == [2]


@pytest.mark.parametrize(("utilization", "idle"), [(0, 15.0), (1, 15.0), (2, 0.0)])
def test_gpu_below_two_percent_is_idle(proc: Proc, run: RunDir, utilization: int, idle: float) -> None:
    (found,) = reader(FakeNvml([FakeGpu(A, utilization=utilization)]), proc, run, SLURM_GPUS_ON_NODE="1").read(15.0)
    assert found.idle_seconds == idle


def test_mig_devices_replace_their_gpu_and_stand_beside_whole_ones(proc: Proc, run: RunDir) -> None:
    parts = [FakeGpu("MIG-1", utilization=None, total=10 * GIB, pids=[41]), FakeGpu("MIG-2", utilization=None)]
    proc.add(41, rank=0)
    nvml = FakeNvml([FakeGpu(A, mig=parts), FakeGpu(B, utilization=50)])
    found = reader(nvml, proc, run, SLURM_GPUS_ON_NODE="3").read(15.0)
    assert [(gpu.uuid, gpu.mig) for gpu in found] == [("MIG-1", True), ("MIG-2", True), (B, False)]
    assert [gpu.idle_seconds for gpu in found] == [
        0.0,
        15.0,
        0.0,
    ]  # one has no process
    assert [gpu.utilization for gpu in found] == [None, None, 50.0]


@pytest.mark.parametrize("listed", [f"{C},{A}", "GPU-cccc,GPU-aaaa"])
def test_uuids_in_cuda_visible_devices_choose_the_gpus(proc: Proc, run: RunDir, listed: str) -> None:
    nvml = FakeNvml([FakeGpu(A), FakeGpu(B), FakeGpu(C)])
    found = reader(nvml, proc, run, CUDA_VISIBLE_DEVICES=listed, SLURM_GPUS_ON_NODE="2").read(15.0)
    assert [gpu.uuid for gpu in found] == [A, C]


def test_index_is_no_evidence_of_a_gpu(proc: Proc, run: RunDir) -> None:
    """On a node that hides no GPUs, ``0`` may be any of them: only a process of the run shows which one it is."""
    gpus = [FakeGpu(A, pids=[90]), FakeGpu(B)]
    proc.add(90, ours=False)
    proc.add(41, rank=0)
    read = reader(FakeNvml(gpus), proc, run, CUDA_VISIBLE_DEVICES="0", SLURM_GPUS_ON_NODE="1").read
    assert read(15.0) == []
    gpus[1].pids = [41]
    assert [(gpu.uuid, gpu.ranks) for gpu in read(15.0)] == [(B, [0])]
    gpus[1].pids = []
    assert [(gpu.uuid, gpu.ranks) for gpu in read(15.0)] == [(B, [0])]  # still the run's, although its rank has ended


def test_gpus_hidden_by_the_cgroup_are_left_out(proc: Proc, run: RunDir) -> None:
    nvml = FakeNvml([FakeGpu(A, hidden=True), FakeGpu(B), FakeGpu(C)])
    found = reader(nvml, proc, run, CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="2").read(15.0)
    assert [gpu.uuid for gpu in found] == [B, C]


def test_job_without_gpus_samples_none_of_other_jobs(proc: Proc, run: RunDir) -> None:
    assert reader(FakeNvml([FakeGpu(A)]), proc, run).read(15.0) == []


def test_trial_samples_only_gpus_with_its_processes(proc: Proc, run: RunDir) -> None:
    proc.add(41, rank=0)
    nvml = FakeNvml([FakeGpu(A), FakeGpu(B, pids=[41])])
    found = reader(nvml, proc, run, whole_job=False, SLURM_GPUS_ON_NODE="2").read(15.0)
    assert [gpu.uuid for gpu in found] == [B]


def test_local_run_has_all_gpus(proc: Proc, run: RunDir) -> None:
    found = reader(FakeNvml([FakeGpu(A), FakeGpu(B)]), proc, run, local=True).read(15.0)
    assert [gpu.uuid for gpu in found] == [A, B]


def test_broken_driver_is_reported_and_gives_no_samples(
    proc: Proc, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reader(FakeNvml([FakeGpu(A)], broken=True), proc, run).read(15.0) == []
    assert "no samples of GPUs: Driver/library version mismatch" in capsys.readouterr().out


# -- CPUs and memory --------------------------------------------------------------------------------------------------


@pytest.fixture
def version_2(tmp_path: Path, proc: Proc) -> Path:
    """Slurm's cgroup of a job on a node with cgroup v2, seen from a step of it."""
    (proc.root / "self").mkdir()
    (proc.root / "self" / "cgroup").write_text("0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0\n")
    folder = tmp_path / "cgroup" / "system.slice" / "slurmstepd.scope" / "job_77"
    folder.mkdir(parents=True)
    (folder / "memory.current").write_text(f"{10 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon {6 * GIB}\nfile {4 * GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}\n")
    (folder / "memory.max").write_text(f"{100 * GIB}\n")
    (folder / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 2000000\n")
    (folder / "io.stat").write_text("8:0 rbytes=100 wbytes=7 rios=1 wios=1\n8:16 rbytes=11 wbytes=0 rios=1 wios=1\n")
    (folder / "cpuset.cpus.effective").write_text("0-3,8\n")
    return folder


def host(run: RunDir, proc: Proc, *, local: bool = False, whole_job: bool = True, **env: str):
    return HostReader(
        JobProcesses(run, proc=proc.root), env, node="n2", local=local, whole_job=whole_job, proc=proc.root,
        cgroups=proc.root.parent / "cgroup",
    )  # fmt: skip


def test_cgroup_of_the_job_is_read(run: RunDir, proc: Proc, version_2: Path) -> None:
    found = host(run, proc, SLURM_JOB_NODELIST="n[1-2]", SLURM_JOB_CPUS_PER_NODE="4,16").read()
    assert found == {
        "source": "cgroup2", "cpu_seconds": 2.5, "cpus": 16, "memory_bytes": 6 * GIB, "memory_limit": 100 * GIB,
        "io_read_bytes": 111, "io_write_bytes": 7,
    }  # fmt: skip


def test_lower_limit_counts_and_cpus_come_from_the_cpuset_if_slurm_tells_none(
    run: RunDir, proc: Proc, version_2: Path
) -> None:
    found = host(run, proc, SLURM_MEM_PER_NODE="2048").read()
    assert (found["memory_limit"], found["cpus"]) == (2 * GIB, 5)
    (version_2 / "memory.max").write_text("max\n")
    assert host(run, proc, SLURM_MEM_PER_NODE="0").read()["memory_limit"] is None


def test_cgroups_of_version_1_are_read(run: RunDir, proc: Proc, tmp_path: Path) -> None:
    (proc.root / "self").mkdir()
    inner = "/slurm/uid_1000/job_77/step_0/task_0"
    (proc.root / "self" / "cgroup").write_text(f"9:memory:{inner}\n4:cpu,cpuacct:{inner}\n3:cpuset:{inner}\n0::/init\n")
    job = "slurm/uid_1000/job_77"
    for name in ("memory", "cpu,cpuacct", "cpuset"):
        (tmp_path / "cgroup" / name / job).mkdir(parents=True)
    memory = tmp_path / "cgroup" / "memory" / job
    (memory / "memory.usage_in_bytes").write_text(f"{5 * GIB}\n")
    (memory / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "cgroup" / "cpu,cpuacct" / job / "cpuacct.usage").write_text("3000000000\n")
    (tmp_path / "cgroup" / "cpuset" / job / "cpuset.cpus").write_text("2,4-5\n")
    proc.add(41, rank=0)
    found = host(run, proc).read()
    assert found == {
        "source": "cgroup1", "cpu_seconds": 3.0, "cpus": 3, "memory_bytes": 3 * GIB, "memory_limit": None,
        "io_read_bytes": 1000, "io_write_bytes": 20,
    }  # fmt: skip


def test_without_a_cgroup_the_jobs_processes_count(run: RunDir, proc: Proc, tmp_path: Path) -> None:
    proc.add(41, rank=0, cpu=150)
    proc.add(42, rank=0, cpu=0)
    proc.add(43, ours=False, cpu=9999)
    read = host(run, proc).read
    ticks = os.sysconf("SC_CLK_TCK")
    found = read()
    assert (found["source"], found["cpu_seconds"], found["cpus"]) == ("processes", 250 / ticks, None)
    assert (found["memory_bytes"], found["io_read_bytes"]) == (2 * 1536 * 1024, 2000)
    (proc.root / "42").rename(tmp_path / "ended")
    found = read()
    assert (found["cpu_seconds"], found["memory_bytes"]) == (250 / ticks, 1536 * 1024)  # its CPU time stays counted


def test_process_that_becomes_the_runs_by_exec_is_found(run: RunDir, proc: Proc) -> None:
    processes = JobProcesses(run, proc=proc.root)
    proc.add(41, ours=False)
    assert processes.totals().memory_bytes == 0
    proc.add(41, rank=5)
    assert processes.totals().memory_bytes > 0
    assert processes.rank_of(41) == 5


def test_trial_and_local_run_do_not_read_the_jobs_cgroup(run: RunDir, proc: Proc, version_2: Path) -> None:
    assert host(run, proc, whole_job=False).read()["source"] == "processes"
    assert host(run, proc, local=True).read()["source"] == "processes"
    assert host(run, proc, whole_job=False, SLURM_MEM_PER_NODE="2048").read()["memory_limit"] is None


def test_cgroup_file_of_another_system_is_no_jobs(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/user.slice/user-0.slice/session-1.scope\n")
    found = JobCgroup(tmp_path / "cgroup", tmp_path)
    assert (found.version, found.cpu_seconds(), found.memory_bytes(), found.io_bytes()) == (0, None, None, None)
    assert JobCgroup(tmp_path / "none", tmp_path).version == 0


# -- the file ---------------------------------------------------------------------------------------------------------


def test_file_stays_small_and_keeps_the_whole_time(run: RunDir) -> None:
    path = run.sample_file(1, "n1")
    file = SampleFile(path, limit=20_000)
    for number in range(1500):
        gpu = GpuSample(uuid=A, utilization=100.0 * (number % 2), idle_seconds=15.0 * (number % 2 == 0))
        seconds = 15.0 if number else 0.0
        assert file.append(
            Sample(time=1000.0 + 15 * number, seconds=seconds, cpu_seconds=float(number), step=number, gpus=[gpu])
        )
        assert path.stat().st_size <= 20_000
    lines = read_samples(run, 1)["n1"]
    assert (lines[0].time, lines[0].cpu_seconds) == (1000.0, 0.0)
    assert (lines[-1].time, lines[-1].seconds, lines[-1].step) == (1000.0 + 15 * 1499, 15.0, 1499)
    assert sum(line.seconds for line in lines) == 1499 * 15
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    weighted = sum(line.seconds * line.gpus[0].utilization for line in lines if line.gpus[0].utilization is not None)
    assert weighted / (1499 * 15) == pytest.approx(50, abs=0.5)
    assert sum(line.gpus[0].idle_seconds for line in lines[1:]) == pytest.approx(749 * 15, abs=15)


def test_full_disk_costs_lines_and_a_moved_run_ends_the_sampler(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = SampleFile(run.sample_file(1, "n1"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpcaccel.node.samples.node_sampler.append_line", full)
        assert file.append(Sample(time=1.0))
        assert file.append(Sample(time=2.0))
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert file.append(Sample(time=3.0))
    run.samples(1).rename(run.path / "elsewhere")
    assert not file.append(Sample(time=4.0))


@pytest.mark.parametrize(("text", "seconds"), [(None, 15.0), ("0", 0.0), ("2.5", 2.5), ("soon", 15.0), ("-1", 15.0)])
def test_interval_can_be_set(text: str | None, seconds: float) -> None:
    assert interval_seconds({} if text is None else {"HPCACCEL_SAMPLE_SECONDS": text}) == seconds


# -- real processes ---------------------------------------------------------------------------------------------------

WAITS_FOR_SAMPLES = """
import os, time
folder = os.environ["HPCACCEL_RUN_DIR"] + "/attempts/1/samples"
end = time.monotonic() + 60
def lines():
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sum(open(os.path.join(folder, name)).read().count("\\n") for name in names if name.endswith(".jsonl"))
while lines() < 3 and time.monotonic() < end:
    sum(range(10000))
print("sampled", lines())
"""


def test_local_run_is_sampled_until_it_ends(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_SAMPLE_SECONDS", "0.2")
    run = local_run(WAITS_FOR_SAMPLES)
    assert run.run() == 0
    (lines,) = read_samples(run.dir, 1).values()
    assert len(lines) >= 3
    assert lines[0].source == "processes"
    assert lines[0].cpus == len(os.sched_getaffinity(0))
    assert lines[-1].cpu_seconds > lines[0].cpu_seconds > 0
    assert lines[-1].memory_bytes > 1 << 20
    assert not (run.dir.samples(1) / "sampler.log").exists()
    assert not _samplers(run.dir)


HOLDS_A_GPU = """
import json, os, time
with open(os.environ["STAND_IN_PID"], "w") as file:
    file.write(str(os.getpid()))
folder = os.environ["HPCACCEL_RUN_DIR"] + "/attempts/1/samples"
def ranks():
    names = os.listdir(folder) if os.path.isdir(folder) else []
    for name in names:
        for line in open(os.path.join(folder, name)) if name.endswith(".jsonl") else ():
            yield from (gpu["ranks"] for gpu in json.loads(line)["gpus"] if line.endswith("\\n"))
end = time.monotonic() + 60
while [0] not in list(ranks()) and time.monotonic() < end:
    time.sleep(0.05)
"""


def test_real_pynvml_reads_a_stand_in_driver(local_run: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rank's GPU is the second one of the driver's list: its process shows it, not its number."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: the stand-in for NVIDIA's driver cannot be built")
    source = Path(__file__).parent / "programs" / "stand_in_nvml.c"
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("STAND_IN_PID", str(tmp_path / "pid"))
    monkeypatch.setenv("HPCACCEL_SAMPLE_SECONDS", "0.2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = local_run(HOLDS_A_GPU)
    assert run.run() == 0
    (lines,) = read_samples(run.dir, 1).values()
    first, second = lines[-1].gpus
    assert (first.uuid, first.utilization, first.ranks) == ("GPU-00000000-aaaa", 0.0, [])
    assert (second.uuid, second.utilization, second.ranks) == ("GPU-00000001-aaaa", 93.0, [0])
    assert (second.memory_used, second.memory_total, second.energy_mj) == (30 * GIB, 80 * GIB, None)
    assert not (run.dir.samples(1) / "sampler.log").exists()


KILLS_THE_SAMPLER = """
import glob, os, signal, time
wanted = [b"sample", os.environ["HPCACCEL_RUN_DIR"].encode()]
def samplers():
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(path, "rb").read().split(b"\\0")
        except OSError:
            continue
        if all(word in words for word in wanted):
            yield int(path.split("/")[2])
end = time.monotonic() + 60
while not (found := list(samplers())) and time.monotonic() < end:
    time.sleep(0.05)
for pid in found:
    os.kill(pid, signal.SIGKILL)
while list(samplers()) and time.monotonic() < end:
    time.sleep(0.05)
print("killed", len(found), flush=True)
"""


def test_death_of_the_sampler_touches_nothing(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_SAMPLE_SECONDS", "0.2")
    run = local_run(KILLS_THE_SAMPLER)
    assert run.run() == 0
    assert run.dir.rank_log(1, 0).read_text() == "killed 1\n"
    assert run.ends == [("completed", "end")]


def test_sampler_that_cannot_start_touches_nothing(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_SAMPLE_SECONDS", "0.01")
    code = "import os, time\nopen(os.environ['HPCACCEL_RUN_DIR'] + '/attempts/1/samples', 'w').close()\ntime.sleep(2)"
    run = local_run(code)
    assert run.run() == 0
    assert run.ends == [("completed", "end")]
    assert "no samples of GPUs and CPUs in this attempt" in run.log


def test_no_sampler_starts_if_samples_are_off(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_SAMPLE_SECONDS", "0")
    run = local_run("import time; time.sleep(1.5)")
    assert run.run() == 0
    assert not run.dir.samples(1).exists()


def test_sampler_ends_when_a_later_attempt_has_begun(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = local_run("pass")
    run.dir.samples(1).mkdir(parents=True)
    run.dir.attempt(2).mkdir()
    command = [sys.executable, str(run.dir.node_program), "sample", str(run.dir.path), "1"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert list(read_lines(run.dir.samples(1) / "n.jsonl")) == []


def _samplers(run: RunDir) -> list[int]:
    """Samplers of the run that are alive, after at most 10 s."""
    end = time.monotonic() + 10
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"sample" in words and os.fsencode(run.path) in words:
                found.append(int(path.parent.name))
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.05)
