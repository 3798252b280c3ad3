"""The limit of this process's open files, one of which is each connection to another process."""

from __future__ import annotations

import resource
import sys

__all__ = ["allow_open_files", "most_open_files"]


def most_open_files() -> int:
    """The hard limit, up to which a process can raise its own limit. Only the administrator can raise the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def allow_open_files(wanted: int) -> None:
    """Raise this process's limit to ``wanted`` open files, or to the hard limit, unless it is higher.

    The usual limit, 1,024, is too small for a thousand ranks. It is raised only if needed: some programs close every
    number up to the limit in each new process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, most_open_files())), hard))
