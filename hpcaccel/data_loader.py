"""Accelerate's import path of loaders."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.data.loader import PreparedLoader as DataLoaderShard
from hpcaccel.runtime.data.permutation import PermutationSampler
from hpcaccel.runtime.data.skipping import SkipBatchSampler, skip_first_batches

__all__ = ["DataLoaderShard", "PermutationSampler", "SkipBatchSampler", "skip_first_batches"]
