"""Checks that need a GPU. Each check is a function that returns its result as text."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CHECKS", "NEED_CUDA", "Failed", "Skipped", "train"]

TRAIN = Path(__file__).with_name("train.py")
ROOT = Path(__file__).parents[2]
PARTS = Path(__file__).with_name("collectives.py")
SECONDS = 240


class Failed(Exception):
    """A check has failed."""


class Skipped(Exception):
    """A check cannot be done on this machine."""


def nccl() -> str:
    """One rank, strategy fsdp: parameters are gathered and gradients reduced in an NCCL group of one."""
    plain = train("--side", "plain", "--dropout", "0")
    ours = train("--strategy", "fsdp", "--dropout", "0")
    _close(ours["losses"], plain["losses"], relative=1e-4)
    return f"device {ours['device']}; losses of {len(ours['losses'])} steps as in plain PyTorch within 1e-4"


def shared_gpu() -> str:
    """Two ranks on one GPU: NCCL refuses that, gloo carries CUDA tensors; every collective of the Accelerator."""
    return ranks(PARTS, 2)[0].strip().splitlines()[-1]


def precision(name: str) -> Callable[[], str]:
    def check() -> str:
        if name == "fp8":
            _need("torchao", "fp8 needs torchao")
        plain = train("--side", "plain", "--dropout", "0", "--steps", "30", "--width", "256")
        ours = train("--precision", name, "--dropout", "0", "--steps", "30", "--width", "256")
        off = _close(ours["losses"], plain["losses"], relative=0.05)
        return f"losses of 30 steps within {100 * off:.2f} % of float32"

    check.__doc__ = f"Mixed precision {name}: the losses stay near those of float32."
    return check


def exact(*arguments: str) -> Callable[[], str]:
    def check() -> str:
        """Killed after step 7 and resumed: each step's loss and the final weights are those of the whole training."""
        words = ["--deterministic", "--shuffle", *arguments]
        with tempfile.TemporaryDirectory() as folder:
            whole = _training(Path(folder) / "whole", *words)
            _training(Path(folder) / "killed", *words, "--kill-at", "7", code=-9)
            resumed = _training(Path(folder) / "killed", *words, attempt=2)
            wanted, found = (_losses(Path(folder) / name) for name in ("whole", "killed"))
            guarantees = _guarantees(Path(folder) / "killed")
        for step, losses in found.items():
            if set(losses) != set(wanted[step]):
                raise Failed(f"step {step}: {losses} instead of {wanted[step]}")
        if found.keys() != wanted.keys() or resumed["weights"] != whole["weights"]:
            raise Failed(f"weights {resumed['weights']} instead of {whole['weights']}; steps {sorted(found)}")
        again = sum(len(losses) > 1 for losses in found.values())
        if again == len(found) or not again:
            raise Failed(
                f"{again} of {len(found)} steps were repeated: either nothing was resumed, or nothing was lost"
            )
        return f"{len(found)} steps equal to the last bit, {again} of them done twice; manifests: {guarantees}"

    check.__doc__ = f"Bit-exact resume after SIGKILL, {' '.join(arguments) or 'float32, DDP of one rank'}."
    return check


def out_of_memory() -> str:
    """find_executable_batch_size: on CUDA out of memory the batch gets smaller, and the memory is freed."""
    return _python(
        """
import torch
from hpcaccel import find_executable_batch_size
free = torch.cuda.mem_get_info()[0]
tried = []

@find_executable_batch_size(starting_batch_size=16)
def fits(batch_size):
    tried.append(batch_size)
    kept = [torch.empty(free // 10, dtype=torch.uint8, device="cuda") for _ in range(batch_size)]
    return len(kept)

found = fits()
left = torch.cuda.mem_get_info()[0]
assert found in (8, 9) and tried[0] == 16, (found, tried)
torch.cuda.empty_cache()
assert torch.cuda.memory_allocated() == 0, torch.cuda.memory_allocated()
print("tried", tried, "of a tenth of the memory each")
"""
    )


def preflight() -> str:
    """The program of the full preflight: a matrix product and an all-reduce by NCCL."""
    from hpcaccel.node.failures.preflight import check_program

    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    printed = _run([sys.executable, *check_program()], {"MASTER_ADDR": "127.0.0.1", **alone})
    if '"done": true' not in printed:
        raise Failed(printed)
    return "computes, and sums over its group"


