"""Accelerate's helpers for TPUs: torch_xla in a Colab notebook, and variables of a launcher."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module, metadata

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.availability import is_available

__all__ = ["install_xla", "prepare_tpu"]

LIBTPU = "https://storage.googleapis.com/libtpu-releases/index.html"
"""Page with the wheels of libtpu, from the instructions of torch_xla."""


def install_xla(upgrade: bool = False) -> None:
    """Install torch_xla for TPUs in torch's version, in a notebook on Google Colab.

    Args:
        upgrade: whether to install the newest torch first.

    Raises:
        RuntimeMisuse: this is not a notebook on Google Colab, or pip has failed.
    """
    notebook = getattr(sys.modules.get("IPython"), "get_ipython", None)
    if "google.colab" not in str(notebook and notebook()):
        raise RuntimeMisuse(
            "install_xla() works in notebooks on Google Colab only. Elsewhere: pip install 'torch_xla[tpu]' in the "
            "version of torch"
        )
    if upgrade:
        _pip("--upgrade", "torch")
    release = metadata.version("torch").split(".")
    _pip(f"torch_xla[tpu]~={release[0]}.{release[1]}.0", "--find-links", LIBTPU)


def _pip(*arguments: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=False)
    if ended.returncode:
        raise RuntimeMisuse(
            f"install_xla(): pip install {' '.join(arguments)} has failed with code {ended.returncode}; the reason is "
            "above. Not every version of torch has a torch_xla: https://pypi.org/project/torch-xla/#history"
        )


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add to ``current_env`` the variables that a program on TPUs needs.

    Args:
        args: options of a launcher: ``mixed_precision``, ``downcast_bf16``, ``debug``; with ``pod``, also ``tpu_vm``
            and ``tpu_name``.
        current_env: variables of the program.
        pod: whether ``args`` are for torch_xla's launcher for TPU pods, whose names of the last two options are then
            added.

    Returns:
        ``args`` and ``current_env``, which are changed in place.
    """
    if args.mixed_precision == "bf16" and _has_tpu():
        current_env["XLA_DOWNCAST_BF16" if args.downcast_bf16 else "XLA_USE_BF16"] = "1"
    if args.debug:
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm, args.tpu = args.tpu_vm, args.tpu_name
    return args, current_env


def _has_tpu() -> bool:
    return is_available("torch_xla") and import_module("torch_xla.runtime").device_type() == "TPU"
