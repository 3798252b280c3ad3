"""Costs of hpcaccel's protocols at sizes that no machine at hand has: measured constants, a simulation, its checks."""
