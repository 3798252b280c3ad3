"""Program of the torchrun launcher: runs torchrun, but exits with the exit code of the first failed rank.

Usage: ``python -c TEXT ARGUMENTS`` in the ranks' own Python, which may not have hpcaccel.
``torchrun_agent.become_agent`` passes the text of this file; nothing imports it. Without this program, torchrun exits
with 1 after any failure.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run torchrun with this process's arguments, and exit with the first failed rank's exit code."""
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ImportError as error:
        sys.exit(f"ImportError: launcher: torchrun needs torch in {sys.executable}: {error}")
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        print(error, file=sys.stderr)
        sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()
