"""A rank of the self-test on a node of its own, with a fault planted in one of the ranks.

Usage: ``selftest_rank.py FAULT VICTIM ARGUMENTS…``
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time

FAULT, VICTIM = sys.argv[1], sys.argv[2]
is_victim = os.environ["RANK"] == VICTIM
os.environ.setdefault("SLURMD_NODENAME", f"n{os.environ['RANK']}")
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
size = os.environ["WORLD_SIZE"]
os.environ |= {"SLURM_JOB_NODELIST": f"n[0-{int(size) - 1}]", "SLURM_TASKS_PER_NODE": f"1(x{size})"}
arguments = sys.argv[3:]

if is_victim and FAULT == "absent":
    sys.exit(1)
if is_victim and FAULT == "wrong_size":
    os.environ["WORLD_SIZE"] = "4"
if is_victim and FAULT == "twice":
    os.environ["RANK"] = "0"
if FAULT == "full_disk":
    folder, *arguments = arguments
    arguments += ["--folder", folder] if is_victim else []

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from hpcaccel.runtime.selftest import collective_checks, pair_links, training_checks  # noqa: E402
from hpcaccel.runtime.selftest.self_test import main  # noqa: E402


class SkewedTime:
    """The module ``time`` of a node whose clock is three seconds ahead."""

    perf_counter = staticmethod(time.perf_counter)

    @staticmethod
    def time() -> float:
        return time.time() + 3.0


class WrongCollectives:
    """``torch.distributed`` with a wrong all_reduce."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_reduce(self, numbers) -> None:
        dist.all_reduce(numbers)
        numbers += 1


class WrongMessages:
    """``torch.distributed`` of a node whose network interface changes a byte of each message in one direction."""

    def __init__(self, direction: str) -> None:
        self.direction = direction

    def __getattr__(self, name):
        return getattr(dist, name)

    def send(self, message, other) -> None:
        if message.dtype == torch.uint8 and self.direction == "send":
            message = message.clone()
            message[-1] += 1
        dist.send(message, other)

    def recv(self, message, other) -> None:
        dist.recv(message, other)
        if message.dtype == torch.uint8 and self.direction == "receive":
            message[-1] += 1


def plant() -> None:
    check_training = training_checks.check_training
    segment = collective_checks._Collectives.segment
    if FAULT == "sends_wrong":

        def wrong(self, rank, type_, *, receiver=0):
            found = segment(self, rank, type_, receiver=receiver)
            return found + (sys._getframe(1).f_code.co_name == "all_gather")

        collective_checks._Collectives.segment = wrong
    elif FAULT == "receives_wrong":
        vars(collective_checks)["dist"] = WrongCollectives()
    elif FAULT in ("pairs_send_wrong", "pairs_receive_wrong"):
        vars(pair_links)["dist"] = WrongMessages(FAULT.split("_")[1])
    elif FAULT == "clock":
        vars(pair_links)["time"] = SkewedTime
    elif FAULT == "old_kernel":
        platform.release = lambda: "4.18.0-553.el8.x86_64"
    elif FAULT == "hangs":
        training_checks.check_training = lambda runner, training: time.sleep(600)
    elif FAULT == "dies":
        pair_links.measure_clocks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "wrong_training":

        def train(runner, training):
            with torch.no_grad():
                next(training.model.parameters()).mul_(1.5)
            check_training(runner, training)

        training_checks.check_training = train
    elif FAULT == "device":
        torch.Tensor.__matmul__ = lambda self, other: torch.matmul(self, other) + (self.shape == (512, 512)) * odd()


def odd(calls: list[int] = []) -> int:  # noqa: B006
    """1 at every second call."""
    calls.append(0)
    return 1 - len(calls) % 2


if is_victim:
    plant()
code = main(arguments)
sys.stdout.flush()
os._exit(code)
