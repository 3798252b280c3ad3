"""Checks before the ranks start: once on each node, side by side, through srun; and which nodes did not pass.

A finding that all nodes share is not a node's own: then the ranks start all the same, and it stands in the log. Whether
the run directory has room is looked at once, by the batch step (``disk_space``).
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hpcaccel.core.run_dir import RunDir, write_json
from hpcaccel.node.failures.causes import cause
from hpcaccel.node.failures.classify import Failure
from hpcaccel.node.failures.preflight_checks import TOKEN, WHERE, check_node, check_shared
from hpcaccel.node.failures.preflight_ranks import told_to_leave, try_together
from hpcaccel.node.launch_spec import Launch
from hpcaccel.node.launchers.start_ranks import default_signals, share_gpus
from hpcaccel.node.retry_io import if_possible
from hpcaccel.slurm import hostlist

__all__ = ["Preflight", "preflight"]

Findings = dict[str, list[str]]
QUICK_SECONDS = 60.0
"""How long all nodes together may take; healthy ones need one or two seconds."""
LEAVE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Preflight:
    seconds: float
    findings: dict[str, list[str]] = field(default_factory=dict)
    """What was found, by node."""
    shared: dict[str, list[str]] = field(default_factory=dict)
    """The same of file systems that all nodes see; a single node is never to blame for these."""
    together: str = ""
    """Why the ranks could not compute together, where no node is to blame."""

    def failure(self, nodes: Sequence[str]) -> Failure | None:
        """Why the ranks must not start on these nodes, or None."""
        bad = {node: words for node, words in self.findings.items() if words}
        amiss = {node: words for node, words in self.shared.items() if words}
        if len(amiss) < len(nodes):  # others can write there
            bad = {node: [*bad.get(node, []), *amiss.get(node, [])] for node in nodes if node in bad or node in amiss}
        if bad and (len(bad) < len(nodes) or len(nodes) == 1):
            detail = "; ".join(f"{node}: {', '.join(words)}" for node, words in bad.items())
            return Failure(cause=cause("preflight"), detail=detail[:1000], nodes=sorted(bad))
        if self.together:
            return Failure(cause=cause("network"), detail=self.together)
        return None


def preflight(
    run: RunDir, launch: Launch, *, attempt: int, nodes: Sequence[str], avoid: Sequence[str], say: Callable[[str], None]
) -> Preflight:
    """Check all nodes, write ``preflight.json``, say what was found.

    Args:
        nodes: those of the ranks; ``avoid``: the allocation's others.
    """
    start = time.monotonic()
    mode = launch.resilience.preflight
    together = ""
    if mode == "off":
        return Preflight(seconds=0.0)
    if launch.local:
        findings = {nodes[0]: list(check_node(run.path, os.environ, local=True))}
        shared = {nodes[0]: list(check_shared(run.path, os.environ))}
    else:
        alone = list(nodes) == [os.environ.get("SLURMD_NODENAME")]  # the batch step is there already
        if alone:
            findings = {nodes[0]: list(check_node(run.path, os.environ))}
            shared = {nodes[0]: list(check_shared(run.path, os.environ))}
        else:
            findings, shared = _ask_nodes(run, launch, nodes=nodes, avoid=avoid, say=say)
        if mode == "full" and not any(findings.values()):
            blamed, together = try_together(run, launch, attempt=attempt, nodes=nodes, avoid=avoid)
            findings.update(blamed)
    seconds = round(time.monotonic() - start, 3)
    result = Preflight(seconds=seconds, findings=findings, shared=shared, together=together)
    said = {node: [*words, *shared.get(node, [])] for node, words in findings.items()}
    for node, words in said.items():
        for word in words:
            say(f"preflight: {node}: {word}")
    document = {"version": 1, "mode": mode, "seconds": seconds, "nodes": said, "together": together}
    if_possible(lambda: write_json(run.attempt(attempt) / "preflight.json", document, sync=False), say=say)
    return result


def _ask_nodes(
    run: RunDir, launch: Launch, *, nodes: Sequence[str], avoid: Sequence[str], say: Callable[[str], None]
) -> tuple[Findings, Findings]:
    """Each node's own findings, and those of shared file systems."""
    command = ["srun", *one_task_a_node(nodes, avoid), *(["--overlap"] if launch.beside else []), "--chdir=/"]
    command += [sys.executable, str(run.node_program), "preflight", str(run.path)]
    with _reception(nodes) as variables:
        environment = {**os.environ, **variables}
        share_gpus(environment)
        answers, words = _run(command, environment)
    if not answers:
        say(f"preflight: no node was looked at: {words[-500:] or 'no answer'}")
        return {}, {}
    findings = {node: answers[node][0] if node in answers else ["no answer to the checks"] for node in nodes}
    return findings, {node: answers[node][1] for node in nodes if node in answers}


def one_task_a_node(nodes: Sequence[str], avoid: Sequence[str]) -> Iterator[str]:
    yield from (f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--export=ALL")
    yield from ("--kill-on-bad-exit=0", "--unbuffered", "--input=none")
    if avoid:
        yield f"--exclude={hostlist.compress(avoid)}"


def _run(command: Sequence[str], env: Mapping[str, str]) -> tuple[dict[str, tuple[list[str], list[str]]], str]:
    """What each node has answered when all have, or the time is over; and srun's own words."""
    with subprocess.Popen(
        command, env=dict(env), stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, preexec_fn=default_signals
    ) as srun:
        end = time.monotonic() + QUICK_SECONDS
        told = False
        while True:
            try:
                output, errors = srun.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                told = told or told_to_leave()
                if time.monotonic() > end + LEAVE_SECONDS:
                    srun.kill()
                elif time.monotonic() > end or told:
                    srun.terminate()
    if told:
        return {}, "the job is being ended"
    return dict(_answers(output.decode(errors="replace"))), errors.decode(errors="replace").strip()


def _answers(output: str) -> Iterator[tuple[str, tuple[list[str], list[str]]]]:
    for line in output.splitlines():
        try:
            answer = json.loads(line)
            own, shared = ([str(word) for word in answer.get(key, [])] for key in ("findings", "shared"))
            yield str(answer["node"]), (own, shared)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # what a login script prints


@contextmanager
def _reception(nodes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Answer on a port of rank 0's node, as the ranks' own store will, to whoever knows the word.

    Where the batch step is not on that node nothing is opened, and the variables are empty.
    """
    if os.environ.get("SLURMD_NODENAME", nodes[0]) != nodes[0] or len(nodes) == 1:
        yield {}
        return
    token = secrets.token_hex(16)
    with socket.create_server(("", 0), backlog=1024) as door:
        threading.Thread(target=_receive, args=(door, token.encode()), daemon=True).start()
        try:
            yield {WHERE: f"{nodes[0]}:{door.getsockname()[1]}", TOKEN: token}
        finally:
            door.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _receive(door: socket.socket, token: bytes) -> None:
    while True:
        try:
            guest, _ = door.accept()
        except OSError:
            return
        with guest:
            try:
                guest.settimeout(1.0)
                if hmac.compare_digest(guest.recv(64), token):
                    guest.sendall(b"ok")
            except OSError:
                continue
