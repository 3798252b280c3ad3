"""Accelerate's import path of aids for tests. Most of them guard Accelerate's own tests and raise when imported.

Its submodules (``testing``, ``training``) are made in ``compat.import_paths``, without a file each.
"""

from hpcaccel.runtime.compat.import_paths import find_in_test_utils as __getattr__  # noqa: F401
from hpcaccel.runtime.compat.test_aids import (
    RegressionDataset,
    RegressionModel,
    are_the_same_tensors,
    assert_exception,
    torch_device,
)

__all__ = ["RegressionDataset", "RegressionModel", "are_the_same_tensors", "assert_exception", "torch_device"]
