"""The tuner under its earlier name, which stands in the ``sweep.json`` of sweeps that were started with it."""

from hpcaccel.sweeps.tuner import main

__all__ = ["main"]
