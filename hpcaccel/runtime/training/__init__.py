"""The training loop: accumulation, optimizers, clipping, saves, stops, and the end of the training."""
