"""Many trials of one job: which points are tried, which go on, and what came out.

What needs Optuna is in modules of its own (``sampler``, ``space``, ``study``, ``journal``), which take half a second to
import: nothing of it is imported here.
"""
