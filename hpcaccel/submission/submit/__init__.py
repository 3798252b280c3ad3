"""Submitting a spec as a job: checking it, writing the run directory, submitting once."""
