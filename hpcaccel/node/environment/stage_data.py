"""Data on the nodes' own disks: the step that brings it there before the ranks start, and what it does on a node."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.process_identity import node_name
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.environment.stage_copy import NoRoom, bring
from hpcaccel.node.launch_spec import Launch
from hpcaccel.slurm import hostlist

__all__ = ["each_node", "problem_in", "stage_here", "unstage_here"]


def each_node(run: RunDir, launch: Launch, words: Sequence[str], *, avoid: Sequence[str] = ()) -> list[str]:
    """The command that runs ``node.pyz words`` once on each node of the ranks."""
    program = [sys.executable, str(run.node_program), *words]
    if launch.local:
        return program
    tasks = [f"--nodes={launch.nodes}", f"--ntasks={launch.nodes}", "--ntasks-per-node=1", "--export=ALL", "--chdir=/"]
    tasks += ["--kill-on-bad-exit=1", "--unbuffered", "--input=none", *(["--overlap"] if launch.beside else [])]
    tasks += [f"--exclude={hostlist.compress(avoid)}"] if avoid else []
    return ["srun", *tasks, *program]


def stage_here(launch: Launch, directory: Path) -> int:
    """Bring all sources to this node; on standard output one JSON line says how that went."""
    assert launch.stage is not None
    answer: dict[str, Any] = {"node": node_name()}
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        copied = sum(bring(Path(source), directory) for source in launch.stage.sources)
        answer["copied_bytes"] = copied
    except NoRoom as error:
        answer["problem"] = str(error)
    except OSError as error:
        where = error.filename or directory
        answer["problem"] = f"cannot copy to {directory}: {where}: {error.strerror or error}"
    print(json.dumps(answer), flush=True)
    return 1 if "problem" in answer else 0


def unstage_here(directory: Path) -> int:
    """Remove what was brought here."""
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def problem_in(lines: Sequence[str]) -> tuple[str, list[str]]:
    """What the nodes said went wrong, in one sentence, and which nodes; empty where they said nothing of it."""
    problems: dict[str, list[str]] = {}
    for line in lines:
        try:
            answer = json.loads(line)
            problem, node = answer.get("problem"), str(answer["node"])
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # what a login script prints
        if problem:
            problems.setdefault(str(problem), []).append(node)
    if not problems:
        return "", []
    text, nodes = next(iter(problems.items()))
    return f"{hostlist.compress(nodes)}: {text}", nodes
