"""A sweep's worker: runs trials in one allocation, each under its own supervisor."""
