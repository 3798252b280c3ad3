"""Checkpoints as the loop and the script call for them, and model files that any program opens."""
