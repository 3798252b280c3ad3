"""The command ``notify``, which tests the webhook of notices."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli import options
from hpcaccel.cli.rendered_scripts import chosen_profile
from hpcaccel.errors import HpcaccelError, UserError

if TYPE_CHECKING:
    from hpcaccel.core.launch_spec import NoticePolicy
    from hpcaccel.core.webhook import Answer
    from hpcaccel.spec import ClusterProfile
    from hpcaccel.spec.job.notify_fields import NotifySection

__all__ = ["notify"]


def notify(
    test: Annotated[bool, typer.Option("--test", help="Send a test message, and print what happened.")] = False,
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use the section notify of this spec file.", show_default=False),
    ] = None,
    cluster: options.Cluster = None,
) -> None:
    """Test the webhook that gets the notices about runs (section notify).

    Without --spec, the section notify of the cluster's profile is used; the URL is read on this machine.
    """
    if not test:
        raise UserError("an option is missing: `hpcaccel notify --test` sends a test message to the webhook")
    profile = chosen_profile(cluster)
    section = _section(spec, profile)
    if profile is not None and profile.host is not None:
        typer.echo(f"note: jobs on {profile.name} read the webhook's URL there: test it there, too")
    _show_mail(section)
    _send_test(section.policy())


def _section(spec: Path | None, profile: ClusterProfile | None) -> NotifySection:
    from hpcaccel.spec import load_spec
    from hpcaccel.spec.job.notify_fields import NotifySection

    if spec is not None:
        return load_spec(spec, profile=profile).notify
    return NotifySection() if profile is None else profile.notify


def _show_mail(section: NotifySection) -> None:
    if section.mail is not None:
        events = ", ".join(value or "" for name, value in section.mail_options() if name == "mail-type")
        typer.echo(f"mail: Slurm sends it to {section.mail} ({events}); this is not tested here")


def _send_test(policy: NoticePolicy) -> None:
    from hpcaccel.core.webhook import find_url, post, shown_host, webhook_place

    if policy.webhook is False:
        raise UserError("notify.webhook is false: remove it, or set it to true")
    url = find_url(policy)
    if not policy.sends:
        typer.echo("note: runs send nothing to this webhook yet: set notify.webhook to true in the spec or profile")
    began = time.monotonic()
    typer.echo(f"sending a test message to {shown_host(url)} (from {webhook_place(policy)})")
    answer = post(url, _test_message(), identifier=f"test-{os.urandom(8).hex()}")
    if not answer.delivered:
        raise HpcaccelError(f"the webhook did not accept the message: {_what_happened(answer)}. {_advice(answer)}")
    typer.echo(f"delivered: {_what_happened(answer)} after {time.monotonic() - began:.1f} s")


def _test_message() -> dict[str, object]:
    from hpcaccel.core.notice_message import Notice, message_of
    from hpcaccel.core.process_identity import node_name

    return message_of(
        Notice(
            key=f"test.{time.time_ns()}",
            event="test",
            time=time.time(),
            run="test",
            name="hpcaccel notify --test",
            text="This is a test message of hpcaccel: notices about runs will arrive here",
            host=node_name(),
        )
    )


def _what_happened(answer: Answer) -> str:
    if answer.status is None:
        return answer.text
    return f"HTTP {answer.status}" + (f" ({answer.text})" if answer.text else "")


def _advice(answer: Answer) -> str:
    if answer.status is None:
        return "Check that this machine reaches the receiver, and the proxy (https_proxy, no_proxy)"
    if 300 <= answer.status < 400:
        return "Store the URL that the receiver redirects to, if you trust it"
    if answer.status in (401, 403, 404, 410):
        return "The URL is wrong or no longer valid: create a new webhook, and store its URL"
    if answer.status >= 500:
        return "The receiver has a problem of its own: try again later"
    return "The receiver does not accept hpcaccel's message: see the format in docs/notices.md"
