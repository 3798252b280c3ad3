"""What this machine is like, as far as scripts ask."""

from __future__ import annotations

import logging
import platform
import re
import socket
from functools import cache

import torch

__all__ = ["check_cuda_fp8_capability", "check_os_kernel", "get_current_device_type", "is_port_in_use"]

KERNEL = (5, 5)
"""Processes of older Linux kernels can hang when many of them talk to each other (Accelerate's advice)."""


def check_os_kernel() -> None:
    """Warn of a Linux kernel on which training processes may hang."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if platform.system() == "Linux" and found and (int(found[1]), int(found[2])) < KERNEL:
        logging.getLogger(__name__).warning(
            "Linux kernel %s is older than 5.5: training processes may hang on it. A newer kernel helps",
            platform.release(),
        )


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something on this machine listens at the port (29500, torchrun's, unless told otherwise)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_current_device_type() -> tuple[str, str]:
    """The kind of device that ranks train on here, and the DistributedType of several."""
    return ("cuda", "MULTI_GPU")


@cache
def check_cuda_fp8_capability() -> bool:
    """Whether this process's GPU computes in fp8: capability 8.9 or later.

    Raises:
        RuntimeError: torch's, where there is no GPU.
    """
    return torch.cuda.get_device_capability() >= (8, 9)
