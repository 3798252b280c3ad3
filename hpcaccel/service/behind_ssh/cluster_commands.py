"""hpcaccel's commands on a login node, over one connection that stays open."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.service.behind_ssh.reading_session import ReadingSession
from hpcaccel.spec import ClusterProfile
from hpcaccel.submission.remote.remote_cluster import Payloads, RemoteCluster, RemoteRequest
from hpcaccel.submission.remote.remote_index import pending_command, secrets_of

__all__ = ["ClusterCommands"]


class ClusterCommands:
    """Runs commands on the login node of a profile with ``host``, one at a time. Meanwhile, a program there responds to
    read requests (``ReadingSession``). All use one connection."""

    def __init__(self, profile: ClusterProfile) -> None:
        self.name = profile.name
        self.profile = profile
        self._cluster = RemoteCluster(profile)
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._session = ReadingSession(profile.name, self._converse)

    def read(self, *words: str) -> Any:
        """Run a command that only reads, and return the JSON that it prints.

        Raises:
            ClusterError: the login node cannot be reached, or hpcaccel is missing there.
            UserError: the command failed; the message is the command's own.
        """
        return json.loads(self._run(words, {}, run=words[-1]))

    def change(self, *words: str, run: str, key: str | None = None) -> None:
        """Run a command that changes something: once, even if the connection breaks and the request is repeated.
        Errors are those of :meth:`read`.

        Args:
            run: the run's name on the cluster. Its secrets are sent if it was submitted from this machine.
            key: the caller's key: the command has an effect only once, however often it is repeated with this key.
        """
        if key is not None:
            made_of = "\0".join([self.name, *words, key])
            request_id = hashlib.sha256(made_of.encode()).hexdigest()[:32]
            self._run(words, {"id": request_id, "repeated": True}, run=run)
            return
        with pending_command(self.name, words) as pending:
            try:
                self._run(words, {"id": pending.key, "repeated": pending.is_repeated}, run=run)
            except UserError:
                pending.done = True
                raise
            pending.done = True

    def ask(self, run: str, what: str, options: dict[str, Any]) -> Any:
        """A reading of a run; see :class:`ReadingSession`."""
        return self._session.ask(run, what, options)

    def connected(self) -> RemoteCluster:
        """The cluster, with the connection that all share."""
        with self._connecting:
            _ = self._cluster.connection  # one for all threads
        return self._cluster

    def close(self) -> None:
        self._session.close()
        self._cluster.close()

    def _converse(self, request: dict[str, Any], talk: Callable[[RemoteRequest], Any]) -> Any:
        return self.connected().converse(request, talk)

    def _run(self, words: Sequence[str], more: dict[str, Any], *, run: str) -> bytes:
        request = {"do": "command", "args": list(words), "terminal_columns": None, **more}

        def talk(conversation: RemoteRequest) -> tuple[dict[str, Any], Payloads]:
            def send_secrets(head: dict[str, Any], _: bytes) -> None:
                values = self._secrets(words, run, [str(name) for name in head["names"]])
                conversation.send(json.dumps(values).encode() + b"\n")

            return conversation.to_the_end(secrets=send_secrets)

        with self._lock:
            head, output = self._cluster.again(lambda: self._converse(request, talk))
        if int(head["code"]) != 0:
            sentence = output.get("err", b"").decode("utf-8", "replace").strip().removeprefix("error: ")
            raise UserError(sentence or f"`hpcaccel {' '.join(words)}` failed on {self.name}")
        out: bytes = output.get("out", b"")
        return out

    def _secrets(self, words: Sequence[str], run: str, names: Sequence[str]) -> dict[str, str]:
        """The values of variables that the login node requests, which is not trusted: only those that the run's spec
        declared when the run was submitted from this machine."""
        if set(names) <= secrets_of(self.name, run):
            return {name: os.environ[name] for name in names if name in os.environ}
        command = " ".join(word for word in words if word != "--" and word != run)
        raise UserError(
            f"the run needs {', '.join(names)}, which the service does not pass on: run "
            f"`hpcaccel {command} {self.name}:{run}` in a shell in which they are set"
        )
