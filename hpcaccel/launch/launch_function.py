"""Accelerate's launcher as Python functions: an argparse parser with the flags of ``hpcaccel launch``, and
functions that build the command for its namespace. Only ``launch_command`` reads the configuration file."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpcaccel.core.free_port import free_port
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.errors import UserError
from hpcaccel.launch.arguments import parse
from hpcaccel.launch.flags import GROUPS, Flag, spelled
from hpcaccel.launch.gpus import chosen_gpus, find_gpus
from hpcaccel.launch.launch_options import merge
from hpcaccel.launch.program_variables import program_variables, variables_switched_off
from hpcaccel.launch.torchrun_command import DEFAULT_PORT, is_free

__all__ = [
    "launch_command",
    "launch_command_parser",
    "prepare_deepspeed_cmd_env",
    "prepare_multi_gpu_env",
    "prepare_simple_launcher_cmd_env",
]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FLAGS = [flag for flags in GROUPS.values() for flag in flags if flag.name != "help"]


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser with the flags of ``hpcaccel launch``. A flag that is not given is None, or False for a switch.

    Args:
        subparsers: what ``add_subparsers`` of another parser has returned, to which the command ``launch`` is added.
    """
    options: dict[str, Any] = {"description": "Start a script's ranks.", "allow_abbrev": False}
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser("hpcaccel launch", **options)
        if subparsers is None
        else subparsers.add_parser("launch", **options)
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag in _FLAGS:
                group.add_argument(*_spellings(flag), dest=flag.name, help=flag.help.replace("%", "%%"), **_kind(flag))
    parser.add_argument("training_script", help="The script, or with --module a module, with --no-python a program.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="The script's own arguments.")
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def _spellings(flag: Flag) -> list[str]:
    """The flag with dashes and with underscores, and its short form."""
    names = (flag.name, *flag.also)
    long = (form for name in names if not name.startswith("-") for form in (spelled(name), f"--{name}"))
    return [*dict.fromkeys(long), *(name for name in names if name.startswith("-"))]


def _kind(flag: Flag) -> dict[str, Any]:
    """The arguments of ``add_argument`` for the flag's values."""
    if flag.kind == "switch":
        return {"action": "store_true"}
    if flag.kind == "list":
        return {"action": "append"}
    return {"type": {"whole": int, "number": float}.get(flag.kind, str)}


def launch_command(args: argparse.Namespace) -> None:
    """Run ``hpcaccel launch`` with these arguments, and wait for its end. Signals are passed on to it.

    Args:
        args: from ``launch_command_parser``, or a namespace with some of its attributes and ``training_script``.

    Raises:
        subprocess.CalledProcessError: the program failed, or could not be started; with the exit code.
        SystemExit: the same, if ``quiet`` is set.
    """
    command = [sys.executable, "-m", "hpcaccel", "launch", *_words(args), "--", *_script(args)]
    code = _followed(command)
    if code and getattr(args, "quiet", False):
        sys.exit(code)
    if code:
        raise subprocess.CalledProcessError(code, command)


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command that runs the script as a single process, or by mpirun with ``mpirun_hostfile``, and its environment.

    Raises:
        UserError: a value is not valid, or there are several machines and the address of the first one is missing.
    """
    from hpcaccel.launch.launch_plan import plan_launch, program_command

    arguments = parse([*_words(args), "--", *_script(args)])
    values = arguments.values
    if values.get("mpirun_hostfile"):
        plan = plan_launch(arguments, None, os.environ)
        return plan.command, dict(plan.environ)
    env, machines = _environment(values), values.get("num_machines", 1)
    if machines > 1:
        _require_address(values)
    if machines > 1 or values.get("num_processes", 1) > 1:
        env["MASTER_ADDR"] = values.get("main_process_ip", "127.0.0.1")
        env["MASTER_PORT"] = str(values.get("main_process_port", DEFAULT_PORT))
    return program_command(arguments), env


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of torchrun's agent, and set torchrun's options as attributes of ``args``:
    ``nproc_per_node``, and ``nnodes``, ``node_rank``, ``master_addr``, ``master_port``, ``rdzv_endpoint`` or
    ``standalone`` as needed.

    On one machine, the port is a free one unless ``main_process_port`` names one.

    Raises:
        UserError: a value is not valid, ``num_processes`` is missing, or there are several machines and the address of
            the first one or this one's rank is missing, or the port is in use.
    """
    values = _values(args)
    machines, ranks, port = values.get("num_machines", 1), values.get("num_processes"), values.get("main_process_port")
    if ranks is None or ranks % machines:
        raise UserError(
            f"num_processes={ranks} must be a number of ranks that is a multiple of num_machines={machines}"
        )
    if machines > 1:
        _require_meeting_point(values)
    rank = values.get("machine_rank", 0)
    args.nproc_per_node = str(ranks // machines)
    args.main_process_port = port = port or (free_port() if machines == 1 else DEFAULT_PORT)
    taken = rank == 0 and not is_free(port)
    if machines == 1:
        args.master_port = str(port)
        if taken:
            args.standalone = True
            warnings.warn(f"port {port} is in use: torchrun takes a free one (--standalone)", stacklevel=2)
        return _environment(values)
    if taken:
        raise UserError(f"port {port} is in use on this machine. Choose another one with --main-process-port")
    args.nnodes, args.node_rank = str(machines), rank
    if values.get("same_network"):
        args.master_addr, args.master_port = str(values.get("main_process_ip")), str(port)
    else:
        args.rdzv_endpoint = f"{values.get('main_process_ip')}:{port}"
    return _environment(values)


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """No command, and the environment of torchrun's agent with DeepSpeed's settings, as for Accelerate's launcher
    ``standard``: torchrun starts the ranks. ``args`` gets the attributes that ``prepare_multi_gpu_env`` sets, and
    ``use_deepspeed``.

    Raises:
        UserError: as ``prepare_multi_gpu_env``; or there are several machines, and ``args`` name a launcher of
            DeepSpeed.
    """
    args.use_deepspeed = True
    merge(parse([*_words(args), "--", "script"]), None, in_allocation=False)  # refuses DeepSpeed's launchers
    return None, prepare_multi_gpu_env(args)


def _require_address(values: Mapping[str, Any]) -> None:
    if not values.get("main_process_ip"):
        raise UserError(f"--num-machines {values['num_machines']}: --main-process-ip ADDRESS of machine 0 is missing")


def _require_meeting_point(values: Mapping[str, Any]) -> None:
    _require_address(values)
    if "machine_rank" not in values and values.get("rdzv_backend", "static") == "static":
        raise UserError(
            f"--num-machines {values['num_machines']}: --machine-rank is missing, this machine's index (0, 1, …)"
        )


def _environment(values: Mapping[str, Any]) -> dict[str, str]:
    off = variables_switched_off(values)
    env = {name: value for name, value in os.environ.items() if name not in off} | program_variables(values)
    if (ids := values.get("gpu_ids", "all")) != "all" and not values.get("cpu"):
        env |= chosen_gpus(ids, env, find_gpus(env).variable)
    return env


def _values(args: argparse.Namespace) -> Mapping[str, Any]:
    """The checked values of the flags in ``args``, which may have no script."""
    return parse([*_words(args), "--", "script"]).values


def _words(args: argparse.Namespace) -> list[str]:
    """The flags in ``args`` as words of a command line."""
    found: list[str] = []
    for flag in _FLAGS:
        value = getattr(args, flag.name, None)
        if flag.kind == "switch":
            found += [spelled(flag.name)] if value else []
        elif flag.kind == "list":
            found += [f"{spelled(flag.name)}={one}" for one in value or ()]
        elif value is not None:
            found.append(f"{spelled(flag.name)}={value}")
    return found


def _script(args: argparse.Namespace) -> list[str]:
    return [str(args.training_script), *map(str, getattr(args, "training_script_args", None) or ())]


def _followed(command: Sequence[str]) -> int:
    """Run a command to its end, pass signals on to it, and return its exit code, 128 + n after signal n."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        child = subprocess.Popen(
            command,
            preexec_fn=dying_with_us(signal.SIGTERM),  # which also unblocks the signals
            start_new_session=in_main,  # a terminal sends Ctrl-C to this process only, which passes it on
        )
        with _passed_on_to(child, before, possible=in_main):
            code = child.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 128 - code if code < 0 else code


@contextmanager
def _passed_on_to(child: subprocess.Popen[bytes], mask: set[Any], *, possible: bool) -> Iterator[None]:
    """Inside the block, signals of this process go to ``child``; only the main thread can receive them. Those that are
    ignored, as SIGHUP under nohup, stay ignored.

    Args:
        mask: the signals to block in the block.
    """
    if not possible:
        yield
        return
    taken = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda got, frame: child.send_signal(got)) for number in taken}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
