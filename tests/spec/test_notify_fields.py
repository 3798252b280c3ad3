"""The section ``notify``: mail through Slurm, and where a webhook's URL is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec import from_json, load_profile, load_spec, spec_from_values, to_json


def with_notify(**section: Any) -> dict[str, Any]:
    return {"name": "gpt", "entrypoint": {"command": ["train"]}, "notify": section}


@pytest.mark.parametrize(
    ("events", "types"),
    [
        (None, "BEGIN,REQUEUE,END,FAIL"),
        (["hang", "end", "stop"], "END"),
        (["failure", "idle_gpus"], "FAIL"),
    ],
)
def test_mail_is_sent_by_slurm(events: list[str] | None, types: str) -> None:
    chosen = {} if events is None else {"events": events}
    spec = spec_from_values(with_notify(mail="me@example.org", **chosen))
    assert spec.notify.mail_options() == [("mail-user", "me@example.org"), ("mail-type", types)]


def test_nothing_is_told_by_default() -> None:
    spec = spec_from_values(with_notify())
    assert spec.notify.mail_options() == []
    assert not spec.notify.policy().sends


@pytest.mark.parametrize(
    ("section", "sends"),
    [
        ({"webhook": True}, True),
        ({"webhook_file": "/home/me/hook"}, True),
        ({"webhook_file": "/home/me/hook", "webhook": False}, False),
        ({"webhook": True, "events": []}, False),
    ],
)
def test_webhook_is_used_if_its_place_is_named(section: dict[str, Any], sends: bool) -> None:
    spec = spec_from_values(with_notify(**section))
    assert spec.notify.policy().sends is sends
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (with_notify(mail="me", events=["hang"]), "notify.mail has no effect: Slurm sends no mail"),
        ({**with_notify(mail="me"), "slurm": {"mail_type": "END"}}, "slurm.mail_type conflicts with notify.mail"),
        (with_notify(webhook_env="TEAM"), "notify.webhook_env 'TEAM' is not passed to the job"),
        (with_notify(webhook_file="https://h/x"), "notify.webhook_file must not be the URL itself"),
        (with_notify(events=["starts"]), "notify.events"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_values(values)
    assert message in str(caught.value)


def test_profile_has_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCACCEL_PROFILES", str(tmp_path))
    (tmp_path / "alps.yaml").write_text("name: alps\nnotify: {webhook: true, events: [failure, end]}\n")
    (tmp_path / "job.yaml").write_text("name: gpt\nentrypoint: {command: [train]}\nnotify: {events: [end]}\n")
    policy = load_spec(tmp_path / "job.yaml", profile=load_profile("alps")).notify.policy()
    assert policy.sends
    assert policy.events == ["end"]
