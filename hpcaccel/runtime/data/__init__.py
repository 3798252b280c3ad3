"""Prepared loaders: each rank's part of the data, and the way back into the middle of an epoch."""
