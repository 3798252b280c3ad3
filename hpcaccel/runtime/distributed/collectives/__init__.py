"""Collectives of tensors and objects, with a watchdog that detects ranks that do not take part."""
