"""hpcaccel's commands on a login node, over one connection that stays open."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.service.behind_ssh.reading_session import ReadingSession
from hpcaccel.spec import ClusterProfile
from hpcaccel.submission.remote.remote_cluster import Payloads, RemoteCluster, RemoteRequest
from hpcaccel.submission.remote.remote_index import pending_command

__all__ = ["ClusterCommands"]


class ClusterCommands:
    """Runs commands on the login node of a profile with ``host``, one at a time; beside them, a program there answers
    questions about runs. All use one connection."""

    def __init__(self, profile: ClusterProfile) -> None:
        self.name = profile.name
        self._cluster = RemoteCluster(profile)
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._session = ReadingSession(profile.name, self._converse)

    def read(self, *words: str) -> Any:
        """The JSON that a command prints, which only reads.

        Raises:
            ClusterError: the login node cannot be reached, or hpcaccel is missing there.
            UserError: the command failed; the message is the command's own.
        """
        return json.loads(self._run(words, {}))

    def change(self, *words: str) -> None:
        """Run a command that changes something: once, even if the connection breaks and the request is repeated.
        Errors are those of :meth:`read`."""
        with pending_command(self.name, words) as pending:
            try:
                self._run(words, {"id": pending.key, "repeated": pending.is_repeated})
            except UserError:
                pending.done = True
                raise
            pending.done = True

    def ask(self, run: str, what: str, options: dict[str, Any]) -> Any:
        """A reading of a run; see :class:`ReadingSession`."""
        return self._session.ask(run, what, options)

    def close(self) -> None:
        self._session.close()
        self._cluster.close()

    def _converse(self, request: dict[str, Any], talk: Callable[[RemoteRequest], Any]) -> Any:
        with self._connecting:
            _ = self._cluster.connection  # one for all threads
        return self._cluster.converse(request, talk)

    def _run(self, words: Sequence[str], more: dict[str, Any]) -> bytes:
        request = {"do": "command", "args": list(words), "terminal_columns": None, **more}

        def refuse_secrets(head: dict[str, Any], _: bytes) -> None:
            raise UserError(
                f"the run needs {', '.join(head['names'])}, which the service does not pass on: run "
                f"`hpcaccel {words[0]} {self.name}:{words[-1]}` in a shell that has it"
            )

        def talk(conversation: RemoteRequest) -> tuple[dict[str, Any], Payloads]:
            return conversation.to_the_end(secrets=refuse_secrets)

        with self._lock:
            head, output = self._cluster.again(lambda: self._converse(request, talk))
        if int(head["code"]) != 0:
            sentence = output.get("err", b"").decode("utf-8", "replace").strip().removeprefix("error: ")
            raise UserError(sentence or f"`hpcaccel {' '.join(words)}` failed on {self.name}")
        out: bytes = output.get("out", b"")
        return out
