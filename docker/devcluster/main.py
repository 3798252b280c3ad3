"""The command line of docker/cluster."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from . import daemons, lifecycle, processes, requirements
from .build_pyxis import build_pyxis
from .build_slurm import build_slurm
from .errors import DevClusterError
from .state import Options, State, load

DEFAULT_ROOT = Path("/var/tmp/hpcaccel-cluster")


def main(argv: Sequence[str]) -> int:
    os.umask(0o022)  # munge requires that every user can reach its socket
    args = _parser().parse_args(argv)
    args.root = Path(args.root).absolute()
    try:
        return int(args.command(args))
    except KeyboardInterrupt:
        return 130
    except DevClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _up(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: clean up
    try:
        _start(args)
        while args.stay:
            signal.pause()
    except (KeyboardInterrupt, SystemExit):
        if not args.stay:
            raise
        return _down(args)
    return 0


def _reporter() -> Callable[[str], None]:
    started = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - started:4.1f} s] {line}", file=sys.stderr, flush=True)

    return report


def _start(args: argparse.Namespace) -> None:
    asked = {f.name: getattr(args, f.name) for f in fields(Options) if getattr(args, f.name) is not None}
    report = _reporter()
    pyxis = str(Path(args.pyxis).absolute()) if args.pyxis else ""
    state = lifecycle.up(args.root, asked, report, pyxis=pyxis)
    report(f"{len(state.nodes)} nodes: {', '.join(state.nodes)}. To use them:")
    print(_exports(state), flush=True)
    if args.stay:
        report("running until SIGTERM or Ctrl-C")


def _down(args: argparse.Namespace) -> int:
    if not lifecycle.down(args.root, lambda line: print(line, file=sys.stderr)):
        print(f"no cluster in {args.root}", file=sys.stderr)
    return 0


def _status(args: argparse.Namespace) -> int:
    state = load(args.root)
    if state is None:
        print(f"no cluster in {args.root}")
        return 1
    dead = [role for role, process in state.processes.items() if not processes.is_alive(process)]
    states = daemons.node_states(state)
    for node in state.nodes:
        print(f"{node:8} {states.get(node, 'unknown')}")
    for role in dead:
        print(f"{role} is not running{' (stopped by `fail`)' if role in state.failed else ''}")
    print(_exports(state))
    return 0 if state.ready and set(dead) <= set(state.failed) else 1


def _env(args: argparse.Namespace) -> int:
    state = load(args.root)
    if state is None:
        raise DevClusterError(f"no cluster in {args.root}: start it with `up --root {args.root}`")
    print(_exports(state))
    return 0


def _check(args: argparse.Namespace) -> int:
    problem = requirements.problem()
    print(problem or "a cluster can be started on this machine")
    return 0 if problem is None else 2


def _fail(args: argparse.Namespace) -> int:
    lifecycle.fail(args.root, args.role, slurmd_only=args.slurmd_only)
    return 0


def _restore(args: argparse.Namespace) -> int:
    lifecycle.restore(args.root, args.role)
    return 0


def _build_slurm(args: argparse.Namespace) -> int:
    prefix = build_slurm(
        Path(args.source).resolve(),
        prefix=Path(args.prefix).absolute() if args.prefix else None,
        build_folder=Path(args.build_dir).absolute() if args.build_dir else None,
        jobs=args.jobs,
        report=_reporter(),
    )
    print(f'export PATH={shlex.quote(f"{prefix}/bin")}:{shlex.quote(f"{prefix}/sbin")}:"$PATH"')
    return 0


def _build_pyxis(args: argparse.Namespace) -> int:
    sources = Path(args.pyxis).resolve(), Path(args.enroot).resolve()
    prefix = build_pyxis(*sources, prefix=Path(args.prefix).absolute(), report=_reporter())
    print(f"docker/cluster up --pyxis {shlex.quote(str(prefix))}")
    return 0


def _exports(state: State) -> str:
    lines = [f"export SLURM_CONF={shlex.quote(str(state.slurm_conf))}"]
    if state.folders:
        lines.append(f'export PATH={os.pathsep.join(map(shlex.quote, state.folders))}:"$PATH"')
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="docker/cluster", description="A real Slurm cluster on this machine.")
    commands = parser.add_subparsers(required=True, metavar="command")
    root = argparse.ArgumentParser(add_help=False)
    root.add_argument("--root", default=DEFAULT_ROOT, help="directory for all files of the cluster (%(default)s)")

    up = commands.add_parser("up", parents=[root], help="start a cluster, or report that it is already up")
    default = Options()
    up.add_argument("--nodes", type=_count(1, 64), help=f"nodes, 1 to 64 ({default.nodes})")
    up.add_argument("--gpus", type=_count(0, 8), help=f"simulated GPUs per node, 0 to 8 ({default.gpus})")
    up.add_argument("--cpus", type=_count(1, 256), help=f"CPUs that each node reports ({default.cpus})")
    up.add_argument(
        "--memory-mb", type=_count(1, 10**7), help=f"memory that each node reports, in MB ({default.memory_mb})"
    )
    up.add_argument("--name", type=_name, help=f"Slurm's name for the cluster ({default.name})")
    up.add_argument("--prefix", type=_name, help="node names are PREFIX1, PREFIX2, … (n, if it is free)")
    up.add_argument("--grace-seconds", type=_count(1, 3600), help=f"GraceTime of `gpu` ({default.grace_seconds})")
    up.add_argument("--kill-wait-seconds", type=_count(1, 600), help=f"KillWait ({default.kill_wait_seconds})")
    up.add_argument(
        "--slurmd-timeout-seconds",
        type=_count(1, 3600),
        help=f"SlurmdTimeout: time until a node that does not respond is down ({default.slurmd_timeout_seconds})",
    )
    up.add_argument("--pyxis", help="prefix that build-pyxis installed to; enables srun --container-image")
    up.add_argument("--stay", action="store_true", help="wait for SIGTERM or Ctrl-C, then stop the cluster")
    up.set_defaults(command=_up)

    commands.add_parser("down", parents=[root], help="stop exactly what `up` started").set_defaults(command=_down)
    commands.add_parser(
        "status", parents=[root], help="print node states, missing daemons and the environment"
    ).set_defaults(command=_status)
    commands.add_parser("env", parents=[root], help="print the export lines, for eval").set_defaults(command=_env)

    build = commands.add_parser("build-slurm", help="compile another Slurm from its source tree, for `up` to use")
    build.add_argument("source", metavar="DIR", help="unpacked source tree; it is not modified")
    build.add_argument("--prefix", help="installation prefix (/opt/slurm-VERSION)")
    build.add_argument(
        "--build-dir", help="build directory, which is kept (default: a temporary one, deleted afterwards)"
    )
    build.add_argument(
        "--jobs", type=_count(1, 256), default=os.cpu_count() or 1, help="parallel compiler processes (%(default)s)"
    )
    build.set_defaults(command=_build_slurm, root=DEFAULT_ROOT)

    pyxis = commands.add_parser(
        "build-pyxis", help="compile pyxis and enroot from their source trees, for `up --pyxis`"
    )
    pyxis.add_argument("pyxis", metavar="PYXIS", help="source tree of NVIDIA/pyxis; it is not modified")
    pyxis.add_argument("enroot", metavar="ENROOT", help="source tree of NVIDIA/enroot; it is not modified")
    pyxis.add_argument("--prefix", default="/opt/pyxis", help="installation prefix of both (%(default)s)")
    pyxis.set_defaults(command=_build_pyxis, root=DEFAULT_ROOT)

    check = commands.add_parser("check", parents=[root], help="check whether a cluster can be started on this machine")
    check.set_defaults(command=_check)
    fail = commands.add_parser(
        "fail", parents=[root], help="simulate a power cut of one node, or kill slurmctld or slurmdbd"
    )
    fail.add_argument("role", metavar="NODE", help="a node, slurmctld or slurmdbd")
    fail.add_argument("--slurmd-only", action="store_true", help="kill only the node's slurmd; its jobs continue")
    fail.set_defaults(command=_fail)
    restore = commands.add_parser("restore", parents=[root], help="start a failed node or daemon again")
    restore.add_argument("role", metavar="NODE", help="a node, slurmctld or slurmdbd that `fail` stopped")
    restore.set_defaults(command=_restore)
    return parser


def _count(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return integer


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]{0,30}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid name: use lower-case letters and digits, starting with a letter"
        )
    return text
