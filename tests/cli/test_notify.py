"""`hpcaccel notify --test`: a message arrives, or an error says what to do, and the URL is never printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.node.test_batch import eventually
from tests.node.webhook_server import Receiver

SPEC = "name: toy\nentrypoint: {command: [sleep, '1']}\n"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "config" / "hpcaccel" / "webhook"
    path.parent.mkdir(parents=True)
    return path


def store(path: Path, url: str, mode: int = 0o600) -> None:
    path.write_text(url + "\n")
    path.chmod(mode)


def test_message_arrives(shell: Shell, stored: Path, receiver: Receiver, tmp_path: Path) -> None:
    store(stored, receiver.url)
    (tmp_path / "job.yaml").write_text(SPEC + "notify: {webhook: true, mail: me@example.org, events: [end, hang]}\n")
    answer = shell("notify", "--test", "--spec", str(tmp_path / "job.yaml"), "--cluster", "local")
    assert answer.returncode == 0, answer.stderr
    assert "delivered: HTTP 200 (ok)" in answer.stdout
    assert "mail: Slurm sends it to me@example.org (END)" in answer.stdout
    assert "verySecretToken" not in answer.stdout
    assert [(one["event"], one["run"]) for one in receiver.got] == [("test", "test")]


@pytest.mark.parametrize(
    ("answers", "said"), [(404, "HTTP 404"), (500, "HTTP 500"), ("http://elsewhere/x", "HTTP 307")]
)
def test_refusal_says_what_to_do(shell: Shell, stored: Path, receiver: Receiver, answers: int | str, said: str) -> None:
    receiver.answers = [answers]
    store(stored, receiver.url)
    answer = shell("notify", "--test", "--cluster", "local")
    assert answer.returncode == 1
    assert said in answer.stderr
    assert "runs send nothing to this webhook yet" in answer.stdout
    assert "SecretToken" not in answer.stdout + answer.stderr


def test_missing_and_readable_files(shell: Shell, stored: Path, receiver: Receiver) -> None:
    answer = shell("notify", "--test", "--cluster", "local")
    assert answer.returncode == 2
    assert f"write the webhook's URL into {stored} with mode 600" in answer.stderr
    store(stored, receiver.url, 0o644)
    answer = shell("notify", "--test", "--cluster", "local")
    assert answer.returncode == 2
    assert f"run chmod 600 {stored}" in answer.stderr
    assert receiver.got == []


def test_url_in_a_spec_is_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC + "notify: {webhook_file: 'https://h/services/verySecretToken'}\n")
    answer = shell("validate", str(tmp_path / "job.yaml"), "--cluster", "local")
    assert answer.returncode == 2
    assert "must not be the URL itself" in answer.stderr


def test_submission_needs_a_usable_url_and_does_not_copy_its_file(
    shell: Shell, stored: Path, receiver: Receiver
) -> None:
    secret = shell.write("webhook", receiver.url)
    shell.write("train.py", "print('hello')\n")
    spec = "name: toy\nentrypoint: {script: train.py}\nruntime: {stop: signals}\nnotify: {webhook_file: webhook}\n"
    shell.write("job.yaml", spec)
    secret.chmod(0o644)
    answer = shell("submit", "job.yaml", "--cluster", "local")
    assert answer.returncode == 2
    assert f"notify: {secret} has mode 644, so that others may read" in answer.stderr
    secret.chmod(0o600)
    answer = shell("submit", "job.yaml", "--cluster", "local", "--wait")
    assert answer.returncode == 0, answer.stderr
    eventually(lambda: len(receiver.events) == 2, "the batch step tells the end after the run's end")
    assert receiver.events == ["start:1", "end:1"]
    files = [path for path in (shell.folder / "runs").rglob("*") if path.is_file()]
    assert any(path.name == "train.py" for path in files)
    assert [path for path in files if b"verySecretToken" in path.read_bytes()] == []
