"""File locks (flock). A lock is released when all processes that share the open file have closed it or exited."""

from __future__ import annotations

import errno
import fcntl
from typing import IO, Any, Literal

__all__ = ["lock_file"]

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock_file(
    file: int | IO[Any], *, wait: bool = True, shared: bool = False
) -> Literal["held", "busy", "unsupported"]:
    """Lock an open file until it is closed.

    Args:
        wait: wait while another process holds the lock.

    Returns:
        ``busy``: another process holds the lock, and ``wait`` is False. ``unsupported``: the file system has no locks
        (NFS without a lock daemon, some Lustre mounts), so the caller must continue without one.

    Raises:
        OSError: the lock fails for another reason.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return "unsupported"
    return "held"
