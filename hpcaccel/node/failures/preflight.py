"""Preflight: checks of all nodes before the ranks start, and the nodes that did not pass.

The quick check (``preflight_checks``) runs once on each node, through srun unless the batch step runs on the only node.
The full check is the quick check and then, if no node has findings, an all-reduce of all ranks in the ranks' own
environment. The program of the all-reduce (``preflight_program``) is passed to Python as text, since the batch step
never imports torch and the ranks' Python may not have hpcaccel. If all of several nodes have findings, no node is to
blame: the findings are logged, and the ranks start. The batch step itself checks the run directory's free space
(``disk_space``).
"""

from __future__ import annotations

import logging
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hpcaccel.core.durable_files import objects_in, write_json
from hpcaccel.core.free_port import free_port
from hpcaccel.core.launch_spec import LaunchSpec, read_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import OVERLAP, SHORT_STEP
from hpcaccel.node.batch import default_signals
from hpcaccel.node.failures import Failure, cause
from hpcaccel.node.failures.disk_space import if_possible
from hpcaccel.node.failures.preflight_checks import check_node, check_shared, serve_connection_test
from hpcaccel.node.launchers import rank_command, share_gpus
from hpcaccel.node.rank import python_of, rank_environment
from hpcaccel.slurm import hostlist

__all__ = [
    "Preflight",
    "become_check",
    "check_program",
    "judge_together",
    "preflight",
    "stop_is_pending",
    "try_together",
]

log = logging.getLogger(__name__)

Findings = dict[str, list[str]]
QUICK_SECONDS = 60.0
"""Time limit for the quick check of all nodes. Healthy nodes need one or two seconds."""
LEAVE_SECONDS = 10.0
"""How long srun may take to exit once the quick check's time limit is over. After that, srun is killed."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    seconds: float
    findings: dict[str, list[str]] = field(default_factory=dict)
    """Problems by node."""
    shared: dict[str, list[str]] = field(default_factory=dict)
    """Problems with shared file systems, by node. They are no node's fault if all nodes have such problems."""
    together: str = ""
    """Why the all-reduce failed, if no node is to blame."""

    def failure(self, nodes: Sequence[str]) -> Failure | None:
        """Why the ranks must not start on ``nodes``, or None."""
        bad = {node: words for node, words in self.findings.items() if words}
        amiss = {node: words for node, words in self.shared.items() if words}
        if len(amiss) < len(nodes):  # other nodes have no problem with the shared file systems
            bad = {node: [*bad.get(node, []), *amiss.get(node, [])] for node in nodes if node in bad or node in amiss}
        if bad and (len(bad) < len(nodes) or len(nodes) == 1):
            detail = "; ".join(f"{node}: {', '.join(words)}" for node, words in bad.items())
            return Failure(cause=cause("preflight"), detail=detail[:1000], nodes=sorted(bad))
        if self.together:
            return Failure(cause=cause("network"), detail=self.together)
        return None


def preflight(
    run: RunDir, launch: LaunchSpec, *, attempt: int, nodes: Sequence[str], avoid: Sequence[str], overlap: bool = False
) -> Preflight:
    """Check all nodes unless the preflight is off. Log the findings and write them to ``preflight.json``.

    Args:
        nodes: the nodes of the ranks.
        avoid: the other nodes of the allocation.
        overlap: whether the full check may use resources that Slurm has assigned to other steps.
    """
    start = time.monotonic()
    mode = launch.resilience.preflight
    together = ""
    if mode == "off":
        return Preflight(seconds=0.0)
    if launch.local or list(nodes) == [os.environ.get("SLURMD_NODENAME")]:  # the batch step runs on the only node
        findings = {nodes[0]: list(check_node(run.path, os.environ, local=launch.local))}
        shared = {nodes[0]: list(check_shared(run.path, os.environ))}
    else:
        findings, shared = _check_nodes(run, launch, nodes=nodes, avoid=avoid)
    if mode == "full" and not launch.local and not any(findings.values()):
        blamed, together = try_together(run, launch, attempt=attempt, nodes=nodes, avoid=avoid, overlap=overlap)
        findings.update(blamed)
    seconds = round(time.monotonic() - start, 3)
    result = Preflight(seconds=seconds, findings=findings, shared=shared, together=together)
    lines_by_node = {node: [*words, *shared.get(node, [])] for node, words in findings.items()}
    for node, words in lines_by_node.items():
        for word in words:
            log.info(f"preflight: {node}: {word}")
    document = {"version": 1, "mode": mode, "seconds": seconds, "nodes": lines_by_node, "together": together}
    if_possible(lambda: write_json(run.attempt(attempt) / "preflight.json", document, sync=False))
    return result


def _check_nodes(
    run: RunDir, launch: LaunchSpec, *, nodes: Sequence[str], avoid: Sequence[str]
) -> tuple[Findings, Findings]:
    """Run the quick check. Returns two mappings by node: findings about the node itself, and findings about shared file
    systems."""
    command = ["srun", *one_task_a_node(nodes, avoid), SHORT_STEP, "--chdir=/"]
    command += [sys.executable, str(run.node_program), "preflight", str(run.path)]
    with serve_connection_test(nodes) as variables:
        environment = {**os.environ, **variables}
        share_gpus(environment)
        results, words = _run_checks(command, environment)
    if not results:
        log.warning(f"preflight: the checks did not run on any node: {words[-500:] or 'srun printed nothing'}")
        return {}, {}
    findings = {node: results[node][0] if node in results else ["the checks returned no result"] for node in nodes}
    return findings, {node: results[node][1] for node in nodes if node in results}


