"""The package indexes that pip is configured with, from its variables and files, without running pip."""

from __future__ import annotations

import configparser
import os
import sys
from pathlib import Path

__all__ = ["index_urls"]

_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX")
_KEYS = ("index-url", "extra-index-url")


def index_urls() -> list[str]:
    """The URLs as they are configured, with any credentials: mask them before they are shown.

    Files are read as in https://pip.pypa.io/en/stable/topics/configuration/. A file that cannot be read has none.
    """
    found = [url for name in _VARIABLES for url in os.environ.get(name, "").split()]
    for path in _files():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError):
            continue
        for section in parser.sections():
            options = ((key.replace("_", "-"), value) for key, value in parser.items(section))
            found += [url for key, value in options if key in _KEYS for url in value.split()]
    return list(dict.fromkeys(found))


def _files() -> list[Path]:
    given = os.environ.get("PIP_CONFIG_FILE")
    if given == os.devnull:
        return []
    home = Path(os.path.expanduser("~"))
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    places = [Path("/etc/pip.conf"), home / ".pip/pip.conf", user / "pip/pip.conf", Path(sys.prefix) / "pip.conf"]
    return [*places, *([Path(given)] if given else [])]
