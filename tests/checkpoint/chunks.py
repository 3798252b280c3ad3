"""Saved tensors of several sizes."""

import torch

SIZES = (3, 9001, 17, 2048, 40, 1, 30000)


def empty_like(tensors):
    return {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}


def same(targets, tensors):
    return all(torch.equal(targets[key], tensors[key]) for key in tensors)