def one_task_a_node(nodes: Sequence[str], avoid: Sequence[str]) -> Iterator[str]:
    yield from (f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--export=ALL")
    yield from ("--kill-on-bad-exit=0", "--unbuffered", "--input=none")
    if avoid:
        yield f"--exclude={hostlist.compress(avoid)}"


def _run_checks(command: Sequence[str], env: Mapping[str, str]) -> tuple[dict[str, tuple[list[str], list[str]]], str]:
    """Run ``command`` until it ends or times out. Returns two lists of findings for each node (about the node itself,
    about shared file systems), and srun's messages."""
    with subprocess.Popen(
        command, env=dict(env), stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, preexec_fn=default_signals
    ) as srun:
        end = time.monotonic() + QUICK_SECONDS
        stopping = False
        while True:
            try:
                output, errors = srun.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                stopping = stopping or stop_is_pending()
                if time.monotonic() > end + LEAVE_SECONDS:
                    srun.kill()
                elif time.monotonic() > end or stopping:
                    srun.terminate()
    if stopping:
        return {}, "the job is being terminated"
    return dict(_parse_results(output.decode(errors="replace"))), errors.decode(errors="replace").strip()


def _parse_results(output: str) -> Iterator[tuple[str, tuple[list[str], list[str]]]]:
    for found in objects_in(output, keys={"node"}):
        own, shared = ([str(text) for text in found.get(key, [])] for key in ("findings", "shared"))
        yield str(found["node"]), (own, shared)


START_SECONDS = 120.0
"""How long the ranks of the check may take to import torch. The file system's caches may be cold."""
TOGETHER_SECONDS = 30.0
"""Time limit for the all-reduce."""


def try_together(
    run: RunDir, launch: LaunchSpec, *, attempt: int, nodes: Sequence[str], avoid: Sequence[str], overlap: bool = False
) -> tuple[dict[str, list[str]], str]:
    """Run the all-reduce of the full check. Returns the findings by node, and why the all-reduce failed; this text is
    empty if a node stands out, if the all-reduce succeeded, or if the job is being stopped."""
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
        *(OVERLAP if overlap else []),
        *launch.srun,
        *wrapped.srun,
        *wrapped.command,
    ]
    words = _run_ranks(command, wrapped.env, ranks=launch.ranks)
    return ({}, "") if stop_is_pending() else judge_together(words, launch, nodes)


def stop_is_pending() -> bool:
    """Whether SIGTERM or SIGINT is pending, which the batch step blocks. If so, missing results are no node's fault."""
    return bool({signal.SIGTERM, signal.SIGINT} & signal.sigpending())


def judge_together(
    words: Sequence[dict[str, Any]], launch: LaunchSpec, nodes: Sequence[str]
) -> tuple[dict[str, list[str]], str]:
    """Evaluate the output of the full check's ranks. Returns the same as ``try_together``.

    The findings are about ranks whose own computation failed, or, if there are none, about ranks that sent no output.
    """
    findings: dict[str, list[str]] = {}
    for word in words:
        if "alone" in word:
            findings.setdefault(word["node"], []).append(f"rank {word['rank']}: {word['alone']}")
    arrived = {word["rank"] for word in words}
    if len(arrived) == launch.ranks and sum("done" in word or "skipped" in word for word in words) == launch.ranks:
        return {}, ""
    missing = [rank for rank in range(launch.ranks) if rank not in arrived]
    if not findings and len(missing) < launch.ranks:
        for rank in missing:
            node = nodes[rank // launch.ranks_per_node]
            findings.setdefault(node, []).append(f"rank {rank} did not report within {START_SECONDS:g} s")
    reason = next((str(word["together"]) for word in words if "together" in word), "")
    nobody = reason or f"the all-reduce over all ranks did not finish within {TOGETHER_SECONDS:g} s"
    return (findings, "") if findings and len(findings) < len(nodes) else ({}, nobody)


def become_check(run: RunDir) -> NoReturn:
    """Replace this process, a rank of the full check's step, with the check's program."""
    launch = read_launch(run)
    environment = rank_environment(run, launch, dict(os.environ))
    python = python_of(launch, environment)
    os.execvpe(python, [python, *check_program()], environment)


def check_program() -> list[str]:
    """Python's arguments for the check's program: the source text, which may be inside node.pyz, and the time limit."""
    source = pkgutil.get_data("hpcaccel.node.failures", "preflight_program.py")
    assert source is not None
    return ["-c", source.decode(), f"{TOGETHER_SECONDS:g}"]


def _run_ranks(command: Sequence[str], env: Mapping[str, str], *, ranks: int) -> list[dict[str, Any]]:
    """Run the check's ranks until they end or time out, or the job is terminated. Returns the objects they printed."""
    with tempfile.TemporaryFile() as output:
        srun = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, preexec_fn=default_signals
        )
        start = time.monotonic()
        all_arrived_at: float | None = None
        while srun.poll() is None:
            now = time.monotonic()
            if all_arrived_at is None and len({word["rank"] for word in _words(output)}) == ranks:
                all_arrived_at = now
            late = (
                now - start > START_SECONDS if all_arrived_at is None else now - all_arrived_at > TOGETHER_SECONDS + 5
            )
            if late or stop_is_pending():
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
    return objects_in(output.read(), keys={"rank", "node"})
