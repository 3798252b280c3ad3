"""Accelerate's import path for test helpers. Importing a helper that is made for Accelerate's own tests raises an
ImportError that names replacements.

The submodules (``testing``, ``training``) have no files: ``hpcaccel.runtime.compat.import_paths`` creates them when
they are imported.
"""

from hpcaccel.runtime.compat.import_paths import find_in_test_utils as __getattr__  # noqa: F401
from hpcaccel.runtime.compat.test_aids import (
    RegressionDataset,
    RegressionModel,
    are_the_same_tensors,
    assert_exception,
    get_backend,
    torch_device,
)

__all__ = [
    "RegressionDataset",
    "RegressionModel",
    "are_the_same_tensors",
    "assert_exception",
    "get_backend",
    "torch_device",
]
