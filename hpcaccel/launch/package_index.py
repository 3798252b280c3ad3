"""The package indexes that pip and uv use, from environment variables and pip's configuration files.

Neither program is run. Configuration files of uv are not read.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from pathlib import Path

__all__ = ["index_hosts"]

_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX")
_KEYS = ("index-url", "extra-index-url")
_URL = re.compile(r"([a-zA-Z][\w+.-]*://)(?:[^/?#@]*@)?([\w.-]+(?::\d+)?|\[[\w:.]+\](?::\d+)?)(?:[/?#][^@]*)?")
"""A URL without an ``@`` after its host, which may belong to a password that contains a slash."""


def index_hosts() -> list[str]:
    """Scheme and host of the configured indexes, such as ``https://pypi.org``. The rest of a URL may contain tokens.

    An index that is not such a URL, for example a folder, is shown as ``***``.

    Files are read as in https://pip.pypa.io/en/stable/topics/configuration/. Files that cannot be parsed are skipped.
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
    return list(dict.fromkeys(map(_host, found)))


def _host(index: str) -> str:
    """Scheme and host of an index. uv's variables allow a name and ``=`` before the URL."""
    found = _URL.fullmatch(re.sub(r"^[\w.-]+=(?=[a-zA-Z])", "", index.strip("'\"")))
    return f"{found[1]}{found[2]}" if found else "***"


def _files() -> list[Path]:
    given = os.environ.get("PIP_CONFIG_FILE")
    if given == os.devnull:
        return []
    home = Path(os.path.expanduser("~"))
    user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    places = [Path("/etc/pip.conf"), home / ".pip/pip.conf", user / "pip/pip.conf", Path(sys.prefix) / "pip.conf"]
    return [*places, *([Path(given)] if given else [])]
