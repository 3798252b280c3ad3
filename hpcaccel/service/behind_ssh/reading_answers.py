"""Responses on a login node: readings of this user's runs, for a service on another machine."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import Any, BinaryIO

from hpcaccel.errors import HpcaccelError, RunBusy, RunNotFound, UserError
from hpcaccel.service.run_readings import SWEEP_READINGS, read_run, read_sweeps

__all__ = ["MOST_QUESTION_BYTES", "MOST_READING_BYTES", "answer_readings"]

MOST_QUESTION_BYTES = 64 << 10
"""Longest line with a question."""
MOST_READING_BYTES = 32 << 20
"""Largest answer."""
IDLE_SECONDS = 120.0
"""The program ends if nothing was asked for this long. The service closes its side earlier."""
KINDS: tuple[type[HpcaccelError], ...] = (RunNotFound, RunBusy)
"""Errors that keep their class, and with it the status of the answer."""


def answer_readings(questions: BinaryIO, send: Callable[..., None]) -> None:
    """Respond to requests until the input ends. Each line is one request: ``{"run": …, "what": …, "options": {…}}``.

    The response is a frame ``reading`` with the value as JSON, or with ``error``, a sentence. For ``sweeps``, ``run``
    is ignored.
    """
    while select.select([questions], [], [], IDLE_SECONDS)[0]:
        line = questions.readline(MOST_QUESTION_BYTES)
        if not line.endswith(b"\n"):
            return  # the connection ended, or the line is too long
        try:
            value = json.dumps(_answer(json.loads(line))).encode("ascii")
            if len(value) > MOST_READING_BYTES:
                raise UserError(f"the response is larger than {MOST_READING_BYTES >> 20} MB: request a smaller part")
        except HpcaccelError as error:
            kind = next((one.__name__ for one in KINDS if isinstance(error, one)), "")
            send("reading", error=str(error), kind=kind)
        except OSError as error:
            where = f"{os.fspath(error.filename)}: " if isinstance(error.filename, str) else ""
            send("reading", error=f"on the cluster: {where}{error.strerror or error}", kind="")
        except (ValueError, TypeError, KeyError) as error:
            send("reading", error=f"the cluster cannot read this: {type(error).__name__}: {error}", kind="")
        else:
            send("reading", value)


def _answer(question: dict[str, Any]) -> Any:
    from hpcaccel.submission.runs.find import find_run
    from hpcaccel.submission.runs.run_handle import SweepRun

    token, what = str(question["run"]), str(question["what"])
    if what == "sweeps":
        return read_sweeps(**question["options"])
    if "/" in token or token.startswith((".", "~")):
        raise RunNotFound(f"{token[:80]!r} is not the name of a run")
    of_sweep = what in SWEEP_READINGS
    run = find_run(token, only_sweeps=of_sweep)
    if of_sweep and not isinstance(run, SweepRun):
        raise UserError(f"{run.run_id} is a run, not a sweep")
    return read_run(run.dir, what, question["options"])
