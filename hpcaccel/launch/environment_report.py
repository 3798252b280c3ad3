"""Report about this machine and its software for bug reports, without secrets.

Values of environment variables appear only if the variable is in a list of harmless names. Values from files are
masked: credentials in URLs, the query of a URL, and what follows a name such as ``token=``. Of package indexes, only
scheme and host appear.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import hpcaccel
from hpcaccel.core.durable_files import file_system
from hpcaccel.core.log import Mask
from hpcaccel.core.run_dir import default_runs_dir
from hpcaccel.errors import HpcaccelError, UserError
from hpcaccel.launch.launch_config import find_config, load_config
from hpcaccel.launch.package_index import index_hosts
from hpcaccel.launch.rank_program import RankProgramFailed, run_rank_program

__all__ = ["environment_report", "masked", "torch_facts"]

PACKAGES = (
    "torch", "numpy", "safetensors", "submitit", "pydantic", "jinja2", "pyyaml", "typer", "rich", "fabric", "paramiko",
    "questionary", "optuna", "accelerate", "transformers", "lightning", "deepspeed", "torch_xla", "torchao", "datasets",
    "peft", "trl", "bitsandbytes", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
SHOWN = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NPROCS",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_PARTITION", "SLURM_GPUS_ON_NODE",
    "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_RESTART_COUNT", "RANK", "LOCAL_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_P2P_DISABLE", "NCCL_NET", "GLOO_SOCKET_IFNAME", "HPCACCEL_ALONE",
    "HPCACCEL_GPUS_PER_TASK", "HPCACCEL_USE_CPU", "HPCACCEL_STRATEGY", "HPCACCEL_LOG_LEVEL", "ACCELERATE_USE_CPU",
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_BACKEND",
    "FSDP_VERSION", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "CONDA_DEFAULT_ENV",
)  # fmt: skip
"""Variables whose values are shown."""
_NAMED = re.compile(r"(?:SLURM|NCCL|GLOO|TORCH|PYTORCH|HPCACCEL|ACCELERATE|FSDP|CUDA|HIP|ROCR|FI|UCX|MPICH)_")
"""Variables that are named, without their values, if they are not among the shown ones."""
_HIDDEN = {"tpu_env", "commands"}
"""Keys of a launch configuration that may contain values of variables."""
_GPU_PROGRAMS = (
    ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
    ("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--csv"),
)
_CREDENTIALS = re.compile(r"(?<=://)\S+(?=@)")
_QUERY = re.compile(r"(?<=\?)[^\s'\"]+(?=['\"\s]|$)")
_IN_PATH = re.compile(r"(://[^\s'\"]*?/t/|fury\.io/)[^/\s'\"]+")
"""Tokens in the paths of URLs: of conda's channels and of Gemfury."""
_TOKEN = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|sk-|pypi-|glpat-|AKIA|ASIA|AIza|xox[a-z]-|xapp-|eyJ)[\w.-]{12,}")
_SCHEME = re.compile(r"(?i)\b(bearer\s+|authorization['\"]?\s*[=:]\s*['\"]?\w+\s+)[^\s'\"]+")
_SECRET_NAME = re.compile(r"(?i)token|key|secret|password|passwd|credential")
_ASSIGNED = re.compile(
    r"(?i)\b([\w-]*(?:token|key|secret|password|passwd|credential)[\w-]*['\"]?\s*[=:]\s*)"
    r"""(?:[a-z]{0,2}"(?:\\.|[^"\\])*(?:"|$)|[a-z]{0,2}'(?:\\.|[^'\\])*(?:'|$)|\S+)"""
)
"""A quoted value counts whole, up to the end of the text if its quotation mark is not closed."""


def masked(text: str) -> str:
    """``text`` with ``***`` in place of secrets: credentials in URLs, queries of URLs, tokens in the form of well-known
    services, what follows ``Bearer``, what is assigned to a name that contains token, key, secret or password, and the
    values of environment variables with such a name."""
    secrets = Mask(value for name, value in os.environ.items() if _SECRET_NAME.search(name) and name not in SHOWN)
    text = _TOKEN.sub("***", _QUERY.sub("***", _CREDENTIALS.sub("***", text)))
    text = _SCHEME.sub(r"\1***", _IN_PATH.sub(r"\1***", text))
    return _ASSIGNED.sub(r"\1***", secrets(text))


