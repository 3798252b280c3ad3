"""Cluster profiles, which the user writes, and cluster facts, which a probe collects."""
