"""Accelerate's import path for prepared loaders and batch samplers."""

from hpcaccel.runtime.compat.loader_adapters import DataLoaderAdapter, DataLoaderStateMixin, SkipDataLoader
from hpcaccel.runtime.compat.standalone import get_sampler, prepare_data_loader
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.data.batch_samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    skip_first_batches,
)
from hpcaccel.runtime.data.iterable import IterableDatasetShard
from hpcaccel.runtime.data.loader import DispatchedLoader as DataLoaderDispatcher
from hpcaccel.runtime.data.loader import PreparedLoader as DataLoaderShard
from hpcaccel.runtime.data.permutation import PermutationSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "PermutationSampler",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
