"""Asking a cluster behind SSH, and asking again when the connection broke."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import hpcaccel
from hpcaccel.errors import ClusterError
from hpcaccel.submission.remote.program import answering, command_line
from hpcaccel.submission.remote.program_session import Connection, ConnectionLost, Drain, Session, Unreachable
from hpcaccel.submission.remote.protocol import PROTOCOL, FrameReader, Torn, parse_hello, version_key

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile

__all__ = ["Answer", "Conversation", "RemoteCluster"]

PAUSES_SECONDS = (0.5, 2.0, 5.0, 10.0)
"""Before a broken connection is tried again; then it is given up."""
STEADY_SECONDS = 60.0
"""After a connection that held for so long, all of these tries are there again: one follows a run for days."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""What shells answer for a program that is not there."""

Frame = tuple[dict[str, Any], bytes]
Said = dict[str, bytes]
"""What frames of each kind carried, one behind the other."""


@dataclass(frozen=True)
class Answer:
    """How a program on the login node ended."""

    code: int
    stdout: str
    stderr: str


class Conversation:
    """One question to the hpcaccel of the other side, after it has said hello."""

    def __init__(self, session: Session, reader: FrameReader) -> None:
        self._session = session
        self._reader = reader

    def frame(self) -> Frame:
        """The next frame.

        Raises:
            ConnectionLost: the other side fell silent before its last one.
        """
        try:
            return self._reader.frame()
        except Torn:
            self._session.wait()  # says so when it was the connection
            raise ConnectionLost("hpcaccel on the cluster was killed before it had answered") from None

    def expect(self, frame: str) -> Frame:
        """The next frame, which must be such a one.

        Raises:
            ClusterError: the other side refused; in its own words.
        """
        said = b""
        while True:
            head, payload = self.frame()
            if head["frame"] == frame:
                return head, payload
            if head["frame"] == "exit":
                raise ClusterError(said.decode("utf-8", "replace").strip().removeprefix("error: "))
            said += payload

    def to_the_end(self, **hear: Callable[[dict[str, Any], bytes], None]) -> tuple[dict[str, Any], Said]:
        """Read all frames: the last one (``exit``), and what the others carried.

        Args:
            hear: by their kind, what is done with frames instead of keeping what they carry.
        """
        said: Said = {}
        while True:
            head, payload = self.frame()
            kind = head["frame"]
            if kind == "exit":
                return head, said
            if kind in hear:
                hear[kind](head, payload)
            else:
                said[kind] = said.get(kind, b"") + payload

    def send(self, data: bytes) -> None:
        self._session.write(data)

    def end_input(self) -> None:
        self._session.close_input()


