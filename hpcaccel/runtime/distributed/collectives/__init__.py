"""Collective operations on tensors and Python objects, with a watchdog that detects ranks that do not take part."""
