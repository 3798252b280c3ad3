"""Checkpoints that the training loop or the script saves and loads, and model files for other programs."""
