"""The command that starts the ranks of one machine with torchrun's agent."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.launch.arguments import Arguments
from hpcaccel.launch.flags import spelled
from hpcaccel.launch.group_size import GroupSize

__all__ = [
    "DEFAULT_PORT",
    "ELASTIC",
    "ELASTIC_AGENT",
    "TORCHRUN",
    "agent_command",
    "is_free",
    "needs_agent",
    "rendezvous",
]

ELASTIC_AGENT = "hpcaccel.launch.elastic_agent"
"""The program that starts one machine's ranks."""
ELASTIC = (
    "max_restarts", "log_dir", "redirects", "tee", "local_ranks_filter", "duplicate_stdout_filters",
    "duplicate_stderr_filters", "logs_specs", "monitor_interval", "start_method", "event_log_handler", "role",
    "local_addr", "numa_binding", "signals_to_handle", "virtual_local_rank", "run_path", "rdzv_conf",
)  # fmt: skip
"""Options that only torchrun's agent has."""
TORCHRUN = ("nproc_per_node", "nnodes", "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
"""Options of torchrun. A user who sets one expects torchrun's variables, even for a single rank."""
_PARADIGMS = ("multi_gpu", "multi_device", "use_fsdp", "use_deepspeed", "use_parallelism_config")
DEFAULT_PORT = 29_500


def needs_agent(arguments: Arguments, options: Mapping[str, Any], size: GroupSize) -> bool:
    """Whether the ranks are started by torchrun's agent. A single process on one machine does not need it."""
    given = arguments.values
    return (
        not size.is_one
        or any(given.get(name, False) is not False for name in (*ELASTIC, *TORCHRUN))
        or any(options.get(name) for name in _PARADIGMS)
    )


def agent_command(
    arguments: Arguments, options: Mapping[str, Any], size: GroupSize, meeting: Sequence[str]
) -> list[str]:
    """torchrun's command line. ``meeting`` is the result of ``rendezvous``."""
    passed = [spelled(name) for name in ("module", "no_python", "virtual_local_rank", "run_path") if options.get(name)]
    for name in (*ELASTIC, "rdzv_id"):
        value = options.get(name)
        if value is not None and not isinstance(value, bool):  # switches are above
            passed.append(f"{spelled(name)}={value}")
    torchrun = [
        *(f"--nnodes={size.machines}", f"--nproc-per-node={size.per_machine}"),
        *meeting,
        *passed,
        *(["--"] if arguments.script.startswith("-") else []),
        arguments.script,
    ]
    quiet = ["--quiet"] if options.get("quiet") else []
    agent = [sys.executable, "-m", ELASTIC_AGENT, *quiet]
    return [*agent, str(len(torchrun)), *torchrun, *arguments.script_args]


def rendezvous(options: Mapping[str, Any], size: GroupSize, environ: Mapping[str, str]) -> list[str]:
    """torchrun's flags for the rendezvous of the machines.

    Raises:
        UserError: a value is missing that the machines need, or the port is in use.
    """
    elastic, several = ":" in size.machines, size.machines != "1"
    backend = options.get("rdzv_backend") or ("c10d" if elastic else "static")
    endpoint = options.get("rdzv_endpoint")
    address, port = options.get("main_process_ip"), options.get("main_process_port") or 0
    if several:
        address = address or environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR")
        port = port or _port_of(environ) or DEFAULT_PORT
    if elastic and backend == "static":
        raise UserError(f"--nnodes {size.machines} needs an elastic rendezvous: set --rdzv-backend c10d")
    if options.get("standalone") or not (several or endpoint or port):
        return ["--standalone"]
    if several and not (endpoint or address):
        what = "--rdzv-endpoint HOST:PORT" if backend != "static" else "--main-process-ip ADDRESS"
        raise UserError(f"{size.machines} machines: {what} of machine 0 is missing")
    if backend != "static":
        return [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint or f'{address}:{port}'}"]
    rank = _machine_rank(options, environ, several=several)
    if endpoint:
        return [f"--node-rank={rank}", f"--rdzv-endpoint={endpoint}"]
    if rank == 0 and not is_free(port):
        advice = "" if several else ", or leave it out for a free one"
        raise UserError(f"port {port} is in use on this machine. Choose another one with --main-process-port{advice}")
    return [f"--node-rank={rank}", f"--master-addr={address or '127.0.0.1'}", f"--master-port={port}"]


def _machine_rank(options: Mapping[str, Any], environ: Mapping[str, str], *, several: bool) -> int:
    if not several:
        return 0
    for value in (options.get("machine_rank"), environ.get("PET_NODE_RANK"), environ.get("SLURM_NODEID")):
        if value is not None and str(value).isdecimal():
            return int(value)
    raise UserError("several machines need --machine-rank, this machine's index (0, 1, …), or --rdzv-backend c10d")


def _port_of(environ: Mapping[str, str]) -> int | None:
    """The port in MASTER_PORT; None if it is not set."""
    text = (environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT") or "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"MASTER_PORT={text!r} must be a number")
    return int(text)


def is_free(port: int) -> bool:
    """Whether a server of this machine can listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
