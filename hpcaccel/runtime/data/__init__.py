"""Prepared DataLoaders: each rank's part of the data, and positions within an epoch that can be saved and resumed."""
