"""The runtime of one rank: rank environment, process groups, data, prepared models, training loop, checkpoints."""
