"""Trackers: where a training tells its numbers to TensorBoard, Weights & Biases and others.

``base`` says what a tracker is, ``catalog`` which there are and whether their packages are, ``hub`` keeps those of a
training; each of the rest is one tracker. A tracker's package is imported when ``init_trackers`` starts it.
"""
