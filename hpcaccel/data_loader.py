"""Accelerate's import path of loaders."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.data.batch_shards import BatchSamplerShard, SeedableRandomSampler
from hpcaccel.runtime.data.loader import DispatchedLoader as DataLoaderDispatcher
from hpcaccel.runtime.data.loader import PreparedLoader as DataLoaderShard
from hpcaccel.runtime.data.permutation import PermutationSampler
from hpcaccel.runtime.data.skipping import SkipBatchSampler, skip_first_batches
from hpcaccel.runtime.data.standalone_loader import get_sampler, prepare_data_loader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "PermutationSampler",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
