"""Entry point of ``python -m hpcaccel`` and of the ``hpcaccel`` command."""

from __future__ import annotations

import atexit
import gc
import sys


def main() -> None:
    # Imports create many objects but hardly any garbage. Without these two lines, garbage collections (mainly the one
    # at exit) would take a fifth of a command's run time.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)

    from hpcaccel.cli.quick import run_quickly

    if (exit_code := run_quickly(sys.argv[1:])) is not None:
        sys.exit(exit_code)

    from hpcaccel.cli.main import main as run_program

    run_program()


if __name__ == "__main__":
    main()
