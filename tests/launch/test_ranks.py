"""Real processes: signals, exit codes, restarts, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.launch import orphan_guard

from .conftest import Launcher

pytestmark = pytest.mark.torch

WAITING = """
import os, signal, sys, time
from pathlib import Path

rank = os.environ.get("RANK", "0")
folder = Path(sys.argv[1])

def note(number, frame):
    with (folder / f"signals.{rank}").open("a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number in (signal.SIGTERM, signal.SIGINT):
        time.sleep(float(sys.argv[3]))
        sys.exit(int(sys.argv[2]))

for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(one, note)
child = os.fork()
if child == 0:
    for stream in (1, 2):  # the test reads them to their end
        os.close(stream)
    os.setsid()  # as subprocess.Popen(start_new_session=True)
    if rank == "0" and os.fork():  # as a daemon: its parent ends
        os._exit(0)
    (folder / f"child.{rank}.part").write_text(str(os.getpid()))
    (folder / f"child.{rank}.part").rename(folder / f"child.{rank}")
    time.sleep(120)
    os._exit(0)
while not (folder / f"child.{rank}").exists():
    time.sleep(0.01)
child = (folder / f"child.{rank}").read_text()
(folder / f"pids.{rank}.part").write_text(f"{os.getpid()} {child}")
(folder / f"pids.{rank}.part").rename(folder / f"pids.{rank}")
end = time.monotonic() + 120
while time.monotonic() < end:
    time.sleep(0.05)
"""
FAILING = """
import os, sys, time
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} restart {restart} {sys.argv[1:]}", flush=True)
if rank == "1" and int(restart) < int(sys.argv[1]):
    sys.exit(int(sys.argv[2]))
time.sleep(float(sys.argv[3]))
"""
AGENT = ("--cpu", "--num-processes", "2")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not after {seconds} s"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Waiting:
    """A launcher whose ranks wait for signals."""

    def __init__(self, launcher: Launcher, *flags: str, code: int = 0, seconds: float = 0.1) -> None:
        launcher.write("waiting.py", WAITING)
        self.folder = launcher.folder
        self.ranks = int(flags[-1]) if "--num-processes" in flags else 1
        self.process = launcher.start(*flags, "waiting.py", str(self.folder), str(code), str(seconds))
        wait_for(lambda: len(list(self.folder.glob("pids.?"))) == self.ranks, "ranks started")

    @property
    def pids(self) -> list[int]:
        return [int(word) for path in self.folder.glob("pids.?") for word in path.read_text().split()]

    @property
    def signals(self) -> list[str]:
        return [(self.folder / f"signals.{rank}").read_text().split()[-1] for rank in range(self.ranks)]

    def all_have(self, name: str) -> Callable[[], bool]:
        files = [self.folder / f"signals.{rank}" for rank in range(self.ranks)]
        return lambda: all(path.exists() and name in path.read_text() for path in files)

    def end(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode

    def clean_up(self) -> None:
        """Kill the children of ranks, which this test's programs leave behind on purpose."""
        for pid in self.pids:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("flags", [("--cpu",), AGENT], ids=["one", "several"])
def test_signals_reach_the_ranks_whose_code_is_the_launchers(launcher: Launcher, flags: tuple[str, ...]) -> None:
    """The ranks save for a moment after SIGTERM and exit with 0, as a training does that stops on request."""
    waiting = Waiting(launcher, *flags, seconds=1)
    for name in ("SIGUSR1", "SIGUSR2"):
        waiting.process.send_signal(signal.Signals[name])
        wait_for(waiting.all_have(name), name)
    waiting.process.send_signal(signal.SIGTERM)
    assert waiting.end() == 0
    assert waiting.signals == ["SIGTERM"] * waiting.ranks
    waiting.clean_up()


def test_interrupt_ends_the_ranks_with_their_own_code(launcher: Launcher) -> None:
    waiting = Waiting(launcher, *AGENT, code=7)
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.end() == 7
    assert waiting.signals == ["SIGINT"] * 2
    waiting.clean_up()


