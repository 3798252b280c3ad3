"""Accelerate's import path of its commands. None is supported: imports raise an error with the replacements.

Its submodules (``launch``, ``config`` and others) are created at import by ``compat.import_paths``; they have no files.
"""

from hpcaccel.runtime.compat.import_paths import find_in_commands as __getattr__  # noqa: F401
