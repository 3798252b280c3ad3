"""A notice about a run or a sweep, and the JSON message that is sent to a chat or a program."""

from __future__ import annotations

import time as clock
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir

__all__ = ["END_EVENTS", "OUTBOX", "Notice", "evidence_bytes", "message_of"]

OUTBOX = "notices.jsonl"
"""File of a run or a sweep with the notices to send and their state: see ``node.notices.outbox``."""
END_EVENTS = ("end", "stop", "failure", "requeue")
"""Events of an attempt's end: at most one of them for each end."""
COLOURS = {"failure": "#d64545", "hang": "#d64545", "idle_gpus": "#d6a545", "stop": "#8a8a8a", "requeue": "#4576d6"}
GOOD, BAD = "#3a9d5d", "#d64545"
_PLAIN = ("run", "job", "attempt", "step", "reason", "decision", "host")
"""Values that a chat shows as fields, in this order."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An event of a run or a sweep, to be sent to its user. Fields are empty or None if unknown or not applicable."""

    key: str
    """Identifies the event inside its run."""
    event: str
    """``start``, ``requeue``, ``stop``, ``failure``, ``hang``, ``end``, ``idle_gpus``, or ``test``."""
    time: float
    """When it happened (seconds since the epoch)."""
    run: str
    """The run ID."""
    name: str
    text: str
    """One sentence for the user."""
    job: str = ""
    attempt: int | None = None
    step: int | None = None
    reason: str = ""
    decision: str = ""
    detail: str = ""
    advice: str = ""
    host: str = ""
    """Where the message was written."""
    nodes: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    """UUIDs of idle GPUs."""

    @property
    def id(self) -> str:
        """The same in each repetition, and unique for each event: a receiver can use it to drop repetitions."""
        return f"{self.run}/{self.key}"


def evidence_bytes(run: RunDir) -> int:
    """Size of the files from which notices are derived: the ledger of a run, or the accounts of a sweep's workers.

    Raises:
        OSError: a file cannot be examined.
    """
    if not isinstance(run, SweepDir):
        return run.ledger.stat().st_size
    accounts = [run.worker(index).account for index in run.worker_indices()]
    return sum(account.stat().st_size for account in accounts if account.exists())


def message_of(notice: Notice, *, repeated: bool = False) -> dict[str, Any]:
    """The message: ``text`` and ``attachments`` for incoming webhooks of Slack and Mattermost, and the notice's values
    beside them, for programs.

    Args:
        repeated: whether an earlier request with this notice may have reached the receiver.
    """
    values = {name: value for name, value in asdict(notice).items() if name not in ("key", "text", "gpus")}
    again = " (sent again, because it is unknown whether the first message arrived)" if repeated else ""
    fields = [
        {"title": name.capitalize(), "value": _shown(str(values[name])), "short": True}
        for name in _PLAIN
        if values[name] not in ("", None)
    ]
    body = "\n".join(part for part in (notice.detail, notice.advice and f"What to do: {notice.advice}") if part)
    summary = _shown(notice.text + again)
    attachment = {"fallback": summary, "color": _colour(notice), "text": _shown(body), "fields": fields}
    when = clock.strftime("%Y-%m-%dT%H:%M:%SZ", clock.gmtime(notice.time))
    extra = {"gpus": notice.gpus} if notice.gpus else {}
    return {
        "text": summary,
        "attachments": [attachment],
        "id": notice.id,
        **values,
        **extra,
        "time_utc": when,
        "repeated": repeated,
    }


def _colour(notice: Notice) -> str:
    if notice.event == "end":
        return BAD if notice.reason in ("failed", "lost") else GOOD
    return COLOURS.get(notice.event, GOOD)


def _shown(text: str) -> str:
    """``text`` for a chat: nothing in it is a link, a mention or a command there."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("@", "@\u200b")
