"""The full check: all ranks compute together once, in their own environment, before the training begins there.

The program is a text, since the batch step never imports torch, and the ranks' Python may not have hpcaccel.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.launch_spec import Launch, read_launch
from hpcaccel.node.launchers.start_ranks import default_signals, free_port, rank_command, share_gpus
from hpcaccel.node.rank import python_of, rank_environment
from hpcaccel.slurm import hostlist

__all__ = ["PROGRAM", "become_check", "judge_together", "told_to_leave", "try_together"]

START_SECONDS = 120.0
"""How long ranks may take to import torch, from a file system that may be cold."""
TOGETHER_SECONDS = 30.0

PROGRAM = """
import json, os, socket, sys, time
from datetime import timedelta

def say(**what):
    what.update(rank=rank, node=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    os.write(1, json.dumps(what).encode() + b"\\n")

rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    say(skipped=str(error))
    sys.exit(0)
try:
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    ones = torch.ones(256, 256, device=device)
    if (ones @ ones).ne(256).any():
        raise RuntimeError(f"{device} computes wrongly")
    if gpus:
        torch.cuda.set_device(device)
except Exception as error:
    say(alone=f"{type(error).__name__}: {error}"[:300])
    sys.exit(1)
say(came=True)
try:
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=SECONDS))
    numbers = torch.full((1 << 18,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    if numbers.ne(world * (world + 1) / 2).any():
        raise RuntimeError("the sum over all ranks is wrong")
    say(done=True)
    dist.barrier()
    dist.destroy_process_group()
except Exception as error:
    say(together=f"{type(error).__name__}: {error}"[:300])
    os._exit(1)
""".replace("SECONDS", f"{TOGETHER_SECONDS:g}")


def try_together(
    run: RunDir, launch: Launch, *, attempt: int, nodes: Sequence[str], avoid: Sequence[str]
) -> tuple[dict[str, list[str]], str]:
    """Findings by node; and why the ranks did not compute together, where no node stands out."""
    environment = {
        **os.environ,
        "HPCACCEL_ATTEMPT": str(attempt),
        "MASTER_ADDR": nodes[0],
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(launch.ranks),
    }
    if launch.share_gpus:
        share_gpus(environment)
    wrapped = rank_command(run, launch, environment, "preflight-rank")
    command = [
        "srun",
        *(f"--nodes={launch.nodes}", f"--ntasks={launch.ranks}", f"--ntasks-per-node={launch.ranks_per_node}"),
        *("--export=ALL", "--kill-on-bad-exit=0", "--unbuffered", "--input=none", f"--chdir={launch.workdir}"),
        *([f"--exclude={hostlist.compress(avoid)}"] if avoid else []),
        *launch.srun,
        *wrapped.srun,
        *wrapped.command,
    ]
    words = _run(command, wrapped.env, ranks=launch.ranks)
    return ({}, "") if told_to_leave() else judge_together(words, launch, nodes)


def told_to_leave() -> bool:
    """Whether the batch step, which blocks these signals, is to end: then who does not answer is not to blame."""
    return bool({signal.SIGTERM, signal.SIGINT} & signal.sigpending())


def judge_together(
    words: Sequence[dict[str, Any]], launch: Launch, nodes: Sequence[str]
) -> tuple[dict[str, list[str]], str]:
    """Who is to blame by what the ranks have said: those that fail alone, then those that never came."""
    findings: dict[str, list[str]] = {}
    for word in words:
        if "alone" in word:
            findings.setdefault(word["node"], []).append(f"rank {word['rank']}: {word['alone']}")
    came = {word["rank"] for word in words}
    if len(came) == launch.ranks and sum("done" in word or "skipped" in word for word in words) == launch.ranks:
        return {}, ""
    missing = [rank for rank in range(launch.ranks) if rank not in came]
    if not findings and len(missing) < launch.ranks:
        for rank in missing:
            node = nodes[rank // launch.ranks_per_node]
            findings.setdefault(node, []).append(f"rank {rank} did not come within {START_SECONDS:g} s")
    said = next((str(word["together"]) for word in words if "together" in word), "")
    nobody = said or f"no all-reduce between all ranks within {TOGETHER_SECONDS:g} s"
    return (findings, "") if findings and len(findings) < len(nodes) else ({}, nobody)


def become_check(run: RunDir) -> NoReturn:
    """Replace this process, a rank of the check's own step, by the program."""
    launch = read_launch(run)
    environment = rank_environment(run, launch, dict(os.environ))
    python = python_of(launch, environment)
    os.execvpe(python, [python, "-c", PROGRAM], environment)


def _run(command: Sequence[str], env: Mapping[str, str], *, ranks: int) -> list[dict[str, Any]]:
    """Everything that the ranks have said when they are done, or their time is over."""
    with tempfile.TemporaryFile() as output:
        srun = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, preexec_fn=default_signals
        )
        start = time.monotonic()
        all_came: float | None = None
        while srun.poll() is None:
            now = time.monotonic()
            if all_came is None and len({word["rank"] for word in _words(output)}) == ranks:
                all_came = now
            late = now - start > START_SECONDS if all_came is None else now - all_came > TOGETHER_SECONDS + 5
            if late or told_to_leave():
                _end(srun)
            time.sleep(0.2)
        return list(_words(output))


def _end(srun: subprocess.Popen[bytes]) -> None:
    srun.terminate()
    try:
        srun.wait(10)
    except subprocess.TimeoutExpired:
        srun.kill()


def _words(output: Any) -> Iterator[dict[str, Any]]:
    output.seek(0)
    for line in output.read().decode(errors="replace").splitlines():
        try:
            word = json.loads(line)
        except ValueError:
            continue
        if isinstance(word, dict) and {"rank", "node"} <= word.keys():
            yield word
