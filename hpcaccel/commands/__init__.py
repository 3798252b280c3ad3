"""Accelerate's import path for commands, none of which is supported: importing one raises an error with the
replacements.

The submodules (``launch``, ``config`` and others) are created at import by ``compat.import_paths``; they have no files.
"""

from hpcaccel.runtime.compat.import_paths import find_in_commands as __getattr__  # noqa: F401