def torch_facts(python: str = sys.executable) -> dict[str, Any]:
    """The report of ``torch_program``, or ``{"problem": reason}`` if torch cannot be imported."""
    try:
        return run_rank_program("torch_program.py", python=python)
    except RankProgramFailed as error:
        return {"problem": masked(str(error))}


def environment_report(*, config_file: str | None = None, python: str = sys.executable) -> dict[str, Any]:
    """The report, as nested dictionaries with text, numbers, lists and None.

    Args:
        config_file: a configuration file; default: Accelerate's.
        python: the ranks' Python interpreter, which reports torch's version and devices.
    """
    profile, profile_problem = _profile()
    return {
        "hpcaccel": hpcaccel.__version__,
        "installed_in": str(Path(hpcaccel.__file__).parent),
        "python": platform.python_version(),
        "python_program": sys.executable,
        "system": _system(),
        "torch": torch_facts(python),
        "packages": _packages(),
        "package_indexes": index_hosts(),
        "gpus": _gpus(),
        "slurm": _slurm(),
        "allocation": _variables(os.environ),
        "other_variables": sorted(name for name in os.environ if _NAMED.match(name) and name not in SHOWN),
        "runs_dir": _runs_dir(None if profile is None else profile.runs_dir),
        "cluster_profile": profile_problem if profile is None else profile.name,
        "launch_config": _launch_config(config_file),
    }


def _system() -> dict[str, Any]:
    kernel = platform.release()
    numbers = [int(number) for number in re.findall(r"\d+", kernel)[:2]]
    libc = " ".join(platform.libc_ver()).strip()
    return {
        "os": _os_name(),
        "kernel": kernel,
        "kernel_too_old": sys.platform == "linux" and numbers < [5, 5],
        "machine": platform.machine(),
        "libc": libc or None,
        "cpus": os.cpu_count(),
    }


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> dict[str, list[str]]:
    """The lines that the vendors' programs print, by program; a failure is such a line too."""
    found = {}
    for command in _GPU_PROGRAMS:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            found[command[0]] = [f"failed: {type(error).__name__}"]
            continue
        text = done.stdout.strip() or done.stderr.strip()
        lines = [masked(line.strip()) for line in text.splitlines() if line.strip()]
        found[command[0]] = lines if done.returncode == 0 else [f"failed with exit code {done.returncode}", *lines[:3]]
    return found


def _slurm() -> str | None:
    """Slurm's version, why it is unknown, or None without Slurm."""
    if shutil.which("sinfo") is None:
        return None
    from hpcaccel.slurm.commands import Slurm

    try:
        return Slurm().version()
    except HpcaccelError as error:
        return f"unknown: {masked(str(error))}"


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: masked(environment[name])[:200] for name in SHOWN if name in environment}


def _profile() -> tuple[Any, str | None]:
    """The default cluster profile, or why it cannot be read."""
    from hpcaccel.spec import load_profile

    try:
        return load_profile(), None
    except HpcaccelError as error:
        return None, f"cannot be read: {masked(str(error))}"


def _runs_dir(of_profile: str | None) -> dict[str, Any]:
    path = default_runs_dir(of_profile)
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    found: dict[str, Any] = {"path": masked(str(path)), "exists": path.is_dir(), "file_system": None}
    try:
        found["file_system"] = file_system(place.stat().st_dev)
        usage = shutil.disk_usage(place)
        found |= {"free_bytes": usage.free, "writable": os.access(place, os.W_OK)}
    except OSError as error:
        found["problem"] = error.strerror
    return found


def _launch_config(config_file: str | None) -> dict[str, Any] | None:
    try:
        path = find_config(config_file)
        if path is None:
            return None
        values = load_config(path).to_dict()
    except UserError as error:
        return {"problem": masked(str(error))}
    return {"path": str(path), "values": {key: _safe(key, value) for key, value in values.items()}}


def _safe(key: str, value: Any) -> Any:
    """A value of the configuration; values that may be secret are replaced by their number."""
    if key in _HIDDEN:
        return f"{len(value)} not shown" if value else []
    if isinstance(value, dict):
        return {str(inner): _safe(str(inner), item) for inner, item in value.items()}
    if isinstance(value, list):
        return [_safe(key, item) for item in value]
    if not isinstance(value, str):
        return value
    return "***" if value and _SECRET_NAME.search(key) else masked(value)
