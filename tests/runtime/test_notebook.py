"""notebook_launcher in a real Jupyter kernel: output, errors, interrupts, and which cell is to blame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import local_launch, notebook_cells
from hpcaccel.runtime.local_launch import notebook_launcher
from tests.kernels import Kernel, started_kernel

from .ranks import free_port

pytestmark = pytest.mark.torch

FIRST_CELL = """\
import json, logging, os, sys, time
from pathlib import Path
import torch
from hpcaccel import Accelerator, debug_launcher, notebook_launcher
from hpcaccel.runtime.distributed.world import World
log = logging.getLogger("mine")
log.addHandler(logging.StreamHandler(sys.stdout))
log.setLevel("INFO")
"""
TRAIN = """\
def train(word, code=""):
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    total = accelerator.reduce(torch.tensor(1.0 + rank)).item()
    print(f"{word} {rank} of {accelerator.num_processes}, {accelerator.mixed_precision}, {total}")
    exec(code)
"""
FORGETS = "accelerator.end_training()\nassert World.existing() is None"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all tests of this file: each leaves it usable."""
    with started_kernel(tmp_path_factory.mktemp("kernel"), USE_PORT=str(free_port())) as kernel:
        for source in (FIRST_CELL, TRAIN):
            assert not kernel.run(source).error
        yield kernel


def start(arguments: str, **words: object) -> str:
    """A call of notebook_launcher with two ranks, on the port of this file's kernel."""
    given = {"num_processes": 2, "use_port": "PORT", **words}
    return (
        f"notebook_launcher({arguments}, "
        + ", ".join(f"{name}={value!r}" for name, value in given.items()).replace("'PORT'", "os.environ['USE_PORT']")
        + ")"
    )


