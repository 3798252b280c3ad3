"""``python -m hpcaccel`` and the ``hpcaccel`` command."""

from __future__ import annotations

import atexit
import gc


def main() -> None:
    # Imports make many objects and hardly any garbage. Looking through them, above all once more at the end, would be
    # a fifth of the time that a command takes.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)

    from hpcaccel.cli.main import app

    app(prog_name="hpcaccel")


if __name__ == "__main__":
    main()
