"""``python -m hpcaccel_pictures [--record]``: draw the pictures of the README."""

from __future__ import annotations

import argparse

from hpcaccel_pictures import FOLDER, RECORDING, pictures
from hpcaccel_pictures.preempted_run import record_preempted_run


def main() -> None:
    parser = argparse.ArgumentParser(prog="hpcaccel_pictures", description=__doc__)
    parser.add_argument("--record", action="store_true", help="record a new run first, on a development cluster (root)")
    FOLDER.mkdir(exist_ok=True)
    if parser.parse_args().record:
        record_preempted_run().save(RECORDING)
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
