"""Section ``notify`` of a job spec: which events are sent to whom, by Slurm's mail and by a webhook."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from hpcaccel.spec.job.fields import Conflict, Flag, PathText, Section, Variable, Word, part_of

if TYPE_CHECKING:
    from hpcaccel.core.launch_spec import NoticePolicy

__all__ = ["NotifySection", "mail_conflicts"]

Event = Literal["start", "requeue", "stop", "failure", "hang", "end", "idle_gpus"]
_MAIL_TYPES = {"start": "BEGIN", "requeue": "REQUEUE", "stop": "END", "failure": "FAIL", "end": "END"}
"""Values of sbatch's --mail-type. Slurm has none for hangs and idle GPUs."""


class NotifySection(Section):
    """Who is notified of the events of a run. The webhook's URL is a secret and is never part of a spec."""

    events: list[Event] = Field(
        default_factory=lambda: list(get_args(Event)),
        description="What to send. start: ranks start in a job; requeue: the job goes back to the queue; stop: "
        "the run pauses; failure: an attempt failed; hang: the ranks hang; end: the run is over; idle_gpus: GPUs do "
        "nothing for 10 minutes while the run trains. Default: all.",
        examples=[["failure", "hang", "end"]],
    )
    mail: Word | None = Field(
        default=None,
        description="Who gets mail from Slurm (--mail-user and --mail-type), for start, requeue, stop, failure and end "
        "of the job; hang and idle_gpus are sent by the webhook only.",
        examples=["me@example.org"],
    )
    webhook: Flag | None = Field(
        default=None,
        description="Post the events to a webhook of Slack, Mattermost or a program. Default: true if webhook_env or "
        "webhook_file is set.",
    )
    webhook_env: Variable | None = Field(
        default=None,
        description="Environment variable that holds the webhook's URL, also listed in environment.secrets. Instead of "
        "webhook_file.",
        examples=["TEAM_WEBHOOK"],
    )
    webhook_file: PathText | None = Field(
        default=None,
        description="File of mode 600 that holds the webhook's URL, readable on the cluster's nodes. Default: "
        "~/.config/hpcaccel/webhook.",
    )

    rivals = (("webhook_env", "webhook_file"),)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        events = values.get("events")
        chosen = [str(event) for event in events] if isinstance(events, list) else []
        if values.get("mail") is not None and chosen and not _MAIL_TYPES.keys() & set(chosen):
            advice = "has no effect: Slurm sends no mail about these events. Add another one, or use webhook"
            found.append(Conflict("mail", advice))
        for key in ("webhook_env", "webhook_file"):
            if re.search(r"https?:/", str(values.get(key) or "")):  # a path, and thus without one of the slashes
                advice = "must not be the URL itself, which is a secret: name where it is stored"
                found.append(Conflict(key, advice))
        return found

    def policy(self) -> "NoticePolicy":
        """This section as part of the launch spec, for the batch step."""
        from hpcaccel.core.launch_spec import NoticePolicy  # `render` and `validate` need none of its classes

        return NoticePolicy(**self.model_dump(mode="json", exclude={"mail"}))

    def mail_options(self) -> list[tuple[str, str | None]]:
        """The options for sbatch."""
        types = list(dict.fromkeys(_MAIL_TYPES[event] for event in self.events if event in _MAIL_TYPES))
        if self.mail is None or not types:
            return []
        return [("mail-user", self.mail), ("mail-type", ",".join(types))]


def mail_conflicts(values: Mapping[str, Any]) -> list[Conflict]:
    """Conflicts of ``notify`` with other sections of a job spec, which may not be validated yet."""
    notify, slurm, environment = (part_of(values, key) for key in ("notify", "slurm", "environment"))
    found = []
    if notify.get("mail") is not None:
        for key in ("mail_type", "mail_user"):
            if slurm.get(key) is not None:
                found.append(Conflict(f"slurm.{key}", "conflicts with notify.mail: set only one of them"))
    name = notify.get("webhook_env")
    if name is not None and str(name) not in [str(one) for one in environment.get("secrets") or []]:
        advice = f"{str(name)!r} is not passed to the job: list it in environment.secrets, too"
        found.append(Conflict("notify.webhook_env", advice))
    return found