class RemoteCluster:
    """The login node of a profile with ``host``; connected when something is asked, until ``close``.

    Raises (from every method that asks):
        ClusterError: unknown host, host key unknown or changed, login refused, no hpcaccel there or an old one.
        Unreachable, ConnectionLost: no connection, after some tries.
    """

    def __init__(
        self,
        profile: ClusterProfile,
        *,
        connection: Connection | None = None,
        note: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        assert profile.host is not None
        self.profile = profile
        self.name = profile.name
        self._given = connection
        self._made: Connection | None = None
        self._note = note or (lambda text: print(text, file=sys.stderr))
        self._sleep, self._now = sleep, now

    def __enter__(self) -> RemoteCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    @property
    def connection(self) -> Connection:
        if self._given is not None:
            return self._given
        if self._made is None:
            self._made = _connect(self.profile)
        return self._made

    # -- any program -------------------------------------------------------------------------------------------------

    def run(
        self,
        args: Sequence[str],
        stdin: bytes | str | None = None,
        *,
        hear: Callable[[bytes], None] = lambda piece: None,
    ) -> Answer:
        """Run a program in a login shell there and wait for it. It is asked once: a caller that may repeat it does.

        Args:
            args: the program and its arguments; never a secret, since everybody there sees them.
            hear: gets what comes on stderr, as it comes, from another thread.
        """
        session = self.connection.start(command_line(args))
        try:
            errors = Drain(session.read_error, hear)
            if stdin is not None:
                session.write(stdin.encode() if isinstance(stdin, str) else stdin)
            session.close_input()
            pieces = list(iter(lambda: session.read(1 << 16), b""))
            said = errors.all()
            code = session.wait()
        finally:
            session.close()
        return Answer(code, b"".join(pieces).decode("utf-8", "replace"), said.decode("utf-8", "replace"))

    def runner(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Stands in for ``subprocess.run`` where commands of Slurm are started: ``Slurm(cluster.runner)``.

        Environment and time limit of this machine have no meaning there.

        Raises:
            FileNotFoundError: there is no such program.
        """
        answer = self.again(lambda: self.run(["env", "LC_ALL=C", *command]))
        if answer.code == NOT_FOUND:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(list(command), answer.code, answer.stdout, answer.stderr)

    def terminal(self, *args: str) -> int:
        """``hpcaccel <args>`` there, on this terminal; its exit code."""
        return self.connection.terminal(answering(self.profile.hpcaccel, *args))

    def introduction(self, runs_dir: str | None = None) -> dict[str, Any]:
        """What the other side must know of this profile."""
        return {"cluster": self.name, "profile": self.profile.for_login_node(), "runs_dir": runs_dir}

    # -- hpcaccel ----------------------------------------------------------------------------------------------------

    def again(self, action: Callable[[], Any]) -> Any:
        """Do what may be done twice; when the connection breaks, connect and do it again, some times."""
        connected = False
        pauses = iter(PAUSES_SECONDS)
        while True:
            began = self._now()
            try:
                return action()
            except ConnectionLost as error:
                lost: ClusterError = error
                connected = True
                if self._now() - began > STEADY_SECONDS:
                    pauses = iter(PAUSES_SECONDS)
            except Unreachable as error:
                if not connected:
                    raise
                lost = error
            self.connection.close()
            pause = next(pauses, None)
            if pause is None:
                raise ConnectionLost(
                    f"{lost}. Nothing is lost: what runs on {self.name} goes on, and the same command, given again, "
                    "takes up where this one was; a submission is never made twice"
                )
            self._note(f"{lost}; trying again")
            self._sleep(pause)

    def converse(self, request: dict[str, Any], talk: Callable[[Conversation], Any]) -> Any:
        """Ask the hpcaccel there one thing, and let ``talk`` read its frames. Once; see :meth:`again`."""
        import json

        session = self.connection.start(answering(self.profile.hpcaccel, "answer"))
        try:
            errors = Drain(session.read_error)
            reader = FrameReader(session.read)
            self._hear_hello(session, reader, errors)
            session.write(json.dumps({"protocol": PROTOCOL, **request}).encode() + b"\n")
            return talk(Conversation(session, reader))
        finally:
            session.close()

    def _hear_hello(self, session: Session, reader: FrameReader, errors: Drain) -> None:
        while (line := reader.line()) is not None:
            if (hello := parse_hello(line)) is not None:
                self._check_version(*hello)
                return
        said = errors.all().decode("utf-8", "replace").strip()
        raise ClusterError(self._no_hello(session.wait(), said))

    def _check_version(self, protocol: int, version: str) -> None:
        here = hpcaccel.__version__
        if protocol < PROTOCOL or version_key(version) < version_key(here):
            raise ClusterError(
                f"{self.name} has hpcaccel {version}, older than {here} on this machine. Bring it up to date with "
                f"`hpcaccel cluster install {self.name}`; queued jobs are not touched by that"
            )
        if protocol > PROTOCOL:
            raise ClusterError(
                f"{self.name} has hpcaccel {version}, too new for {here} on this machine: "
                "pip install --upgrade hpcaccel here"
            )

    def _no_hello(self, code: int, said: str) -> str:
        install = f"`hpcaccel cluster install {self.name}`"
        if "No such command" in said:
            return f"{self.name} has an hpcaccel too old to be reached from here. Bring it up to date with {install}"
        words = f" ({said.splitlines()[-1]})" if said else ""
        if "bad interpreter" in said or ("cannot execute" in said and code in (NOT_EXECUTABLE, NOT_FOUND)):
            return f"the Python of hpcaccel on {self.name} is missing{words}. Install it anew with {install}"
        if code in (NOT_EXECUTABLE, NOT_FOUND):
            return f"there is no hpcaccel on {self.name}{words}. Install it with {install}"
        if "No module named" in said or "ImportError" in said:
            return f"the hpcaccel on {self.name} is broken{words}. Install it anew with {install}"
        return (
            f"hpcaccel on {self.name} did not answer (exit code {code}){words}. Log in (ssh {self.profile.host}) and "
            "look whether your login scripts end early, or whether the home directory is full"
        )


def _connect(profile: ClusterProfile) -> Connection:
    from hpcaccel.submission.remote.connection import FabricConnection
    from hpcaccel.submission.remote.openssh import OpenSshConnection, shares_connections

    assert profile.host is not None
    kind = OpenSshConnection if shares_connections(profile.host) else FabricConnection
    return kind(profile.host, cluster=profile.name)
