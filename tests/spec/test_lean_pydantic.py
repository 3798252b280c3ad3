"""Import of the spec models: no search for pydantic's plugins, and no ``importlib.metadata``."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import hpcaccel.spec
assert "importlib.metadata" not in sys.modules and "email" not in sys.modules
from pydantic.plugin import _loader
list(_loader.get_plugins())  # looks for them now
import importlib.metadata
print(importlib.metadata.version("pydantic"))
"""


def test_spec_models_are_imported_without_the_metadata_of_packages() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
