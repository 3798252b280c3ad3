"""The webhook's URL at submission: it must be usable, and its file is never copied into the run directory."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hpcaccel.core.webhook import find_url, webhook_file
from hpcaccel.errors import SpecError, UserError
from hpcaccel.submission.code.code_copy import CodePlan

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["check_webhook", "without_webhook"]


def check_webhook(spec: JobSpec) -> None:
    """Raises SpecError if the spec's notices go to a webhook whose URL cannot be read on this machine."""
    policy = spec.notify.policy()
    if not policy.sends:
        return
    try:
        find_url(policy)
    except UserError as error:
        raise SpecError([f"notify: {error}"]) from None


def without_webhook(plan: CodePlan, spec: JobSpec) -> CodePlan:
    """``plan`` without the file that holds the webhook's URL."""
    secret = webhook_file(spec.notify.policy()).resolve()
    kept = tuple(name for name in plan.files if (plan.root / name).resolve() != secret)
    return plan if kept == plan.files else dataclasses.replace(plan, files=kept)
