"""``python -m hpcaccel`` and the ``hpcaccel`` command."""

from __future__ import annotations


def main() -> None:
    from hpcaccel.cli.main import app

    app(prog_name="hpcaccel")


if __name__ == "__main__":
    main()
