"""The training loop: accumulation, optimizers, clipping; its ticks, stops and its end."""
