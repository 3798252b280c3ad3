"""Trackers: TensorBoard, Weights & Biases and others. A tracker's package is imported when ``init_trackers`` starts it.

``general_tracker`` contains the base class, ``catalog`` the known trackers and whether they are installed, ``hub`` the
trackers of one training.
"""
