"""Checkpoints into files that other programs read, and their files into checkpoints.

Sources and targets meet in ``weights``: a model's tensors by name, each read when its turn comes, so that no more than
one of them is in memory. ``python -m hpcaccel.checkpoint.formats`` does what ``hpcaccel checkpoint convert`` asks for.
"""
