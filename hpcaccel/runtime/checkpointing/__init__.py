"""Checkpoints for the loop and the script, and model files for other programs."""
