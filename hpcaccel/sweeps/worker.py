"""The tuner under its earlier module name, which the ``sweep.json`` of older sweeps refers to."""

from hpcaccel.sweeps.tuner import main

__all__ = ["main"]
