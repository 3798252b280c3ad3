"""Build the command to run from the command line, the configuration file and the environment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hpcaccel.core.free_port import free_port
from hpcaccel.errors import UserError
from hpcaccel.launch.allocation import SlurmAllocation, place, started_tasks
from hpcaccel.launch.arguments import Arguments
from hpcaccel.launch.flags import spelled
from hpcaccel.launch.gpus import Gpus, chosen_gpus, count_gpus, find_gpus, has_other_devices
from hpcaccel.launch.group_size import GroupSize, ranks_here, sized, total_ranks
from hpcaccel.launch.launch_config import LaunchConfig
from hpcaccel.launch.launch_options import merge, notes
from hpcaccel.launch.mesh_sizes import check_divides
from hpcaccel.launch.program_variables import program_variables, variables_switched_off
from hpcaccel.launch.torchrun_command import ELASTIC, ELASTIC_AGENT, agent_command, needs_agent, rendezvous

__all__ = ["LaunchPlan", "become", "plan_launch", "program_command"]

_ENVIRONMENT = {"nproc_per_node": "PET_NPROC_PER_NODE", "nnodes": "PET_NNODES"}
"""torchrun's variables for options that neither the command line nor the file gives."""
_FOR_MPI = (
    "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "HPCACCEL_", "MASTER_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
)  # fmt: skip
"""Beginnings of the variables that ranks of mpirun need."""
_TRUE = ("1", "true", "yes", "y", "on")


@dataclass(frozen=True)
class LaunchPlan:
    """The command that starts the program, and its environment."""

    command: list[str]
    environ: Mapping[str, str]
    job_id: str | None = None
    """The job in which ``command`` is a step of srun; None for a command that this process becomes."""
    step: str = ""
    """The name of that step."""
    notes: list[str] = field(default_factory=list)


def plan_launch(arguments: Arguments, config: LaunchConfig | None, environ: Mapping[str, str]) -> LaunchPlan:
    """The command to run, and its environment.

    Raises:
        UserError: options that contradict each other, this machine or the allocation, or that are not supported.
    """
    where = place(environ, arguments.values)
    options = merge(arguments, config, in_allocation=where != "machine")
    if any(environ.get(name, "").lower() in _TRUE for name in ("ACCELERATE_USE_CPU", "HPCACCEL_USE_CPU")):
        options.setdefault("cpu", True)
    _require_script(arguments)
    from_file = frozenset(options) - frozenset(arguments.values)
    off = variables_switched_off(options)
    env = {name: value for name, value in environ.items() if name not in off}
    env |= program_variables(options, from_file=from_file)
    if "shutdown_timeout" in options:
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(options["shutdown_timeout"])
    hints = notes(arguments.values, options)
    if where == "rank":
        return LaunchPlan(_as_rank(arguments, options, environ), env, notes=hints)
    if where == "allocation":
        return _in_allocation(arguments, options, env, hints)
    return _on_this_machine(arguments, options, env, hints)


