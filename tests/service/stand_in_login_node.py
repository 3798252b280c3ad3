"""Stand-in for a login node: answers hpcaccel's requests in this process, without SSH, and records them."""

from __future__ import annotations

import json
import os
import queue
import threading
from typing import Any

from hpcaccel.service.behind_ssh.reading_answers import answer_readings
from hpcaccel.submission.remote.protocol import ConnectionLost, Unreachable
from hpcaccel.submission.remote.remote_cluster import RemoteCluster

__all__ = ["RUN", "LoginNode"]

RUN = {
    "run_id": "20261120-153012-4f2a", "name": "gpt", "path": "/there/gpt", "backend": "slurm", "cluster": "slurm",
    "job_id": "7", "created": 1000.0, "state": "running", "reason": "", "detail": "", "attempts": 1, "step": 5,
    "total_steps": 10, "steps_lost": 0, "first_loss": 2.0, "last_loss": 1.0,
    "checkpoint": None, "checkpoint_step": None,
}  # fmt: skip


class LoginNode:
    """Answers hpcaccel's commands, and records them."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.secrets: list[str] = []
        """Secrets that a resume needs."""
        self.sent: list[dict[str, str]] = []
        """Secrets that were sent."""
        self.state = "running"
        self.programs = 0
        """Number of programs that were started to answer questions."""
        self.breaks = 0
        """Number of questions after which the connection breaks."""
        self.questions: list[dict[str, Any]] = []
        self.readings: dict[str, Any] = {}
        """Readings with a fixed value; the others are those of runs of this process."""

        self.looks: list[dict[str, Any]] = []
        """Requests to check a spec."""
        self.submissions: list[dict[str, Any]] = []
        """Requests to submit that have arrived."""
        self.requests: list[dict[str, Any]] = []
        """All requests that are no questions."""
        self.runs: dict[str, str] = {}
        """The submitted runs by key."""
        self.variables: dict[str, str] = {}
        self.refusal: tuple[int, bytes] | None = None
        """Exit code and stderr of commands with a spec."""
        self.is_cut = False
        """Whether the connection breaks after a submission has arrived, before the reply."""
        self.is_down = False

    def converse(self, _: RemoteCluster, request: dict[str, Any], talk: Any) -> Any:
        if self.is_down:
            raise Unreachable("cannot reach alps: no route to host")
        if request["do"] == "readings":
            self.programs += 1
            return talk(Program(self))
        self.requests.append(request)
        if request["do"] == "environment":
            values = {name: self.variables.get(name) for name in request["names"]}
            return talk(Reply({"frame": "environment", "values": values}))
        if request["do"] == "look":
            self.looks.append(request)
            return talk(Reply(self._exit(request, b"[]" if request["command"][0] == "plan" else b"#!/bin/bash\n")))
        if request["do"] == "submit":
            return talk(self._submit(request))
        self.commands.append(request["args"])
        return talk(self)

    def _exit(self, request: dict[str, Any], out: bytes) -> dict[str, Any]:
        code, err = self.refusal or (0, b"note: a note of the cluster\n")
        return {"code": code, "out": b"" if code else out, "err": err}

    def _submit(self, request: dict[str, Any]) -> Reply:
        self.submissions.append(request)
        head = self._exit(request, json.dumps({"workers": 3}).encode())
        if head["code"]:
            return Reply({**head, "run": None})
        earlier = request["key"] in self.runs
        run_id = self.runs.setdefault(request["key"], f"20261120-153012-000{len(self.runs)}")
        if self.is_cut:
            raise ConnectionLost("the connection was lost")
        run = {"run_id": run_id, "name": request["document"]["name"], "job_id": "7", "path": f"/there/{run_id}"}
        return Reply({**head, "run": {**run, "kind": request["kind"]}, "earlier": earlier})

    def send(self, line: bytes) -> None:
        self.sent.append(json.loads(line))

    def to_the_end(self, *, secrets: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        words = self.commands[-1]
        if words[0] == "resume" and self.secrets:
            secrets({"frame": "secrets", "names": self.secrets}, b"")
        run = {**RUN, "state": self.state}
        if words[:2] == ["sweep", "status"]:
            run["job_ids"] = ["8", "9"]
        document = [run] if words[0] == "list" else run
        return {"code": 0}, {"out": json.dumps(document).encode() if "--json" in words else b"done\n"}


class Reply:
    """A reply of one frame."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._payloads: dict[str, bytes] = {name: head.pop(name) for name in ("out", "err") if name in head}
        self._head = head

    def expect(self, frame: str) -> tuple[dict[str, Any], bytes]:
        assert self._head["frame"] == frame
        return self._head, b""

    def to_the_end(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        return self._head, self._payloads


class Program:
    """``answer_readings`` in a thread, between pipes."""

    def __init__(self, node: LoginNode) -> None:
        self._node = node
        self._frames: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        reading, writing = os.pipe()
        self._input = os.fdopen(writing, "wb", buffering=0)
        self._frames.put(({"frame": "ready"}, b""))
        threading.Thread(target=self._run, args=(reading,), daemon=True).start()

    def _run(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as questions:
            answer_readings(questions, self._send)

    def _send(self, frame: str, payload: bytes = b"", **values: Any) -> None:
        self._frames.put(({"frame": frame, **values}, payload))

    def expect(self, frame: str) -> tuple[dict[str, Any], bytes]:
        head, payload = self._frames.get(timeout=60)
        assert head["frame"] == frame
        return head, payload

    def send(self, line: bytes) -> None:
        self._node.questions.append(json.loads(line))
        if self._node.breaks:
            self._node.breaks -= 1
            self._input.close()
            raise ConnectionLost("the connection was lost")
        question = self._node.questions[-1]
        if question["what"] == "overview":
            self._overview(question["run"])
            return
        if (what := question["what"]) in self._node.readings:
            self._send("reading", json.dumps(self._node.readings[what]).encode())
            return
        self._input.write(line)

    def _overview(self, run: str) -> None:
        if run == "nowhere":
            self._send("reading", error="no run 'nowhere'", kind="RunNotFound")
            return
        self._send("reading", json.dumps({**RUN, "state": self._node.state}).encode())

    def end_input(self) -> None:
        self._input.close()
