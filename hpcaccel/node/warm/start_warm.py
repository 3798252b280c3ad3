"""The start of a warm parent: the rank's shim forks the rank of the first attempt, then becomes the warm parent.

The first attempt is a new Python process, as without a warm parent, and starts at the same time.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import hpcaccel
from hpcaccel.core.parent_death import die_with
from hpcaccel.core.process_identity import node_name

__all__ = ["continue_as_rank"]

_PROGRAM = """\
import sys
first = [] if getattr(sys.flags, "safe_path", False) else [sys.path.pop(0)]
import json, os
plan = json.load(os.fdopen(int(sys.argv[1])))
before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "hpcaccel"}
for name in before:
    del sys.modules[name]
sys.path.insert(0, plan["package"])
try:
    from hpcaccel.node.warm.warm_parent import main
except BaseException:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(plan["child"], 0)[1]) & 255)
sys.path.remove(plan["package"])
sys.path[:0] = first
for name in [name for name in sys.modules if name.partition(".")[0] == "hpcaccel"]:
    del sys.modules[name]
sys.modules.update(before)
main(plan)
"""
"""Program of a warm parent. hpcaccel's modules come from this package and are then forgotten: the rank may have others.
If they cannot be imported, this process waits for its rank."""


def continue_as_rank(address: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Fork this process. Returns in the child; the parent becomes the warm parent.

    Args:
        address: value of the variable ``WARM``: how to reach the supervisor, as JSON.
        command: the rank's command, whose first word is Python.
        environment: the rank's environment.
    """
    where = json.loads(address)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    received = signal.sigpending()
    me = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(me)
        os.setsid()
        if "descriptor" in where:
            os.close(where["descriptor"])
        for number in received:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    plan = {
        "address": where,
        "child": child,
        "attempt": int(environment["HPCACCEL_ATTEMPT"]),
        "rank": int(environment["RANK"]),
        "host": node_name(),
        "python": command[0],
        "arguments": list(command[1:]),
        "mask": [int(number) for number in mask],
        "package": str(Path(hpcaccel.__file__).parents[1]),
        "modules": where.get("modules"),
    }
    file = os.memfd_create("hpcaccel-plan", 0)  # inherited: a pipe might be too small
    os.write(file, json.dumps(plan).encode())
    os.lseek(file, 0, os.SEEK_SET)
    try:
        os.execvpe(command[0], [command[0], "-c", _PROGRAM, str(file)], environment)
    except OSError:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)  # the rank reports the error
