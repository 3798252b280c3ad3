"""A job spec becomes the text of a batch script. Nothing here writes a file or starts anything."""

from __future__ import annotations

from hpcaccel.render.script import render

__all__ = ["render"]
