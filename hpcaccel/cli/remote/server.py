"""``answer``: what another machine's hpcaccel starts on a login node, over SSH. It is asked on stdin.

Arguments, secrets and the spec come on stdin and are on no command line; commands run in this process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpcaccel.cli.output import the_machines_no
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission.remote.protocol import FrameWriter

__all__ = ["answer"]

EXIT_BUG = 1
_PROGRAM: ContextVar[Any] = ContextVar("_PROGRAM")
"""The command line as a whole, of which ``answer`` is a command."""


def answer(context: typer.Context) -> None:
    """Answer another machine's hpcaccel."""
    _PROGRAM.set(context.find_root().command)
    import json

    import hpcaccel
    from hpcaccel.submission.remote.protocol import FrameWriter, hello_line

    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but frames may come on this stream
    stream.write(hello_line(hpcaccel.__version__))
    stream.flush()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise typer.Exit(UserError.exit_code)  # the connection broke, or a person has typed this command
    frames = FrameWriter(stream)
    request = json.loads(line)
    os.umask(0o027)
    if home := os.environ.get("HOME"):
        os.chdir(home)
    try:
        _ACTIONS[request["do"]](request, frames)
    except HpcaccelError as error:
        frames.send("err", f"error: {error}\n".encode())
        frames.send("exit", code=error.exit_code)
    except BrokenPipeError:
        os._exit(EXIT_BUG)  # the other side has gone; what was to be done is done
    except OSError as error:
        if (why := the_machines_no(error)) is None:
            raise
        frames.send("err", f"error: on the cluster: {why}\n".encode())
        frames.send("exit", code=UserError.exit_code)


def _command(request: dict[str, Any], frames: FrameWriter | _Held | _WithFile) -> None:
    """One of hpcaccel's own commands; with an ``id`` once only, and its answer is kept for who asks again."""
    from hpcaccel.submission.remote.replies import kept
    from hpcaccel.submission.secret_values import secrets_from
    from hpcaccel.submission.stop_requests import asked_as

    if request.get("follows"):
        _leave_with_the_other_side()
        with _streams(frames):
            code = _call(request)
        frames.send("exit", code=code)
        return
    with kept(request.get("id")) as reply:
        is_kept = reply.code is not None
        if reply.code is None or (reply.code and request.get("repeated")):  # who says it again wants it done
            is_kept = False
            from hpcaccel.submission.remote.replies import Collector

            collected = Collector()
            secrets = secrets_from(lambda names: _asked_back(names, frames))
            with _streams(collected), secrets, asked_as(request.get("id")):
                code = _call(request)
            reply.keep(code, collected.out, collected.err)
    frames.send("out", reply.out)
    frames.send("err", reply.err)
    frames.send("exit", code=reply.code, kept=is_kept)


def _asked_back(names: Sequence[str], frames: FrameWriter | _Held | _WithFile) -> dict[str, str]:
    """Values of secrets, from the machine that asked for this command."""
    import json

    try:
        frames.send("secrets", names=list(names))
        line = sys.stdin.buffer.readline()
    except BrokenPipeError:
        line = b""
    if not line.endswith(b"\n"):
        os._exit(EXIT_BUG)  # the connection broke, and nothing has been done yet
    values: dict[str, str] = json.loads(line)
    return values


def _submit(request: dict[str, Any], frames: FrameWriter) -> None:
    """``submit`` or ``sweep start`` of a spec, with a profile and code that came along."""
    from hpcaccel.submission.remote.receive_bundle import arrived, submitted

    with arrived(request) as args:
        _command({**request, "args": args}, _Held(frames, lambda: submitted(request)))


def _look(request: dict[str, Any], frames: FrameWriter) -> None:
    """A command about a spec that is not submitted, with a profile that came along."""
    from hpcaccel.submission.remote.receive_bundle import looked_at

    with looked_at(request) as args:
        _command({**request, "args": args}, frames)


