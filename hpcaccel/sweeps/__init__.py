"""Sweeps: searches over the parameters of a job, with many trials run by the tasks of a job array.

Importing Optuna takes half a second, so only ``sampler``, ``space``, ``study`` and ``journal`` import it at the top.
"""