def ended(pids: list[int], *, patience_seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + patience_seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_output_of_each_rank_appears_in_the_cell(kernel: Kernel) -> None:
    code = (
        "print('error', rank, file=sys.stderr); log.info(f'logged by {rank}'); os.system(f'echo child of {rank}'); "
        "sys.stdout.write(f'unfinished by {rank}')"
    )
    shown = kernel.run(start(f"train, ('hello', {code!r})", mixed_precision="bf16"))
    assert not shown.error, shown.traceback
    for rank in range(2):
        assert f"hello {rank} of 2, bf16, 3.0\n" in shown.stdout
        assert f"error {rank}\n" in shown.stderr
        for text in (f"logged by {rank}\n", f"child of {rank}\n", f"unfinished by {rank}"):
            assert shown.stdout.count(text) == 1
    assert "launching training in 2 processes on node 1 of 1" in shown.stderr


def test_log_line_prefix_is_put_before_each_line_of_the_ranks(kernel: Kernel) -> None:
    template = "[${role_name} ${local_rank}|${rank}] "
    shown = kernel.run(start("train, ('hello', 'sys.stdout.write(\"a\\\\nb\")')", log_line_prefix_template=template))
    assert sorted(shown.stdout.splitlines()) == sorted(
        f"[default {rank}|{rank}] {text}" for rank in range(2) for text in (f"hello {rank} of 2, no, 3.0", "a", "b")
    )


def test_error_of_a_rank_arrives_with_its_traceback_and_the_others_end_at_once(kernel: Kernel) -> None:
    cell = kernel.cells + 1
    began = time.monotonic()
    shown = kernel.run(
        "def fails():\n"
        "    rank = Accelerator(cpu=True).process_index\n"
        "    if rank == 1:\n"
        "        raise ValueError('rank 1 has had enough')\n"
        "    print('pid', os.getpid())\n"
        "    time.sleep(100)\n" + start("fails")
    )
    assert time.monotonic() - began < 20
    assert shown.error.startswith("RunFailed: rank 1 failed:\nTraceback")
    assert f"Cell In[{cell}], line 4, in fails" in shown.error
    assert "raise ValueError('rank 1 has had enough')" in shown.error
    assert shown.error.endswith("ValueError: rank 1 has had enough")
    assert "local_launch.py" not in shown.traceback
    assert "site-packages/torch" not in shown.traceback
    assert "rank 1 has had enough" not in shown.stderr
    assert ended([int(line.split()[1]) for line in shown.stdout.splitlines() if line.startswith("pid")])


def test_ranks_that_failed_are_restarted(kernel: Kernel) -> None:
    code = (
        "attempt = Path(f'attempt-{rank}-{int(os.environ[\"TORCHELASTIC_RESTART_COUNT\"])}'); attempt.touch()\n"
        "if attempt.name.endswith('0'): raise ValueError('at first')"
    )
    shown = kernel.run(start(f"train, ('hello', {code!r})", max_restarts=1, monitor_interval=0.05, rdzv_id="mine"))
    assert not shown.error, shown.traceback
    assert "ValueError: at first" in shown.stderr  # of the attempt that is not the last one
    assert kernel.run("print(sorted(path.name for path in Path().glob('attempt-*-1')))").stdout == (
        "['attempt-0-1', 'attempt-1-1']\n"
    )


@pytest.mark.parametrize("launcher", ["notebook", "debug"])
def test_interrupt_ends_all_ranks_and_the_kernel_stays_usable(kernel: Kernel, launcher: str) -> None:
    kernel.run(
        "def waits():\n"
        "    rank = Accelerator(cpu=True).process_index\n"
        "    print('pid', os.getpid(), flush=True)\n"
        "    try:\n"
        "        time.sleep(100)\n"
        "    finally:\n"
        "        time.sleep(0.2)\n"
        "        print('cleaned up by', rank)"
    )
    kernel.start(start("waits") if launcher == "notebook" else "debug_launcher(waits)")
    kernel.wait_for("pid", times=2)
    pids = [int(line.split()[1]) for line in kernel.shown.stdout.splitlines()]
    began = time.monotonic()
    kernel.interrupt()
    shown = kernel.finish()
    assert time.monotonic() - began < 10
    assert shown.error.startswith("KeyboardInterrupt")
    assert ended(pids)
    for rank in range(2):
        assert f"cleaned up by {rank}\n" in shown.stdout
    after = kernel.run(start("train, ('again',)"))
    assert "again 0 of 2, no, 3.0\n" in after.stdout, after.traceback or after.stderr


def test_ranks_that_catch_an_interrupt_are_killed(kernel: Kernel) -> None:
    kernel.start(
        "def stays():\n"
        "    print('pid', os.getpid(), flush=True)\n"
        "    while True:\n"
        "        try:\n"
        "            time.sleep(100)\n"
        "        except BaseException:\n"
        "            pass\n" + start("stays")
    )
    kernel.wait_for("pid", times=2)
    kernel.interrupt()
    shown = kernel.finish()
    assert shown.error.startswith("KeyboardInterrupt")
    assert ended([int(line.split()[1]) for line in shown.stdout.splitlines() if line.startswith("pid")])


@pytest.mark.parametrize("node_rank", [0, 1])
def test_wait_for_other_nodes_can_be_interrupted(kernel: Kernel, node_rank: int) -> None:
    kernel.start(f"print('begins', flush=True)\n{start('train, ()', num_nodes=2, node_rank=node_rank)}")
    kernel.wait_for("begins")
    time.sleep(1)
    began = time.monotonic()
    kernel.interrupt()
    assert kernel.finish().error.startswith("KeyboardInterrupt")
    assert time.monotonic() - began < 5


def test_missing_node_is_named(kernel: Kernel) -> None:
    waits = {"num_nodes": 2, "rdzv_conf": {"timeout": 1}}
    shown = kernel.run(start("train, ()", node_rank=0, **waits))
    assert shown.error.startswith("RunFailed: node 1 did not join in 1 s: call notebook_launcher() with the same")
    shown = kernel.run(start("train, ()", node_rank=1, use_port=free_port(), **waits))
    assert shown.error.startswith("RunFailed: node 0 did not open 127.0.0.1:")


def test_two_nodes_train_together(kernel: Kernel, tmp_path: Path) -> None:
    port = free_port()
    program = (
        "import torch\n"
        "from hpcaccel import Accelerator, notebook_launcher\n"
        "def train():\n"
        "    accelerator = Accelerator(cpu=True)\n"
        "    total = accelerator.reduce(torch.tensor(1.0 + accelerator.process_index)).item()\n"
        "    print('from script', accelerator.process_index, accelerator.local_process_index, total)\n"
        f"notebook_launcher(train, num_processes=1, num_nodes=2, node_rank=1, use_port={port})"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    shown = kernel.run(start("train, ('hello',)", num_processes=1, num_nodes=2, node_rank=0, use_port=port))
    assert "hello 0 of 2, no, 3.0" in shown.stdout, shown.traceback
    assert other.communicate(timeout=120)[0] == "from script 1 0 3.0\n"


def test_signal_handlers_and_variables_of_the_kernel_are_as_before(kernel: Kernel) -> None:
    look = "import signal\nprint([signal.getsignal(n) for n in (2, 3, 1, 15)], sorted(os.environ))"
    before = kernel.run(look).stdout
    assert not kernel.run(start("train, ('hello',)")).error
    assert kernel.run(look).stdout == before


def test_accelerator_in_an_earlier_cell_is_refused_with_its_cell(kernel: Kernel) -> None:
    shown = kernel.run("ready = True\naccelerator = Accelerator(cpu=True)")
    assert not shown.error, shown.traceback
    created = kernel.cells
    shown = kernel.run(start("train, ('too late',)"))
    assert shown.error.startswith("RuntimeMisuse: notebook_launcher() was called in a process that already has an Acc")
    assert f"created in cell [{created}], line 2 (`accelerator = Accelerator(cpu=True)`)" in shown.error
    assert "create them only inside the function. Restart the notebook's kernel" in shown.error
    kernel.run(FORGETS)
    assert "in time 0 of 2" in kernel.run(start("train, ('in time',)")).stdout


def test_process_group_of_the_notebook_is_refused_with_the_cell_that_seems_to_create_it(kernel: Kernel) -> None:
    shown = kernel.run(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    )
    created = kernel.cells
    shown = kernel.run(start("train, ('too late',)"))
    assert f"process group, probably created in cell [{created}]: create" in shown.error
    kernel.run("dist.destroy_process_group()")


def test_used_gpu_is_refused_with_the_cells_that_seem_to_use_it(kernel: Kernel) -> None:
    """CUDA itself is not needed: torch is made to say that it has been used."""
    kernel.run("def step(batch):\n    return batch.to('cuda')")
    kernel.run("device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')")
    kernel.run("try:\n    torch.zeros(1).to(device=device)\n    torch.cuda.synchronize()\nexcept Exception:\n    pass")
    used = kernel.cells
    kernel.run("real, torch.cuda.is_initialized = torch.cuda.is_initialized, lambda: True")
    shown = kernel.run(start("train, ('too late',)"))
    kernel.run("torch.cuda.is_initialized = real")
    assert f"this process has already used a GPU, probably in cell [{used}], so" in shown.error
    assert "Restart the notebook's kernel" in shown.error
    assert "inside the function" in shown.error


def test_port_in_use_is_refused_with_the_remedy(kernel: Kernel) -> None:
    shown = kernel.run(
        "import socket\n"
        "other = socket.create_server(('127.0.0.1', int(os.environ['USE_PORT'])))\n"
        "try:\n"
        f"    {start('train, ()')}\n"
        "finally:\n"
        "    other.close()"
    )
    assert "is in use by another process on this machine" in shown.error
    assert "use_port=0" in shown.error
    assert "free 1 of 2" in kernel.run(start("train, ('free',)", use_port=0)).stdout


def test_ranks_end_with_a_kernel_that_is_killed(tmp_path: Path) -> None:
    with started_kernel(tmp_path) as kernel:
        kernel.start(
            "import os, time\n"
            "from hpcaccel import notebook_launcher\n"
            "notebook_launcher(lambda: print('pid', os.getpid(), flush=True) or time.sleep(100), num_processes=2, "
            "use_port=0)"
        )
        kernel.wait_for("pid", times=2)
        pids = [int(line.split()[1]) for line in kernel.shown.stdout.splitlines()]
        os.kill(kernel.pid, signal.SIGKILL)
        assert ended(pids)


def notebook(monkeypatch: pytest.MonkeyPatch, *cells: str) -> None:
    """Let this process pass for a kernel that has executed ``cells``."""
    shell = SimpleNamespace(user_ns={"In": ["", *cells]})
    monkeypatch.setattr(notebook_cells, "notebook_shell", lambda: shell)


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("model.cuda()", True),
        ("x = torch.zeros(3, device='cuda:1')", True),
        ("model = AutoModel.from_pretrained('gpt2', device_map='cuda')", True),
        ("where = 'cuda'\nmodel.to(where)", True),
        ("torch.cuda.set_device(0)", True),
        ("x = torch.zeros(3).xpu()", True),
        ("with open('a') as file:\n    model.to('cuda')", True),
        ("print(torch.cuda.is_available(), torch.cuda.device_count())", False),
        ("def train():\n    model.to('cuda')", False),
        ("move = lambda model: model.cuda()", False),
        ("model.to('cpu')", False),
        ("print('cuda')", False),
        ("def broken(", False),
    ],
)
def test_use_of_a_gpu_is_recognised_in_a_cell(monkeypatch: pytest.MonkeyPatch, cell: str, found: bool) -> None:
    notebook(monkeypatch, "import torch", cell)
    assert notebook_cells.cells_that_use_a_gpu() == ("cell [2]" if found else "")


