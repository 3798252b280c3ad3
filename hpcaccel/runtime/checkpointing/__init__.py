"""Checkpoints that the training loop or the script saves, and model files for other programs."""
