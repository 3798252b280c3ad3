"""Liveness of a rank: heartbeats, positions and stacks of its threads, and detection of stragglers."""
