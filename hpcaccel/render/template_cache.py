"""The cache of compiled templates. Without it, compiling takes a tenth of the run time of ``hpcaccel render``."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import sys
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from hpcaccel.core.durable_files import atomic_write
from hpcaccel.render import context

__all__ = ["CompiledTemplates", "template_cache"]

_DIGEST_BYTES = hashlib.sha256().digest_size


class CompiledTemplates(jinja2.BytecodeCache):
    """Compiled templates, one file each. A file begins with a checksum of all that the compiled code depends on, and of
    the code: a file that does not match is replaced. If a file cannot be written, the template is compiled each time.

    Users' templates of the same name replace each other, so that those in temporary folders leave no files behind.

    Args:
        folder: a folder in which only this user can create files: the code in it is executed.
        ours: the folder of hpcaccel's templates.
        settings: the source of the module that creates the Jinja environment.
    """

    def __init__(self, folder: Path, *, ours: Path, settings: bytes) -> None:
        self._folder, self._ours = folder, ours
        # Jinja evaluates constants while it compiles, with the filters and the quoting of ``context``.
        quoting = Path(context.__file__).read_bytes()
        compilers = (jinja2.__version__, sys.implementation.cache_tag, importlib.util.MAGIC_NUMBER)
        self._common = repr((compilers, settings, quoting))

    def get_bucket(self, environment: jinja2.Environment, name: str, filename: str | None, source: str) -> Bucket:
        is_ours = filename is not None and Path(filename).is_relative_to(self._ours)
        key = _sha256(repr((name, filename if is_ours else None)).encode()).hex()
        bucket = Bucket(environment, key, repr((self._common, name, filename, source)))
        self.load_bytecode(bucket)
        return bucket

    def load_bytecode(self, bucket: Bucket) -> None:
        try:
            content = self._file(bucket).read_bytes()
        except OSError:
            return
        digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest == _sha256(bucket.checksum.encode(), code):
            bucket.code = marshal.loads(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        code = marshal.dumps(bucket.code)
        with contextlib.suppress(OSError):
            content = _sha256(bucket.checksum.encode(), code) + code
            atomic_write(self._file(bucket), content, mode=0o600, sync=False)

    def _file(self, bucket: Bucket) -> Path:
        return self._folder / f"{bucket.key}.cache"


def template_cache(*, ours: Path, settings: Path) -> CompiledTemplates | None:
    """The cache in ``XDG_CACHE_HOME`` or ``~/.cache``; None if it cannot be used, or others could write code there.

    Args:
        ours: the folder of hpcaccel's templates.
        settings: the file of the module that creates the Jinja environment.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home, "hpcaccel", "templates")
    if not folder.is_absolute():  # without a home directory
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        mine = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        return CompiledTemplates(folder, ours=ours, settings=settings.read_bytes()) if mine else None
    except OSError:
        return None


def _sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