def forked_after_cuda() -> str:
    """notebook_launcher refuses to fork a process that has already used CUDA, with the reason."""
    return _python(
        """
import torch
from hpcaccel import notebook_launcher
from hpcaccel.errors import RuntimeMisuse
torch.ones(1, device="cuda")
try:
    notebook_launcher(print, num_processes=2)
except RuntimeMisuse as error:
    print(str(error)[:90])
else:
    raise SystemExit("notebook_launcher has forked")
"""
    )


CHECKS: dict[str, Callable[[], str]] = {
    "NCCL": nccl,
    "two ranks, gloo": shared_gpu,
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "fp8": precision("fp8"),
    "exact, float32": exact(),
    "exact, bf16": exact("--precision", "bf16"),
    "exact, fp16": exact("--precision", "fp16"),
    "exact, FSDP bf16": exact("--precision", "bf16", "--strategy", "fsdp"),
    "exact, compiled": exact("--precision", "bf16", "--compile"),
    "out of memory": out_of_memory,
    "preflight": preflight,
    "notebook": forked_after_cuda,
}
NEED_CUDA = ("out of memory", "notebook")


# -- running -----------------------------------------------------------------------------------------------------------


def train(*arguments: str) -> dict[str, Any]:
    """Run one training in a new process, without a run directory. Returns its output."""
    return _result(_run([sys.executable, str(TRAIN), *arguments], {}))


def ranks(program: Path, size: int) -> list[str]:
    """The output of each rank of a program, all on one GPU."""
    port = str(free_port())
    each = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=environment() | each | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    for process, text in zip(processes, printed, strict=True):
        if process.returncode:
            raise Failed(text[-1500:])
    return printed


def environment() -> dict[str, str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**outside, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def make_run(folder: Path, **checkpoint: Any) -> dict[str, str]:
    """Create the files of a run directory that ranks read. Returns the environment variables for it."""
    folder.mkdir(parents=True, exist_ok=True)
    section = {"every_minutes": None, "keep": 2, "resume": "auto", **checkpoint}
    launch = {
        "kind": "program", "program": [], "workdir": str(folder), "backend": "local", "nodes": 1, "ranks_per_node": 1,
        "stop": "cooperative",
    }  # fmt: skip
    document = {"version": 1, "spec": {"runtime": {"seed": 3}, "checkpoint": section}, "launch": launch}
    (folder / "spec.json").write_text(json.dumps(document))
    return {"HPCACCEL_RUN_DIR": str(folder), "HPCACCEL_PROTOCOL": "1"}


def _training(folder: Path, *arguments: str, attempt: int = 1, code: int = 0) -> dict[str, Any]:
    variables = make_run(folder, every_steps=5) | {"HPCACCEL_ATTEMPT": str(attempt)}
    command = [sys.executable, str(TRAIN), *arguments, "--losses", str(folder / "losses")]
    printed = _run(command, variables, code=code)
    return {} if code else _result(printed)


def _losses(folder: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), []).append(loss)
    return found


def _guarantees(folder: Path) -> str:
    found = {json.loads(path.read_text())["guarantee"] for path in folder.glob("checkpoints/step_*/COMMITTED")}
    return ", ".join(sorted(found)) or "no checkpoint"


def _run(command: list[str], variables: dict[str, str], *, code: int = 0) -> str:
    ended = subprocess.run(
        command,
        env=environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if ended.returncode != code:
        raise Failed(f"exit code {ended.returncode} instead of {code}: {ended.stdout[-1500:]}")
    return ended.stdout


def _python(program: str, **variables: str) -> str:
    variables.setdefault("MASTER_ADDR", "127.0.0.1")
    return _run([sys.executable, "-c", program], variables).strip().splitlines()[-1]


def _result(printed: str) -> dict[str, Any]:
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if not lines:
        raise Failed(printed[-1500:])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _close(found: list[str], wanted: list[str], *, relative: float) -> float:
    """The largest relative difference between two rows of losses."""
    pairs = [(float.fromhex(one), float.fromhex(other)) for one, other in zip(found, wanted, strict=True)]
    if not all(math.isfinite(one) for one, _ in pairs):
        raise Failed(f"losses are not finite: {pairs}")
    off = max(abs(one - other) / abs(other) for one, other in pairs)
    if off > relative:
        raise Failed(
            f"losses differ by {off:.3g} of their value, {relative:g} is the limit: {pairs[:3]} … {pairs[-3:]}"
        )
    if not pairs[-1][0] < pairs[0][0]:
        raise Failed(f"the loss did not fall: {pairs[0][0]:.3f}, {pairs[-1][0]:.3f}")
    return off


def _need(module: str, text: str) -> None:
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise Skipped(f"{text}, which is not installed")