@pytest.mark.chaos
def test_second_interrupt_asks_ranks_that_ignore_the_first_one_to_end(launcher: Launcher) -> None:
    launcher.write(
        "stubborn.py",
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "signal.signal(signal.SIGINT, lambda *_: open('int.' + rank, 'w').close())\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        "open('up.' + rank, 'w').close()\n"
        "time.sleep(120)\n",
    )
    process = launcher.start(*AGENT, "stubborn.py")
    wait_for(lambda: len(list(launcher.folder.glob("up.?"))) == 2, "up")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(launcher.folder.glob("int.?"))) == 2, "int")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 4


@pytest.mark.chaos
def test_ranks_that_die_of_the_signal_are_reported_as_such(launcher: Launcher) -> None:
    launcher.write("sleeping.py", "import os, time\nopen('up.' + os.environ['RANK'], 'w').close()\ntime.sleep(120)\n")
    process = launcher.start(*AGENT, "sleeping.py")
    wait_for(lambda: len(list(launcher.folder.glob("up.?"))) == 2, "ranks started")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_killed_launcher_leaves_no_rank_and_no_child_of_a_rank(launcher: Launcher) -> None:
    waiting = Waiting(launcher, *AGENT)
    pids = waiting.pids
    assert len(pids) == 4
    assert all(runs(pid) for pid in pids)
    waiting.process.kill()
    waiting.process.communicate(timeout=60)
    wait_for(lambda: not any(runs(pid) for pid in pids), "ranks ended", seconds=20)


def test_signal_before_the_ranks_are_started_does_not_end_the_launcher(launcher: Launcher) -> None:
    """It comes while the agent imports torch: here a stand-in, which waits for the test."""
    launcher.write(
        "torch/__init__.py",
        "import time\nfrom pathlib import Path\n"
        "Path('importing').touch()\n"
        "while not Path('sent').exists(): time.sleep(0.02)\n"
        "raise ImportError('no real torch')\n",
    )
    launcher.write("t.py", "")
    process = launcher.start(*AGENT, "t.py", PYTHONPATH=f"{launcher.folder}:{launcher.env['PYTHONPATH']}")
    wait_for((launcher.folder / "importing").exists, "import of torch")
    for one in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(one)
    time.sleep(0.1)
    launcher.write("sent", "")
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, "no real torch" in stderr) == (1, True), stderr


def test_guard_kills_a_rank_that_has_not_been_reported(tmp_path: Path) -> None:
    guard = subprocess.Popen([sys.executable, "-I", "-S", orphan_guard.__file__, "TEST_MARK=7"], stdin=subprocess.PIPE)
    mine = {"PATH": os.environ["PATH"]}
    rank = subprocess.Popen(["sleep", "60"], env={**mine, "TEST_MARK": "7"}, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], env={**mine, "TEST_MARK": "77"}, start_new_session=True)
    try:
        guard.communicate(timeout=20)
        assert (rank.poll(), guard.returncode, other.poll()) == (-signal.SIGKILL, 0, None)
    finally:
        for process in (guard, rank, other):
            process.kill()
            process.wait()


def test_single_process_is_the_launcher_itself(launcher: Launcher) -> None:
    waiting = Waiting(launcher, "--cpu")
    assert waiting.pids[0] == waiting.process.pid
    waiting.process.kill()
    assert waiting.end() == -signal.SIGKILL
    waiting.clean_up()


def test_exit_code_of_the_failed_rank(launcher: Launcher) -> None:
    launcher.write("failing.py", FAILING)
    result = launcher(*AGENT, "failing.py", "1", "86", "30")
    assert result.returncode == 86, result.stderr
    assert "failing.py FAILED" in result.stderr


@pytest.mark.chaos
def test_quiet_launcher_leaves_out_its_report(launcher: Launcher) -> None:
    launcher.write("failing.py", FAILING)
    quiet = launcher("--quiet", *AGENT, "failing.py", "1", "87", "30")
    assert quiet.returncode == 87
    assert "failing.py FAILED" not in quiet.stderr


def test_failed_ranks_are_started_again(launcher: Launcher) -> None:
    launcher.write("failing.py", FAILING)
    result = launcher(*AGENT, "--max-restarts=2", "failing.py", "1", "3", "0.5", "--", "a  b")
    assert result.returncode == 0, result.stderr
    assert "rank 1 restart 1 ['1', '3', '0.5', '--', 'a  b']" in result.stdout
    assert "restart 2" not in result.stdout


