"""Accelerate's import path for commands, none of which is supported: importing one raises an error that
names the replacements.

The submodules (``launch``, ``config`` and others) have no files: ``hpcaccel.runtime.compat.import_paths`` creates them
when they are imported.
"""

from hpcaccel.runtime.compat.import_paths import find_in_commands as __getattr__  # noqa: F401