def become(plan: LaunchPlan) -> NoReturn:
    """Replace this process with the command (exec), so that signals reach it and its exit code is this process's.

    Raises:
        UserError: the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if ELASTIC_AGENT in plan.command[:3]:  # until it has installed its handlers, these signals would kill it
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(plan.command[0], plan.command, dict(plan.environ))
    except OSError as error:
        raise UserError(f"cannot start {plan.command[0]!r}: {error.strerror}") from None


def program_command(arguments: Arguments) -> list[str]:
    """The command that runs the program as a single process."""
    if arguments.values.get("no_python"):
        return [arguments.script, *arguments.script_args]
    module = ["-m"] if arguments.values.get("module") else []
    return [sys.executable, *module, arguments.script, *arguments.script_args]


def _require_script(arguments: Arguments) -> None:
    script = arguments.script
    if arguments.values.get("module"):
        return
    if arguments.values.get("no_python"):
        if shutil.which(script) is None:
            raise UserError(
                f"the program {script!r} was not found on PATH, or is not executable: check its path and mode"
            )
    elif not Path(script).exists():
        raise UserError(f"there is no script {script!r} in {os.getcwd()}. For a module, use --module {script}")


def _as_rank(arguments: Arguments, options: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    ranks = environ.get("WORLD_SIZE") or started_tasks(environ) or "?"
    asked = arguments.values.get("num_processes")
    if asked is not None and str(asked) != ranks:
        raise UserError(
            f"--num-processes {asked}, but this launcher is one of {ranks} processes that srun or mpirun started, and "
            "each becomes one rank. Start it once in the job's script, without srun; or as one launcher on each node, "
            "with --num-machines, --main-process-ip and --rdzv-backend c10d"
        )
    if ranks.isdecimal() and "HPCACCEL_RUN_DIR" not in environ:  # in a run, the spec has the sizes
        check_divides(options, int(ranks), given=arguments.values)
    return program_command(arguments)


def _in_allocation(
    arguments: Arguments, options: Mapping[str, Any], env: dict[str, str], hints: list[str]
) -> LaunchPlan:
    if shutil.which("srun") is None:
        raise UserError("this is a Slurm job on several nodes, but srun is not on PATH: load Slurm's module")
    allocation = SlurmAllocation.of(env)
    size = allocation.size(options)
    check_divides(options, total_ranks(size), given=arguments.values)
    step_env = allocation.variables(options, size, env)
    name = f"hpcaccel-launch-{uuid.uuid4().hex[:12]}"
    idle = [spelled(one) for one in ("machine_rank", "gpu_ids", "rdzv_endpoint") if one in arguments.values]
    hints = [*hints, *([f"{', '.join(idle)} inside an allocation: Slurm decides"] if idle else [])]
    agents = any(arguments.values.get(one, False) is not False for one in ELASTIC)
    command = program_command(arguments)
    if agents:
        meeting = [
            f"--rdzv-backend={options.get('rdzv_backend', 'c10d')}",
            f"--rdzv-endpoint={step_env['MASTER_ADDR']}:{step_env['MASTER_PORT']}",
        ]
        command = agent_command(arguments, {"rdzv_id": name, **options}, size, meeting)
        if (ranks := int(size.per_machine)) > 1:
            step_env.setdefault("OMP_NUM_THREADS", str(allocation.cpus_per_rank(env, ranks)))
    step = allocation.step(command, size, env, name=name, one_each=agents)
    return LaunchPlan(step, step_env, allocation.job_id, name, hints)


def _on_this_machine(
    arguments: Arguments, options: dict[str, Any], env: dict[str, str], hints: list[str]
) -> LaunchPlan:
    if not {"nproc_per_node", "num_processes"} & options.keys() and env.get(_ENVIRONMENT["nproc_per_node"]):
        options["nproc_per_node"] = env[_ENVIRONMENT["nproc_per_node"]]
    if not {"nnodes", "num_machines"} & options.keys() and env.get(_ENVIRONMENT["nnodes"]):
        options["nnodes"] = env[_ENVIRONMENT["nnodes"]]
    if options.get("tpu"):
        return LaunchPlan(_on_tpu(arguments, options), env, notes=hints)
    gpus = Gpus(0) if options.get("cpu") else find_gpus(env)
    seen, ids = gpus.count, options.get("gpu_ids")
    if ids not in (None, "all") and not options.get("cpu"):
        env |= chosen_gpus(str(ids), env, gpus.variable)
        seen = count_gpus(env)  # in the variable
    size = sized(options, gpus=gpus.count)
    _check_gpu_ids(arguments, options, gpus)
    if gpus.count or {"cpu", "num_processes", "nproc_per_node"} & options.keys():
        check_divides(options, total_ranks(size), given=arguments.values)
    if options.get("mpirun_hostfile"):
        env = _meeting_of_mpi(options, size, env)
        return LaunchPlan(_by_mpirun(arguments, options, size, env), env, notes=hints)
    if not needs_agent(arguments, options, size):
        return LaunchPlan(program_command(arguments), env, notes=hints)
    if (ranks := ranks_here(size, gpus=seen)) > 1:
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return LaunchPlan(agent_command(arguments, options, size, rendezvous(options, size, env)), env, notes=hints)


def _check_gpu_ids(arguments: Arguments, options: Mapping[str, Any], gpus: Gpus) -> None:
    """Raise UserError if the command line selects GPUs of a machine without any.

    The configuration file may be meant for another machine. Devices of other vendors are not counted.
    """
    ids = arguments.values.get("gpu_ids", "all")
    if ids == "all" or gpus.count or options.get("cpu") or options.get("multi_device") or has_other_devices():
        return
    raise UserError(f"--gpu-ids {ids}: this machine has no GPU. To try the script on CPUs, use --cpu --num-processes 2")


def _on_tpu(arguments: Arguments, options: Mapping[str, Any]) -> list[str]:
    if options.get("no_python"):
        raise UserError("--no-python and --tpu exclude each other: each TPU core calls a function of a Python script")
    module = ["--module"] if options.get("module") else []
    function = options.get("main_training_function", "main")
    program = ["-m", "hpcaccel.launch.tpu_program", *module, function, arguments.script]
    return [sys.executable, *program, *arguments.script_args]


def _by_mpirun(arguments: Arguments, options: Mapping[str, Any], size: GroupSize, env: Mapping[str, str]) -> list[str]:
    if not (size.machines.isdecimal() and size.per_machine.isdecimal()):
        raise UserError(
            "--mpirun-hostfile needs fixed numbers of machines and ranks: set --num-machines and --num-processes "
            f"(found: {size.machines} machines, {size.per_machine} ranks on each)"
        )
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise UserError("--mpirun-hostfile: neither mpirun nor mpiexec is on PATH")
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    ours = "Open MPI" in answer
    hosts, per, bind = ("--hostfile", "--npernode", ["--bind-to", "socket"]) if ours else ("-f", "-ppn", [])
    ranks = int(size.per_machine) * int(size.machines)
    layout = [hosts, str(options["mpirun_hostfile"]), per, size.per_machine, "-n", str(ranks), *bind]
    if ours:  # Open MPI gives ranks on other machines only the variables that are named; Intel MPI and MPICH give all
        layout += [word for name in sorted(env) if name.startswith(_FOR_MPI) for word in ("-x", name)]
    return [program, *layout, *program_command(arguments)]


def _meeting_of_mpi(options: Mapping[str, Any], size: GroupSize, env: dict[str, str]) -> dict[str, str]:
    address = options.get("main_process_ip") or env.get("MASTER_ADDR")
    if not address and size.machines != "1":
        raise UserError(
            f"--mpirun-hostfile with {size.machines} machines: --main-process-ip ADDRESS is missing, the address of "
            "the first machine in the file"
        )
    address = address or "127.0.0.1"
    port = options.get("main_process_port") or env.get("MASTER_PORT") or free_port()
    return {**env, "MASTER_ADDR": str(address), "MASTER_PORT": str(port).strip()}
