"""Sweeps: searches over the parameters of a job, with many trials run by the tasks of a job array.

Only ``sampler``, ``space``, ``study`` and ``journal`` import Optuna at load time, which takes half a second.
"""
