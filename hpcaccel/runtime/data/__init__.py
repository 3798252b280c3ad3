"""Prepared DataLoaders: each reads this rank's part of the data, and can be saved and resumed within an epoch."""
