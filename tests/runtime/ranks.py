"""Real ranks for tests: one process each, with the environment that torchrun, srun or no launcher sets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json, read_lines, write_json
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest

from .forked import Forked, templates

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 300
BLOCKED = (signal.SIGTERM, signal.SIGUSR2)
GPUS = [path for path in ("/dev/nvidiactl", "/dev/kfd") if os.path.exists(path)]
FRESH = bool(GPUS or os.environ.get("HPCACCEL_TEST_FRESH_RANKS"))
"""Whether each rank is a new Python process. Otherwise it is forked from a process that has imported torch, which saves
seconds per rank. Not where there are GPUs: the import might use one, and a GPU does not survive a fork."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def make_run(path: Path, *, runtime: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None) -> RunDir:
    run = RunDir(path)
    run.create()
    spec = {
        "runtime": {"seed": 7, **(runtime or {})},
        "checkpoint": {"every_steps": None, "every_minutes": None, "keep": 2, "resume": "auto", **(checkpoint or {})},
    }
    launch = LaunchSpec(
        kind="program", program=[], workdir=str(path), backend="local", nodes=1, ranks_per_node=1, stop="cooperative"
    )
    write_json(run.spec, {"version": 1, "spec": spec, "launch": launch.to_dict()})
    return run


def request_stop(run: RunDir, **fields: Any) -> None:
    """Write the supervisor's request for attempt 1, by default a preemption."""
    run.attempt(1).mkdir(parents=True, exist_ok=True)
    write_json(run.stop(1), to_dict(StopRequest(**{"reason": "preempted", "then": "requeue", "time": 0.0, **fields})))


@dataclass
class Ended:
    """Exit codes and outputs of the ranks of one attempt."""

    codes: list[int]
    outputs: list[str]

    def result(self) -> dict[str, Any]:
        """The last JSON line that rank 0 printed."""
        lines = [line for line in self.outputs[0].splitlines() if line.startswith("{")]
        assert lines, "\n".join(self.outputs)
        value: dict[str, Any] = json.loads(lines[-1])
        return value


class Ranks:
    """Running ranks."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        size: int,
        run: RunDir | None = None,
        attempt: int = 1,
        blocked: bool = False,
        launcher: str = "torchrun",
        fresh: bool = FRESH,
        preload: Sequence[str] = (),
    ) -> None:
        """
        Args:
            preload: modules that the process from which the ranks are forked has imported besides torch.
            blocked: start with the signals ``BLOCKED`` blocked, as the rank shim does before it executes the program.
            fresh: see ``FRESH``.
        """
        port = free_port()
        shared = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "HPCACCEL_"))}
        shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if run is not None:
            shared |= {"HPCACCEL_RUN_DIR": str(run.path), "HPCACCEL_ATTEMPT": str(attempt), "HPCACCEL_PROTOCOL": "1"}
        self.processes = start(
            [str(PROGRAMS / program), *arguments],
            [shared | _LAUNCHERS[launcher](rank, size, port) for rank in range(size)],
            blocked=BLOCKED if blocked else (),
            fresh=fresh,
            preload=preload,
        )

    def wait(self) -> Ended:
        try:
            outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return Ended([process.returncode for process in self.processes], outputs)


def start(
    command: Sequence[str],
    environs: Sequence[dict[str, str]],
    *,
    blocked: Sequence[int] = (),
    fresh: bool = FRESH,
    preload: Sequence[str] = (),
) -> Sequence[subprocess.Popen[str] | Forked]:
    """Start the program once for each environment, with stdout and stderr in one pipe."""
    if found := [] if fresh else templates(environs, preload):
        pairs = zip(found, environs, strict=True)
        return [Forked(template, command, env=env, blocked=blocked) for template, env in pairs]
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, blocked)) if blocked else None,
            start_new_session=True,
        )
        for env in environs
    ]


def _torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _srun(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "localhost",
    }


def _alone(rank: int, size: int, port: int) -> dict[str, str]:
    return {}


_LAUNCHERS = {"torchrun": _torchrun, "srun": _srun, "alone": _alone}


def run_ranks(program: str, arguments: Sequence[str] = (), *, size: int = 2, **options: Any) -> Ended:
    return Ranks(program, *arguments, size=size, **options).wait()


def outcome(run: RunDir, attempt: int = 1) -> dict[str, Any] | None:
    return read_json(run.outcome(attempt))


def metrics(run: RunDir, name: str = "loss") -> dict[int, float]:
    """The newest value of the metric at each step."""
    return {line["step"]: line["values"][name] for line, _ in read_lines(run.metrics) if name in line["values"]}
