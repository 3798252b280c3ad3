"""`hpcaccel launch` inside allocations of a real Slurm: ranks on all nodes, signals, exit codes, no orphans."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster, wait_until

Lease = Callable[[int], list[str]]
LAUNCH = shlex.join([sys.executable, "-m", "hpcaccel", "launch"])
SHOW = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
line = " ".join([*(os.environ.get(name, "-") for name in names), os.environ["SLURMD_NODENAME"], *sys.argv[1:]])
os.write(1, (line + "\\n").encode())
sys.exit(int(os.environ.get("CODE", "0")) if os.environ.get("RANK") == "1" else 0)
"""
WAITING = """
import os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])

def note(number, frame):
    with (folder / f"signals.{os.environ['RANK']}").open("a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number in (signal.SIGTERM, signal.SIGINT):
        time.sleep(0.5)
        os._exit(9)  # sys.exit() would restore the default handlers first, and a repeated signal would then end it

for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(one, note)
(folder / f"part.{os.environ['RANK']}").write_text(str(os.getpid()))
(folder / f"part.{os.environ['RANK']}").rename(folder / f"pid.{os.environ['RANK']}")
end = time.monotonic() + 300
while time.monotonic() < end:
    time.sleep(0.05)
"""
TRAIN = """
import torch
from hpcaccel import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]))
accelerator.print(f"total {total.item()} {accelerator.num_processes} {accelerator.mixed_precision}\\n", end="")
accelerator.end_training()
"""


class Jobs:
    """Jobs on two nodes whose script is one line of `hpcaccel launch`."""

    def __init__(self, cluster: Cluster, nodes: list[str], folder: Path) -> None:
        self.cluster, self.nodes, self.folder = cluster, nodes, folder
        self.out = folder / "out"
        for name, text in {"show.py": SHOW, "waiting.py": WAITING, "train.py": TRAIN}.items():
            (folder / name).write_text(text)

    def submit(self, *lines: str, options: tuple[str, ...] = ("--gpus-per-node=2",)) -> str:
        script = self.folder / "job"
        script.write_text("\n".join(["#!/bin/bash", f"cd {shlex.quote(str(self.folder))}", *lines, ""]))
        shape = [f"--nodes={len(self.nodes)}", "--ntasks-per-node=1", "--cpus-per-task=2", *options]
        return self.cluster.sbatch(*shape, f"--nodelist={','.join(self.nodes)}", f"--output={self.out}", str(script))

    def run(self, *lines: str, options: tuple[str, ...] = ("--gpus-per-node=2",)) -> list[str]:
        """The lines that the job prints, sorted."""
        job = self.cluster.wait_for(self.submit(*lines, options=options), ["COMPLETED", "FAILED"], timeout_seconds=120)
        assert job["JobState"] == "COMPLETED", self.out.read_text()
        return sorted(line for line in self.out.read_text().splitlines() if line)


@pytest.fixture
def jobs(cluster: Cluster, lease: Lease, tmp_path: Path) -> Jobs:
    return Jobs(cluster, lease(2), tmp_path)


def test_rank_on_every_gpu_of_every_node(jobs: Jobs) -> None:
    one, two = jobs.nodes
    lines = jobs.run(f"{LAUNCH} show.py 'a  b' -- -x")
    assert lines == [
        f"0 4 0 2 0 {one} {one} a  b -- -x",
        f"1 4 1 2 0 {one} {one} a  b -- -x",
        f"2 4 0 2 1 {one} {two} a  b -- -x",
        f"3 4 1 2 1 {one} {two} a  b -- -x",
    ]


def test_one_rank_a_node_without_gpus_or_as_many_as_are_asked_for(jobs: Jobs) -> None:
    one, two = jobs.nodes
    lines = jobs.run(f"{LAUNCH} show.py", f"{LAUNCH} --num-processes 4 show.py more", options=())
    assert lines == [
        f"0 2 0 1 0 {one} {one}",
        f"0 4 0 2 0 {one} {one} more",
        f"1 2 0 1 1 {one} {two}",
        f"1 4 1 2 0 {one} {one} more",
        f"2 4 0 2 1 {one} {two} more",
        f"3 4 1 2 1 {one} {two} more",
    ]


def test_exit_code_is_that_of_the_failed_rank(jobs: Jobs) -> None:
    lines = jobs.run(f"export CODE=86; {LAUNCH} show.py > /dev/null 2>&1; echo $?")
    assert lines == ["86"]


