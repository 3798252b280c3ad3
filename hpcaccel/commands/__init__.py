"""Accelerate's import path of its commands: every name raises what to use instead.

Its submodules (``launch``, ``config`` and others) are made in ``compat.import_paths``, without a file each.
"""

from hpcaccel.runtime.compat.import_paths import find_in_commands as __getattr__  # noqa: F401
