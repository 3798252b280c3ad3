"""One conversion: the request comes as JSON on stdin; lines of JSON on stdout tell how far it is, the last its end."""

from __future__ import annotations

import errno
import json
import sys
import time
from typing import Any

from hpcaccel.checkpoint.formats.convert import Request, convert
from hpcaccel.errors import UserError

TELL_SECONDS = 0.2
_THE_MACHINE_SAYS_NO = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> int:
    said = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal said
        if time.monotonic() - said > TELL_SECONDS:
            said = time.monotonic()
            _say({"done": done, "total": total})

    try:
        _say(convert(Request(**json.load(sys.stdin)), tell))
    except UserError as error:
        _say({"problem": str(error)})
        return error.exit_code
    except OSError as error:
        if error.errno not in _THE_MACHINE_SAYS_NO:
            raise
        _say({"problem": f"{error.filename or 'writing'}: {error.strerror}"})
        return UserError.exit_code
    return 0


sys.exit(main())