@pytest.mark.torch
def test_accelerator_trains_on_both_nodes(jobs: Jobs) -> None:
    lines = jobs.run(f"{LAUNCH} --mixed-precision bf16 train.py")
    # Accelerator.print writes one line on each node.
    assert [line for line in lines if line.startswith("total")] == ["total 10.0 4 bf16"] * 2


@pytest.mark.torch
def test_launcher_in_each_task_of_a_step(jobs: Jobs) -> None:
    """`srun accelerate launch --num_machines ...`, as Accelerate's Slurm examples have it, and a task as a rank."""
    one, two = jobs.nodes
    flags = f"--cpu --num_processes 4 --num_machines $SLURM_NNODES --rdzv_backend c10d --main_process_ip {one}"
    lines = jobs.run(
        "export ACCELERATE_MIXED_PRECISION=no",
        f"srun {LAUNCH} {flags} --main_process_port 29553 show.py agents",
        f"srun {LAUNCH} show.py tasks",
    )
    assert [line for line in lines if "tasks" in line] == [f"- - - - - - {one} tasks", f"- - - - - - {two} tasks"]
    agents = [line.split() for line in lines if "agents" in line]
    assert [line[:2] for line in agents] == [[str(rank), "4"] for rank in range(4)]


@pytest.mark.chaos
@pytest.mark.torch
def test_agents_start_failed_ranks_again(jobs: Jobs) -> None:
    (jobs.folder / "again.py").write_text(
        "import os, sys, time\n"
        "first, rank = not os.path.exists('failed'), os.environ['RANK']\n"
        "os.write(1, f'rank {rank} of {os.environ[\"WORLD_SIZE\"]}\\n'.encode())\n"
        "if first and rank == '1':\n"
        "    time.sleep(3)\n"
        "    open('failed', 'w').close()\n"
        "    sys.exit(5)\n"
        "time.sleep(60 if first else 1)  # torch cannot restart a rank that has ended well\n"
    )
    lines = jobs.run(f"{LAUNCH} --max-restarts=1 --nproc-per-node 1 again.py")
    assert [line for line in lines if line.startswith("rank")] == [f"rank {rank} of 2" for rank in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    ("sent", "code"), [("SIGTERM", 9), ("SIGINT", 9), ("SIGKILL", 137)], ids=["SIGTERM", "SIGINT", "SIGKILL"]
)
def test_signals_reach_all_ranks_and_none_is_left(jobs: Jobs, sent: str, code: int) -> None:
    job = jobs.submit(
        f"{LAUNCH} --nproc-per-node 1 waiting.py {shlex.quote(str(jobs.folder))} &",
        "echo $! > launcher",
        "wait $!",
        "echo $? > code.part; mv code.part code",
        "sleep 300",
    )
    wait_until(lambda: len(list(jobs.folder.glob("pid.?"))) == 2, "ranks started")
    pids = [int(path.read_text()) for path in jobs.folder.glob("pid.?")]
    launcher = int((jobs.folder / "launcher").read_text())
    os.kill(launcher, signal.SIGUSR2)
    signals = [jobs.folder / f"signals.{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in signals), "SIGUSR2 in the ranks")
    os.kill(launcher, signal.Signals[sent])
    wait_until((jobs.folder / "code").exists, "end of the launcher")
    assert (jobs.folder / "code").read_text() == f"{code}\n"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "ranks ended", timeout_seconds=30)
    if sent != "SIGKILL":
        received = [path.read_text().split() for path in signals]  # Slurm on a busy node may deliver the last one twice
        assert [(first, set(others)) for first, *others in received] == [("SIGUSR2", {sent})] * 2
    jobs.cluster.run("scancel", job)


def test_step_of_a_killed_srun_is_ended(jobs: Jobs) -> None:
    job = jobs.submit(
        f"{LAUNCH} --nproc-per-node 1 waiting.py {shlex.quote(str(jobs.folder))} &",
        "echo $! > launcher",
        "wait $!; echo $? > code.part; mv code.part code; sleep 300",
    )
    wait_until(lambda: len(list(jobs.folder.glob("pid.?"))) == 2, "ranks started")
    pids = [int(path.read_text()) for path in jobs.folder.glob("pid.?")]
    launcher = (jobs.folder / "launcher").read_text().strip()
    child = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.read_text().rpartition(")")[2].split()[1] == launcher
    )
    os.kill(child, signal.SIGKILL)
    wait_until((jobs.folder / "code").exists, "end of the launcher")
    assert (jobs.folder / "code").read_text() == "137\n"
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "ranks ended", timeout_seconds=30)
    jobs.cluster.run("scancel", job)
