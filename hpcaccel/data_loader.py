"""Accelerate's import path of loaders."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__
from hpcaccel.runtime.data import PreparedLoader as DataLoaderShard
from hpcaccel.runtime.permutation import PermutationSampler
from hpcaccel.runtime.skipping import SkipBatchSampler, skip_first_batches

__all__ = ["DataLoaderShard", "PermutationSampler", "SkipBatchSampler", "skip_first_batches"]
