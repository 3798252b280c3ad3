"""``submit``, ``sweep start``, ``logs``, ``shell`` on a cluster behind SSH: what they do otherwise than here."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from hpcaccel.cli.forwarding import EXIT_INTERRUPTED, behind_ssh_run, copy_frames
from hpcaccel.cli.output import note
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.submission.remote.cluster import Conversation, RemoteCluster

__all__ = ["logs_there", "shell_there", "submit_there"]


def submit_there(
    cluster: RemoteCluster,
    file: str,
    overrides: Sequence[str],
    options: Sequence[str],
    *,
    runs_dir: str | None,
    is_sweep: bool,
    wait: bool,
    dry_run: bool,
    json: bool,
) -> None:
    """Submit a spec file there, remember the run, and follow it with ``wait``.

    Raises:
        typer.Exit: with the exit code of the other side.
    """
    from hpcaccel.submission.remote.travel import hand_over, pack

    luggage = pack(cluster, file, overrides, is_sweep=is_sweep)
    words = [*options, *(["--dry-run"] if dry_run else []), *(["--json"] if json else [])]
    with cluster:
        columns = shutil.get_terminal_size().columns
        handed = hand_over(cluster, luggage, words, runs_dir=runs_dir, dry_run=dry_run, columns=columns)
        if handed.repeated and handed.run is not None:
            note(
                "note: the same was submitted before, and the answer did not arrive: this is that run. For another one"
            )
            note("      submit once more")
        sys.stderr.buffer.write(handed.err)
        sys.stderr.flush()
        if not (wait and json and handed.run is not None):
            sys.stdout.buffer.write(handed.out)
            sys.stdout.flush()
        if handed.code or not wait or handed.run is None:
            raise typer.Exit(handed.code)
        request = {
            "do": "command",
            "follows": True,
            "args": ["wait", handed.run["run_id"], *(["--json"] if json else [])],
        }
        raise typer.Exit(_until_the_end(cluster, request, copy_frames))


def _until_the_end(cluster: RemoteCluster, request: dict[str, Any], talk: Any) -> int:
    try:
        return int(cluster.again(lambda: cluster.converse(request, talk)))
    except KeyboardInterrupt:
        note("\nthe run goes on")
        return EXIT_INTERRUPTED


def logs_there(run: str | None, *, rank: str, attempt: int | None, follow: bool) -> bool:
    """Show the logs of ``run`` if it is behind SSH; after a broken connection from where they were."""
    found = behind_ssh_run(run)
    if found is None:
        return False
    cluster, run_id = found
    request: dict[str, Any] = {"do": "logs", "run": run_id, "rank": rank, "attempt": attempt, "follow": follow}
    request["position"] = None

    def talk(conversation: Conversation) -> int:
        while True:
            head, payload = conversation.frame()
            if head["frame"] == "exit":
                return int(head["code"])
            stream = sys.stdout if head["frame"] == "out" else sys.stderr
            stream.buffer.write(payload)
            stream.flush()
            request["position"] = head.get("position", request["position"])

    with cluster:
        raise typer.Exit(_until_the_end(cluster, request, talk))


def shell_there(run: str, node: str | None) -> bool:
    """Open a shell on a node of ``run`` if it is behind SSH; False where it is not."""
    found = behind_ssh_run(run)
    if found is None:
        return False
    cluster, run_id = found
    if not sys.stdin.isatty():
        raise UserError("a shell on a cluster behind SSH needs a terminal")
    with cluster:
        raise typer.Exit(cluster.terminal("shell", run_id, *([] if node is None else ["--node", node])))
