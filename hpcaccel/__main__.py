"""``python -m hpcaccel`` and the ``hpcaccel`` command."""

from __future__ import annotations

import gc


def main() -> None:
    # Imports make many objects and no garbage: looking through them all the time is a tenth of what a command takes.
    gc.set_threshold(100_000)

    from hpcaccel.cli.main import app

    app(prog_name="hpcaccel")


if __name__ == "__main__":
    main()
