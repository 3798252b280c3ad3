"""Forwarding: commands about runs on a cluster behind SSH are executed on the cluster's login node.

A run is behind SSH if this machine has submitted it to such a cluster, if it is written as ``CLUSTER:RUN``, or if it is
unknown on this machine and the default profile has a ``host``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from hpcaccel.cli.output import EXIT_INTERRUPTED, note, print_bytes, terminal_columns
from hpcaccel.cli.remote.target_cluster import cluster_of_arguments
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.submission.remote.remote_cluster import Payloads, RemoteCluster, RemoteRequest

__all__ = ["COMMAND_LINE", "Effect", "Secret", "copy_frames", "follow_there", "forwarded", "there_or_here"]

Effect = Literal["changes", "reads", "follows"]
"""What a command does. ``changes``: the command changes something, and takes effect at most once even if the connection
breaks and the request is repeated. ``reads``: the command only reads, so the request may be repeated. ``follows``: the
command reads until the run has ended."""
WATCH = {"--watch", "-w"}
"""Options that make ``status`` follow the run."""
LOCAL_OPTIONS = ("--cluster", "--secret")
"""Options that apply to this machine only; they are not forwarded."""
COMMAND_LINE: ContextVar[Sequence[str]] = ContextVar("COMMAND_LINE")
"""Arguments of this ``hpcaccel`` call; set by the root command."""

Secret = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME",
        help="Environment variable to pass to the cluster behind SSH, for a run submitted elsewhere; repeatable.",
        show_default=False,
    ),
]
_SECRET = "secret"
_MAX_SHOWN = 10

C = TypeVar("C", bound=Callable[..., None])


def forwarded(
    words: Sequence[str], command: C, *, effect: Effect = "changes", not_there: Mapping[str, str] | None = None
) -> C:
    """Wrap ``command`` so that it runs on the login node, with the same options, if its run or cluster is behind SSH.

    Args:
        words: the words of the command's name, such as ``["sweep", "status"]``.
        effect: what the command does; see ``Effect``.
        not_there: parameters that cannot be used with a cluster behind SSH, each with advice for the user.
    """

    @functools.wraps(command)
    def run(**values: Any) -> None:
        found = cluster_of_arguments(values)
        if found is None:
            refuse_secret_here(values)
            command(**values)
            return
        cluster, names = found
        for name, sentence in (not_there or {}).items():
            if values.get(name) is not None:
                raise UserError(f"{cluster.name} is behind SSH: {sentence}")
        secrets = secrets_for(cluster.name, names.values(), values)
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
    """Decorator that wraps a command with :func:`forwarded` and adds the result to ``app``. ``group`` is the name of
    that command group."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        app.command(name)(forwarded([group, name], command, effect=effect, not_there=not_there))
        return command

    return add


def _for_there(args: Sequence[str]) -> list[str]:
    kept: list[str] = []
    words = iter(args)
    for word in words:
        if word in LOCAL_OPTIONS:
            next(words, None)
        elif word.partition("=")[0] not in LOCAL_OPTIONS:
            kept.append(word)
    return kept


def _forward(
    cluster: RemoteCluster, args: Sequence[str], *, effect: Effect, secrets: frozenset[str] = frozenset()
) -> int:
    """Run a command on the cluster.

    Args:
        secrets: names of the environment variables of this machine whose values the cluster may request.

    Returns:
        The exit code.
    """
    request: dict[str, Any] = {"do": "command", "args": list(args), "terminal_columns": terminal_columns()}
    if effect == "follows" or (args[0] == "status" and WATCH & set(args[1:])):
        return follow_there(cluster, {**request, "follows": True}, copy_frames)
    if effect == "reads":
        return _run_once(cluster, request, frozenset())
    from hpcaccel.submission.remote.remote_index import pending_command

    with pending_command(cluster.name, args) as pending:
        code = _run_once(cluster, {**request, "id": pending.key, "repeated": pending.is_repeated}, secrets)
        pending.done = True
    return code


