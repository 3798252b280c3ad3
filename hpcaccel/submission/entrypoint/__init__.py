"""A run's program: its file, its container image, and the checks before it starts."""
