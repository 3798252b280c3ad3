"""Sweeps: searches over the parameters of a job, with many trials in the tasks of a job array.

Only ``sampler``, ``space``, ``study`` and ``journal`` import Optuna when they are loaded, which takes half a second.
"""