def test_several_cells_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook(monkeypatch, "a.cuda()", "", "b.cuda()")
    assert notebook_cells.cells_that_use_a_gpu() == "cells [1], [3]"
    assert notebook_cells.cells_that_call("cuda") == "cells [1], [3]"


def test_outside_of_a_notebook_the_error_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(created_by=["train.py:12", "main.py:3"])
    monkeypatch.setattr("hpcaccel.runtime.distributed.world.World.existing", lambda: world)
    with pytest.raises(RuntimeMisuse, match=r"created in train\.py:12: create them only"):
        notebook_launcher(print, num_processes=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": "name"}, r"args='name' must be a tuple with the function's arguments, such as args=\('name',\)"),
        ({"args": 3}, "args=3 must be a tuple"),
        ({"function": None}, "the first argument must be a function, not None: pass train, not"),
        ({"num_processes": "2"}, "num_processes='2' must be an integer, at least 1"),
        ({"use_port": "http"}, "use_port='http' must be an integer from 0 to 65535; 0 means any free port"),
        ({"use_port": 65536}, "use_port=65536 must be"),
        ({"mixed_precision": None}, "mixed_precision=None is not a valid value"),
    ],
)
def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, object], message: str):
    monkeypatch.setattr(local_launch, "_refuse_group", lambda what: None)
    with pytest.raises(RuntimeMisuse, match=message):
        notebook_launcher(**{"function": print, "num_processes": 2, **arguments})  # type: ignore[arg-type]


def test_all_arguments_of_accelerate_reach_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(local_launch, "_refuse_group", lambda what: None)
    monkeypatch.setattr(local_launch, "_nodes_joined", lambda *args: nullcontext())
    monkeypatch.setattr(local_launch, "elastic_ranks", lambda function, args, **options: seen.update(options))
    notebook_launcher(
        print, (), 4, "fp16", "1234", "10.0.0.1", 1, 3, "static", "", {"timeout": 5}, "mine", 2, 0.5, "[${rank}] "
    )
    assert seen == {
        "min_nodes": 3,
        "max_nodes": 3,
        "nproc_per_node": 4,
        "run_id": "mine",
        "rdzv_endpoint": "10.0.0.1:1234",
        "rdzv_backend": "static",
        "rdzv_configs": {"timeout": 5, "rank": 1},
        "max_restarts": 2,
        "monitor_interval": 0.5,
        "log_line_prefix_template": "[${rank}] ",
    }
    notebook_launcher(print, num_processes=2, rdzv_backend="c10d", rdzv_endpoint="host:99")
    assert (seen["rdzv_endpoint"], seen["rdzv_backend"], seen["rdzv_configs"]) == ("host:99", "c10d", {})