def _run_once(cluster: RemoteCluster, request: dict[str, Any], secrets: frozenset[str]) -> int:
    """Run a command that ends by itself, then print its whole output. Returns the exit code."""

    def talk(conversation: RemoteRequest) -> tuple[dict[str, Any], Payloads]:
        def send_secrets(head: dict[str, Any], _: bytes) -> None:
            values = secret_values(cluster.name, head["names"], secrets)
            conversation.send(json.dumps(values).encode() + b"\n")

        return conversation.to_the_end(secrets=send_secrets)

    head, output = cluster.again(lambda: cluster.converse(request, talk))
    if head.get("kept") and request.get("repeated"):
        note("note: this command had already run, but the connection broke before its output arrived; it is shown now")
    print_bytes(out=output.get("out", b""), err=output.get("err", b""))
    return int(head["code"])


def copy_frames(conversation: RemoteRequest, printed: Callable[[dict[str, Any]], None] = lambda head: None) -> int:
    """Print the output of a command as it arrives. Returns the exit code.

    Args:
        printed: called with the head of each frame after the frame is printed.
    """

    def show(head: dict[str, Any], payload: bytes) -> None:
        stream = sys.stdout if head["frame"] == "out" else sys.stderr
        stream.buffer.write(payload)
        stream.flush()
        printed(head)

    head, _ = conversation.to_the_end(out=show, err=show)
    return int(head["code"])


def follow_there(cluster: RemoteCluster, request: dict[str, Any], talk: Callable[[RemoteRequest], int]) -> int:
    """Run a command on the cluster that follows a run, until the command ends or the user presses Ctrl-C. Returns the
    exit code."""
    try:
        return int(cluster.again(lambda: cluster.converse(request, talk)))
    except KeyboardInterrupt:
        note("\nthe run continues")
        return EXIT_INTERRUPTED


# -- secrets ----------------------------------------------------------------------------------------------------------


def secrets_for(cluster: str, runs: Iterable[str], values: dict[str, Any]) -> frozenset[str]:
    """Names of the environment variables that a command with the arguments ``values`` may pass to the cluster.

    The login node may be under the control of an attacker, so its requests are not trusted. The login node gets only
    variables that the run's spec declared when the run was submitted from this machine, and those that the user lists
    with ``--secret``.

    Args:
        runs: the names that the command's runs have on the cluster.

    Raises:
        UserError: the value of a ``--secret`` is not a variable name, or that variable is not set on this machine.
    """
    from hpcaccel.submission.remote.remote_index import secrets_of

    if _SECRET not in values:
        return frozenset()  # the command submits no job
    named = values[_SECRET] or []
    for name in named:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise UserError(
                f"--secret {name!r} is not a variable name. Give only the name: the value comes from the environment"
            )
        if name not in os.environ:
            raise UserError(f"--secret {name}: {name} is not set on this machine. Export it first")
    return frozenset(named).union(*(secrets_of(cluster, run) for run in runs))


def refuse_secret_here(values: dict[str, Any]) -> None:
    """Raise UserError if ``--secret``, which is for clusters behind SSH only, is given for a run on this machine."""
    if values.get(_SECRET):
        raise UserError(
            "--secret applies only to runs on a cluster behind SSH: a run on this machine gets the variables listed "
            "under environment.secrets from this shell"
        )


def secret_values(cluster: str, requested: Sequence[Any], allowed: frozenset[str]) -> dict[str, str]:
    """The values of the variables that the login node requests, without variables that are not set on this machine.

    Raises:
        UserError: a requested variable is not allowed. In that case no value is passed.
    """
    names = [str(name) for name in requested]
    refused = [name for name in names if name not in allowed]
    if not refused:
        return {name: os.environ[name] for name in names if name in os.environ}
    from hpcaccel.core.formatting import clean

    words = ", ".join(clean(name)[:80] for name in refused[:_MAX_SHOWN]) + (" …" if len(refused) > _MAX_SHOWN else "")
    raise UserError(
        f"{cluster} requests variables of this machine ({words}) that the run did not list under environment.secrets "
        "when it was submitted from here. No value was sent, and nothing was changed. If its jobs do need them "
        "(the run was submitted from another machine, or with an older hpcaccel), allow each with --secret NAME (an "
        "option of resume, sweep resume, retry-failed and extend). Otherwise report it to the site: its login node "
        "may be compromised"
    )
