"""The program of a run: its file, its container image, and the checks before it starts."""
