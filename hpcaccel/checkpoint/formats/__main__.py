"""Run one conversion: read a JSON request from stdin, then write progress and the result to stdout as JSON lines."""

from __future__ import annotations

import errno
import json
import sys
import time
from typing import Any

from hpcaccel.checkpoint.formats import ConvertRequest, convert
from hpcaccel.errors import UserError

PROGRESS_SECONDS = 0.2
"""Shortest interval between progress lines."""
_ENVIRONMENT_ERRORS = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
"""Errors that the user can fix, reported without a traceback."""


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> int:
    printed = 0.0

    def on_progress(done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            _print_json({"done": done, "total": total})

    try:
        _print_json(convert(ConvertRequest(**json.load(sys.stdin)), on_progress))
    except UserError as error:
        _print_json({"problem": str(error)})
        return error.exit_code
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRORS:
            raise
        _print_json({"problem": f"{error.filename or 'writing'}: {error.strerror}"})
        return UserError.exit_code
    return 0


sys.exit(main())