STOPPING = """
import os, signal, sys, time
from pathlib import Path

rank = os.environ["RANK"]
with open(f"started.{rank}", "a") as file:
    file.write(os.environ["TORCHELASTIC_RESTART_COUNT"])
if sys.argv[1] == "handles":
    signal.signal(signal.SIGUSR2, lambda number, frame: sys.exit(3))
if sys.argv[1] == "85":
    sys.exit(85)
Path(f"ready.{rank}").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(("reaction", "code"), [("handles", 3), ("dies", 128 + signal.SIGUSR2), ("85", 85)])
def test_stopped_ranks_are_not_started_again(launcher: Launcher, reaction: str, code: int) -> None:
    """Whether SIGUSR2 has stopped them, or an agreement of their own, after which they exit with 85."""
    launcher.write("stopping.py", STOPPING)
    process = launcher.start(*AGENT, "--max-restarts=3", "stopping.py", reaction)
    if reaction != "85":
        wait_for(lambda: len(list(launcher.folder.glob("ready.?"))) == 2, "ranks started")
        process.send_signal(signal.SIGUSR2)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code, said
    assert [path.read_text() for path in launcher.folder.glob("started.?")] == ["0", "0"], said


@pytest.mark.chaos
def test_output_goes_to_files_and_to_the_terminal(launcher: Launcher) -> None:
    launcher.write("saying.py", "import os; print('rank', os.environ['RANK'])")
    result = launcher(*AGENT, "--tee", "1", "--log-dir", "logs", "saying.py")
    assert result.returncode == 0, result.stderr
    logs = launcher.folder.glob("logs/**/stdout.log")
    assert sorted(path.read_text() for path in logs) == ["rank 0\n", "rank 1\n"]
    assert "rank 1" in result.stdout


def test_two_machines_meet_by_c10d(launcher: Launcher) -> None:
    """Two launchers on this machine, as if each were one of two machines."""
    line = "f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\""
    launcher.write("adding.py", f"import os; os.write(1, {line}.encode())")  # one write: lines of two ranks stay whole
    port = launcher.free_port()
    flags = [
        *("--cpu", "--num_processes", "4", "--num_machines", "2", "--rdzv_backend", "c10d"),
        *("--main_process_ip", "127.0.0.1", "--main_process_port", str(port), "adding.py"),
    ]
    one, other = launcher.start(*flags), launcher.start(*flags)
    said = [process.communicate(timeout=90)[0] for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0)
    lines = sorted(line for text in said for line in text.splitlines())
    assert lines == [f"rank {rank} of 4" for rank in range(4)]


def test_program_does_not_ignore_sigpipe(launcher: Launcher) -> None:
    """Python ignores SIGPIPE, and a program that a Python process becomes would inherit it."""
    command = f"{launcher.python} -m hpcaccel launch --no-python yes | head -1"
    result = subprocess.run(
        ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"],
        cwd=launcher.folder, env=launcher.env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert result.stdout.split() == ["y", str(128 + signal.SIGPIPE)]
    assert result.stderr == ""


def test_accelerator_in_ranks_of_the_launcher(launcher: Launcher) -> None:
    launcher.write(
        "train.py",
        "import os, torch\nfrom hpcaccel import Accelerator\n"
        "accelerator = Accelerator()\n"
        "total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]))\n"
        "model = accelerator.prepare(torch.nn.Linear(2, 2))\n"
        "assert any(isinstance(one, torch._dynamo.OptimizedModule) for one in model.modules()), model\n"
        "line = ['total', total.item(), accelerator.num_processes, accelerator.mixed_precision,\n"
        "        accelerator.gradient_accumulation_steps, accelerator.distributed_type.value]\n"
        "os.write(1, (' '.join(map(str, line)) + chr(10)).encode())  # one write: lines of two ranks stay whole\n"
        "accelerator.end_training()\n",
    )
    flags = ("--mixed-precision", "bf16", "--gradient-accumulation-steps", "3", "--dynamo-backend", "eager")
    result = launcher(*AGENT, *flags, "train.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["total 3.0 2 bf16 3 MULTI_CPU"] * 2