def _file(request: dict[str, Any], frames: FrameWriter) -> None:
    """A command that writes one file, whose content goes back instead."""
    with tempfile.TemporaryDirectory(prefix="hpcaccel-file-") as folder:
        file = Path(folder) / f"file{request['suffix']}"
        _command({**request, "args": [*request["args"], "--out", str(file)]}, _WithFile(frames, file))


class _WithFile:
    """Sends the file that was written before the last frame."""

    def __init__(self, frames: FrameWriter, file: Path) -> None:
        self._frames = frames
        self._file = file

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        if frame == "exit" and self._file.exists():
            self._frames.send("file", self._file.read_bytes())
        self._frames.send(frame, payload, **values)


def _environment(request: dict[str, Any], frames: FrameWriter) -> None:
    """What variables are here; of those that are not set None."""
    frames.send("environment", values={name: os.environ.get(name) for name in request["names"]})
    frames.send("exit", code=0)


class _Held:
    """Adds what was submitted to the last frame."""

    def __init__(self, frames: FrameWriter, find: Any) -> None:
        self._frames = frames
        self._find = find

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        more = self._find() if frame == "exit" else {}
        self._frames.send(frame, payload, **values, **more)


def _logs(request: dict[str, Any], frames: FrameWriter) -> None:
    """``logs``, each piece with the place behind it."""
    from hpcaccel.cli.logs import follow_from

    if request.get("follow"):
        _leave_with_the_other_side()
    nothing = follow_from(request, lambda piece, position: frames.send("out", piece, position=position))
    if nothing:
        frames.send("err", nothing.encode())
    frames.send("exit", code=0)


def _receive(request: dict[str, Any], frames: FrameWriter) -> None:
    from hpcaccel.submission.remote.receive_bundle import profile_that_came, runs_folder
    from hpcaccel.submission.remote.store import receive

    with profile_that_came(request) as name:
        receive(request, runs_folder(request, name), sys.stdin.buffer, frames)
    frames.send("exit", code=0)


def _pull(request: dict[str, Any], frames: FrameWriter) -> None:
    from hpcaccel.submission.remote.serving import serve

    serve(request, frames)
    frames.send("exit", code=0)


_ACTIONS = {
    "command": _command,
    "environment": _environment,
    "file": _file,
    "logs": _logs,
    "look": _look,
    "pull": _pull,
    "receive": _receive,
    "submit": _submit,
}


def _call(request: dict[str, Any]) -> int:
    """The exit code of a command; its streams are this process's."""
    import traceback

    from hpcaccel.view.text_tables import COLUMNS_THERE

    os.environ.update(request.get("env", {}))
    if columns := request.get("terminal_columns"):
        os.environ[COLUMNS_THERE] = str(columns)
    try:
        _PROGRAM.get().main(args=request["args"], prog_name="hpcaccel")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except Exception:
        traceback.print_exc()
        return EXIT_BUG
    return 0


@contextmanager
def _streams(frames: Any) -> Iterator[None]:
    """What is written to stdout and stderr in the block goes into frames, as it comes."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = {number: os.dup(number) for number in (1, 2)}
    pumps = []
    for number, frame in ((1, "out"), (2, "err")):
        reading, writing = os.pipe()
        os.dup2(writing, number)
        os.close(writing)
        pumps.append(threading.Thread(target=_pump, args=(reading, frame, frames), daemon=True))
        pumps[-1].start()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in before.items():
            os.dup2(kept, number)
            os.close(kept)
        for pump in pumps:
            pump.join()


def _pump(reading: int, frame: str, frames: Any) -> None:
    with os.fdopen(reading, "rb", buffering=0) as source:
        while piece := source.read(1 << 16):
            try:
                frames.send(frame, piece)
            except BrokenPipeError:
                os._exit(EXIT_BUG)


def _leave_with_the_other_side() -> None:
    """Who only looks ends when the connection does: stdin ends then."""

    def wait() -> None:
        while sys.stdin.buffer.read(1 << 12):
            pass
        os._exit(EXIT_BUG)

    threading.Thread(target=wait, daemon=True).start()
