"""Conversion needs torch, which no command imports: it runs in a process of its own, whose progress is shown here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

from hpcaccel.errors import HpcaccelError, UserError

__all__ = ["run_convert"]


def run_convert(request: dict[str, Any]) -> dict[str, Any]:
    """Convert as ``request`` says (see ``hpcaccel.checkpoint.formats``) and give its answer.

    Raises:
        UserError: it cannot be done, with the reason.
        HpcaccelError: the process failed in a way that nobody expected; it has said how.
    """
    from hpcaccel.view.transfer import Transfer

    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"converting needs torch, which {sys.executable} does not have: call the Python of your training, "
            "`python -m hpcaccel checkpoint convert …`, or pip install 'hpcaccel[train]'"
        )
    command = [sys.executable, "-m", "hpcaccel.checkpoint.formats"]
    answer: dict[str, Any] = {}
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        Transfer(f"converting {request['source']}") as transfer,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "total" in answer:
                    transfer.tell(answer["done"], answer["total"])
        except BaseException:
            process.terminate()
            raise
    if "problem" in answer:
        raise UserError(answer["problem"])
    if process.returncode != 0 or "files" not in answer:
        raise HpcaccelError(f"the conversion ended with code {process.returncode}; what it said stands above")
    return answer
