"""The pictures of the README: a drawing of a run, and a terminal that plays a recorded one.

``python -m hpcaccel_pictures`` (`make pictures`) draws both again from this code and from the recording that is in the
repository. With ``--record`` it makes the recording first, on a development cluster that it starts for this.
"""

from __future__ import annotations

from pathlib import Path

from hpcaccel_pictures.overview import overview_picture
from hpcaccel_pictures.recording import Recording
from hpcaccel_pictures.terminal_picture import terminal_picture

__all__ = ["FOLDER", "RECORDING", "pictures"]

FOLDER = Path(__file__).resolve().parents[2] / "pictures"
RECORDING = FOLDER / "preemption.cast"


def pictures() -> dict[Path, str]:
    """The contents of each picture, by its path."""
    return {
        FOLDER / "overview.svg": overview_picture(),
        FOLDER / "preemption.svg": terminal_picture(Recording.load(RECORDING)),
    }
