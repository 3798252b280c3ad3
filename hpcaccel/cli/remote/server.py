"""``answer``: the server that another machine's hpcaccel starts on a login node over SSH.

It reads one request from stdin, runs the command in this process and writes frames to stdout. Arguments, secrets and
the spec are sent over stdin, so that they do not appear on a command line.
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

from hpcaccel.cli.output import os_error_message
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission.remote.protocol import FrameWriter

__all__ = ["answer"]

EXIT_BUG = 1
_PROGRAM: ContextVar[Any] = ContextVar("_PROGRAM")
"""The root command of ``hpcaccel``, which runs the requested commands."""


def answer(context: typer.Context) -> None:
    """Execute one request of another machine's hpcaccel."""
    _PROGRAM.set(context.find_root().command)
    import json

    import hpcaccel
    from hpcaccel.submission.remote.protocol import FrameWriter, hello_line

    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stdout carries frames only
    stream.write(hello_line(hpcaccel.__version__))
    stream.flush()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        raise typer.Exit(UserError.exit_code)  # the connection broke, or a user has typed this command
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
        os._exit(EXIT_BUG)  # the connection broke while the reply was being sent
    except OSError as error:
        if (why := os_error_message(error)) is None:
            raise
        frames.send("err", f"error: on the cluster: {why}\n".encode())
        frames.send("exit", code=UserError.exit_code)


def _command(request: dict[str, Any], frames: FrameWriter | _WithSubmitted | _WithFile) -> None:
    """Run an hpcaccel command and send its output. If the request has an ``id``, the output is also stored: a repeated
    request gets the stored output, and the command runs again only if it failed."""
    from hpcaccel.submission.entrypoint.entry import secrets_from
    from hpcaccel.submission.remote.requests import kept
    from hpcaccel.submission.runs.control import named_requests

    if request.get("follows"):
        _exit_with_connection()
        with _streams(frames):
            code = _call(request)
        frames.send("exit", code=code)
        return
    with kept(request.get("id")) as reply:
        is_kept = reply.code is not None
        if reply.code is None or (reply.code and request.get("repeated")):  # a failed command may be repeated
            is_kept = False
            from hpcaccel.submission.remote.requests import Collector

            collected = Collector()
            secrets = secrets_from(lambda names: _request_secrets(names, frames))
            with _streams(collected), secrets, named_requests(request.get("id")):
                code = _call(request)
            reply.keep(code, collected.out, collected.err)
    frames.send("out", reply.out)
    frames.send("err", reply.err)
    frames.send("exit", code=reply.code, kept=is_kept)


def _request_secrets(names: Sequence[str], frames: FrameWriter | _WithSubmitted | _WithFile) -> dict[str, str]:
    """Request the values of secrets from the client, and return them by name."""
    import json

    try:
        frames.send("secrets", names=list(names))
        line = sys.stdin.buffer.readline()
    except BrokenPipeError:
        line = b""
    if not line.endswith(b"\n"):
        os._exit(EXIT_BUG)  # the connection broke before the command did anything
    values: dict[str, str] = json.loads(line)
    return values


def _submit(request: dict[str, Any], frames: FrameWriter) -> None:
    """Run ``submit`` or ``sweep start`` with the spec, the profile and the code from the request."""
    from hpcaccel.submission.remote.requests import arrived, submitted

    with arrived(request) as args:
        before = submitted(request)
        earlier = bool(before.get("run") or before.get("runs"))
        found = _WithSubmitted(frames, lambda: {**submitted(request), "earlier": earlier})
        _command({**request, "args": args}, found)


def _look(request: dict[str, Any], frames: FrameWriter) -> None:
    """Run a command that does not submit, with the spec and the profile from the request."""
    from hpcaccel.submission.remote.requests import looked_at

    with looked_at(request) as args:
        _command({**request, "args": args}, frames)


def _file(request: dict[str, Any], frames: FrameWriter) -> None:
    """Run a command that writes one file, and send the file."""
    with tempfile.TemporaryDirectory(prefix="hpcaccel-file-") as folder:
        file = Path(folder) / f"file{request['suffix']}"
        _command({**request, "args": [*request["args"], "--out", str(file)]}, _WithFile(frames, file))


class _WithFile:
    """Frame writer that sends ``file``, if it exists, before the last frame."""

    def __init__(self, frames: FrameWriter, file: Path) -> None:
        self._frames = frames
        self._file = file

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        if frame == "exit" and self._file.exists():
            self._frames.send("file", self._file.read_bytes())
        self._frames.send(frame, payload, **values)


def _environment(request: dict[str, Any], frames: FrameWriter) -> None:
    """Send the values of the requested environment variables; None for those that are not set."""
    frames.send("environment", values={name: os.environ.get(name) for name in request["names"]})
    frames.send("exit", code=0)


class _WithSubmitted:
    """Frame writer that adds the submitted runs, which ``find`` returns, to the last frame."""

    def __init__(self, frames: FrameWriter, find: Any) -> None:
        self._frames = frames
        self._find = find

    def send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        more = self._find() if frame == "exit" else {}
        self._frames.send(frame, payload, **values, **more)


def _logs(request: dict[str, Any], frames: FrameWriter) -> None:
    """Send the requested logs in chunks, each with the position after the chunk."""
    from hpcaccel.cli.ranks import stream_logs

    if request.get("follow"):
        _exit_with_connection()
    message = stream_logs(request, lambda piece, position: frames.send("out", piece, position=position))
    if message:
        frames.send("err", message.encode())
    frames.send("exit", code=0)


def _receive(request: dict[str, Any], frames: FrameWriter) -> None:
    from hpcaccel.submission.remote.files import receive
    from hpcaccel.submission.remote.requests import received_profile, runs_folder

    with received_profile(request) as name:
        receive(request, runs_folder(request, name), sys.stdin.buffer, frames)
    frames.send("exit", code=0)


def _pull(request: dict[str, Any], frames: FrameWriter) -> None:
    from hpcaccel.submission.remote.files import serve

    serve(request, frames)
    frames.send("exit", code=0)


def _readings(request: dict[str, Any], frames: FrameWriter) -> None:
    """Respond to a service's read requests about runs, one per line, until stdin is closed."""
    from hpcaccel.service.behind_ssh.reading_answers import answer_readings

    frames.send("ready")
    answer_readings(sys.stdin.buffer, frames.send)
    frames.send("exit", code=0)


_ACTIONS = {
    "command": _command,
    "environment": _environment,
    "file": _file,
    "logs": _logs,
    "look": _look,
    "pull": _pull,
    "readings": _readings,
    "receive": _receive,
    "submit": _submit,
}


def _call(request: dict[str, Any]) -> int:
    """Run the requested command in this process, and return the exit code."""
    import traceback

    from hpcaccel.view.text_tables import COLUMNS_THERE

    os.environ.update(request.get("env", {}))
    if columns := request.get("terminal_columns"):
        os.environ[COLUMNS_THERE] = str(columns)
    try:
        _PROGRAM.get().main(args=request["args"], prog_name="hpcaccel")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception:
        traceback.print_exc()
        return EXIT_BUG
    return 0


@contextmanager
def _streams(frames: Any) -> Iterator[None]:
    """Send as frames everything that the block writes to stdout and stderr."""
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


def _exit_with_connection() -> None:
    """End this process when the connection (stdin) is closed. This is meant for commands that only read."""

    def wait() -> None:
        while sys.stdin.buffer.read(1 << 12):
            pass
        os._exit(EXIT_BUG)

    threading.Thread(target=wait, daemon=True).start()
