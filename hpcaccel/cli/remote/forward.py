"""Commands about runs on a cluster behind SSH: the same command runs on its login node.

A run is behind SSH when this machine has submitted it there, when it is written as ``CLUSTER:RUN``, or when it is not
known here and the default profile has a ``host``.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import typer

from hpcaccel.cli.output import note, print_bytes, terminal_columns
from hpcaccel.cli.remote.dispatch import meant_cluster
from hpcaccel.cli.remote.forwarded_secrets import given, may_have, refuse_here
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.submission.remote.remote_cluster import Conversation, RemoteCluster, Said

__all__ = ["COMMAND_LINE", "Effect", "copy_frames", "forwarded", "there_or_here"]

Effect = Literal["changes", "reads", "follows"]
"""Of a command: it changes something, so that it is carried out once, however often the connection breaks; it only
reads, and may be sent again; it reads for as long as the run goes on."""
WATCH = {"--watch", "-w"}
"""With them ``status`` follows."""
SEEN_TO_HERE = ("--cluster", "--secret")
"""Options whose values mean something on this side only."""
COMMAND_LINE: ContextVar[Sequence[str]] = ContextVar("COMMAND_LINE")
"""What stands behind ``hpcaccel`` in the call that is carried out; set by the program."""
EXIT_INTERRUPTED = 130

C = TypeVar("C", bound=Callable[..., None])


def forwarded(
    words: Sequence[str], command: C, *, effect: Effect = "changes", not_there: Mapping[str, str] | None = None
) -> C:
    """``command``, which goes to the cluster of its run (or of ``--cluster``) where that is behind SSH, with every
    option as it was given.

    Args:
        words: the command's name, as in ``["sweep", "status"]``.
        effect: of the command on the cluster.
        not_there: arguments that have no meaning there, each with a sentence that says what to do instead.
    """

    @functools.wraps(command)
    def run(**values: Any) -> None:
        found = meant_cluster(values)
        if found is None:
            refuse_here(values)
            command(**values)
            return
        cluster, names = found
        for name, sentence in (not_there or {}).items():
            if values.get(name) is not None:
                raise UserError(f"on {cluster.name}, behind SSH: {sentence}")
        secrets = may_have(cluster.name, names.values(), values)
        with cluster:
            args = [names.get(word, word) for word in COMMAND_LINE.get()]
            there = [*words, *_for_there(args[len(words) :])]
            raise typer.Exit(_forward(cluster, there, effect=effect, secrets=secrets))

    return run  # type: ignore[return-value]


def there_or_here(
    app: typer.Typer,
    group: str,
    name: str,
    *,
    effect: Effect = "changes",
    not_there: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command of ``group``, whose ``app`` it is added to, that goes to the login node as :func:`forwarded` says."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        app.command(name)(forwarded([group, name], command, effect=effect, not_there=not_there))
        return command

    return add


def _for_there(args: Sequence[str]) -> list[str]:
    kept: list[str] = []
    words = iter(args)
    for word in words:
        if word in SEEN_TO_HERE:
            next(words, None)
        elif word.partition("=")[0] not in SEEN_TO_HERE:
            kept.append(word)
    return kept


def _forward(
    cluster: RemoteCluster, args: Sequence[str], *, effect: Effect, secrets: frozenset[str] = frozenset()
) -> int:
    """The exit code of a command on the cluster.

    Args:
        secrets: names of this machine's variables that the other side may have.
    """
    request: dict[str, Any] = {"do": "command", "args": list(args), "terminal_columns": terminal_columns()}
    if effect == "follows" or (args[0] == "status" and WATCH & set(args[1:])):
        try:
            return int(cluster.again(lambda: cluster.converse({**request, "follows": True}, copy_frames)))
        except KeyboardInterrupt:
            note("\nthe run goes on")
            return EXIT_INTERRUPTED
    if effect == "reads":
        return _asked(cluster, request, frozenset())
    from hpcaccel.submission.remote.remote_index import pending_command

    with pending_command(cluster.name, args) as pending:
        code = _asked(cluster, {**request, "id": pending.key, "repeated": pending.is_repeated}, secrets)
        pending.done = True
    return code


def _asked(cluster: RemoteCluster, request: dict[str, Any], secrets: frozenset[str]) -> int:
    """The exit code of a command that ends by itself; what it says is printed when all of it is here."""

    def talk(conversation: Conversation) -> tuple[dict[str, Any], Said]:
        def hand_on(head: dict[str, Any], _: bytes) -> None:  # of a job that is handed in again
            values = given(cluster.name, head["names"], secrets)
            conversation.send(json.dumps(values).encode() + b"\n")

        return conversation.to_the_end(secrets=hand_on)

    head, said = cluster.again(lambda: cluster.converse(request, talk))
    if head.get("kept") and request.get("repeated"):
        note("note: the same was asked for before, and the answer did not arrive: this is that answer")
    print_bytes(out=said.get("out", b""), err=said.get("err", b""))
    return int(head["code"])


def copy_frames(conversation: Conversation, printed: Callable[[dict[str, Any]], None] = lambda head: None) -> int:
    """Print what comes, as it comes; the exit code.

    Args:
        printed: hears of each frame that has been printed.
    """

    def show(head: dict[str, Any], payload: bytes) -> None:
        stream = sys.stdout if head["frame"] == "out" else sys.stderr
        stream.buffer.write(payload)
        stream.flush()
        printed(head)

    head, _ = conversation.to_the_end(out=show, err=show)
    return int(head["code"])
