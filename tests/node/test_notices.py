"""Notices to a webhook: each event once, through killed processes and bad receivers, and the URL stays secret."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core import webhook
from hpcaccel.core.durable_files import append_line, read_json, read_lines, write_json
from hpcaccel.core.launch_spec import NoticePolicy, launch_of
from hpcaccel.core.notice_message import OUTBOX
from hpcaccel.core.records import AttemptEnd, AttemptStart, Hang, WorkerEnd, WorkerSeen, WorkerStart, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.samples import IdleGpu
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.node.notices import outbox as outbox_module
from hpcaccel.node.notices import run_events
from hpcaccel.node.notices import sender as sender_module
from hpcaccel.node.notices.outbox import Outbox
from hpcaccel.node.notices.overdue import send_overdue_notices
from hpcaccel.node.notices.run_events import RunEvents
from hpcaccel.node.notices.sender import Sender
from hpcaccel.node.notices.sweep_events import SweepEvents

from .conftest import LocalRun, outcome
from .sweeping import IN_TURN, Sweep
from .test_batch import eventually, kill, supervisor_of
from .test_supervisor import HEAD
from .webhook_server import SECRET, Receiver

Make = Callable[..., LocalRun]
ALL = ["start", "requeue", "stop", "failure", "hang", "end", "idle_gpus"]
DONE = HEAD + outcome(step=5, resume=False, reason="completed")
LAUNCH = {
    "kind": "program", "program": ["x"], "workdir": "/", "backend": "local", "nodes": 1, "ranks_per_node": 1,
    "stop": "signals",
}  # fmt: skip
RUNS_UNTIL_TOLD = """
import os, time
print("ready", flush=True)
while not os.path.exists(os.environ["HPCACCEL_RUN_DIR"] + "/go"):
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for name in (*names, *(name.upper() for name in names)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def receive() -> Iterator[Callable[..., Receiver]]:
    made: list[Receiver] = []

    def make(*answers: int | str) -> Receiver:
        made.append(Receiver(*answers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def secret_file(folder: Path, url: str, mode: int = 0o600) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "webhook"
    path.write_text(url + "\n")
    path.chmod(mode)
    return path


def with_webhook(run: LocalRun, url: str, **notify: Any) -> LocalRun:
    document = read_json(run.dir.spec)
    assert document is not None
    path = secret_file(run.dir.path.parent / f"secret-{run.dir.path.name}", url)
    document["spec"]["notify"] = {"events": ALL, "webhook_file": str(path), **notify}
    document["spec"]["name"] = "toy"
    write_json(run.dir.spec, document)
    return run


def states(run: RunDir) -> list[str]:
    return [f"{line['state']} {line['key']}" for line, _ in read_lines(run.path / OUTBOX) if "key" in line]


def made_run(path: Path, *lines: AttemptStart | AttemptEnd) -> RunDir:
    run = RunDir(path)
    run.create()
    write_json(run.spec, {"version": 1, "spec": {"name": "toy"}})
    for line in lines:
        append_line(run.ledger, to_dict(line))
    return run


def start(attempt: int, moment: float = 10.0) -> AttemptStart:
    return AttemptStart(attempt=attempt, time=moment, job_id="7", nodes=["n1"])


def end(attempt: int, reason: Any, decision: Any, moment: float = 20.0, **values: Any) -> AttemptEnd:
    return AttemptEnd(attempt=attempt, time=moment, job_id="7", reason=reason, decision=decision, **values)


def sender(run: RunDir, url: str, *, since: float = 0.0) -> Sender:
    path = secret_file(run.path.parent / "secret", url)
    policy = NoticePolicy(events=ALL, webhook_file=str(path))
    return Sender(policy, RunEvents(run, ALL), Outbox(run.path, since=since))


# -- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "chosen", "event"),
    [
        (end(1, "completed", "end"), ALL, "end"),
        (end(1, "failed", "end"), ALL, "end"),
        (end(1, "failed", "end"), ["failure"], "failure"),
        (end(1, "failed", "restart"), ALL, "failure"),
        (end(1, "failed", "requeue"), ALL, "failure"),
        (end(1, "failed", "requeue"), ["requeue"], "requeue"),
        (end(1, "preempted", "requeue"), ALL, "requeue"),
        (end(1, "preempted", "requeue"), ["end"], None),
        (end(1, "time_limit", "requeue"), ALL, "requeue"),
        (end(1, "stop", "pause"), ALL, "stop"),
        (end(1, "cancelled", "end"), ["stop"], "stop"),
        (end(1, "failed", "restart", error_class="hang"), ALL, None),
        (end(1, "failed", "restart", error_class="hang"), ["failure"], "failure"),
    ],
)
def test_end_of_an_attempt_is_one_event(tmp_path: Path, line: AttemptEnd, chosen: list[str], event: str | None) -> None:
    run = made_run(tmp_path / "run", line)
    assert [one.event for one in RunEvents(run, chosen).notices()] == ([] if event is None else [event])


def test_restart_in_the_same_job_is_told_by_its_failure_alone(tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run", start(1), end(1, "failed", "restart"), start(2, 21.0), end(2, "preempted", "requeue", 30.0)
    )
    append_line(run.ledger, to_dict(start(3, 40.0)))
    assert [one.key for one in RunEvents(run, ALL).notices()] == ["1.start", "1.failure", "2.requeue", "3.start"]


def test_hang_is_told_before_the_attempt_ends_and_after_all_of_it_was_killed(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", start(1))
    events = RunEvents(run, ALL)
    run.attempt(1).mkdir(parents=True)
    write_json(run.hang(1), to_dict(Hang(why="rank 1 is stopped", culprit_rank=1, node="n1", time=15.0)))
    assert [(one.event, one.detail) for one in events.notices()][1:] == [("hang", "rank 1 is stopped")]
    append_line(run.ledger, to_dict(end(1, "failed", "requeue", error_class="hang")))
    append_line(run.ledger, to_dict(start(2, 30.0)))
    assert [one.key for one in RunEvents(run, ALL).notices()] == ["1.start", "1.hang", "1.requeue", "2.start"]


def test_message_is_for_programs_and_safe_in_a_chat(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    line = end(
        2, "failed", "end", last_step=120, detail="<!channel> @all out of memory", advice="use less", error_class="oom"
    )
    run = made_run(tmp_path / "run", line)
    server = receive()
    sender(run, server.url).look(last=True)
    (message,) = server.got
    assert {key: message[key] for key in ("event", "run", "job", "attempt", "step", "reason", "advice", "name")} == {
        "event": "end", "run": "run", "job": "7", "attempt": 2, "step": 120, "reason": "failed", "advice": "use less",
        "name": "toy",
    }  # fmt: skip
    assert message["host"]
    assert message["id"] == server.keys[0] == "run/2.end"
    assert message["text"] == "toy failed: oom"
    (attachment,) = message["attachments"]
    assert "&lt;!channel&gt;" in attachment["text"]
    assert "@all" not in attachment["text"]
    assert {"title": "Step", "value": "120", "short": True} in attachment["fields"]


def idle(uuid: str) -> IdleGpu:
    return IdleGpu(node="n1", uuid=uuid, name="H100", seconds=720.0, since_step=40, ranks=[0])


def test_each_idle_gpu_is_named_once(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = made_run(tmp_path / "run", start(1)), receive()
    monkeypatch.setattr(sender_module, "IDLE_LOOK_SECONDS", 0.0)
    found = [[idle("a"), idle("b")], [idle("a"), idle("b")], [idle("b"), idle("c")], []]
    monkeypatch.setattr(run_events, "idle_now", lambda *_: found.pop(0))
    one = sender(run, server.url)
    for _ in range(4):
        one.look()
    assert [(message["event"], message.get("gpus")) for message in server.got] == [
        ("start", None), ("idle_gpus", ["a", "b"]), ("idle_gpus", ["c"]),
    ]  # fmt: skip
    assert server.got[1]["text"] == "toy leaves 2 GPUs idle"
    assert "H100 b of node n1: idle for 12 min, since step 40" in server.got[1]["detail"]


# -- sweeps -----------------------------------------------------------------------------------------------------------


def sweep_with(path: Path, *accounts: list[Any]) -> SweepDir:
    sweep = SweepDir(path)
    sweep.create()
    write_json(sweep.spec, {"version": 1, "spec": {"name": "toy"}})
    for index, lines in enumerate(accounts):
        sweep.worker(index).prepare()
        for line in lines:
            append_line(sweep.worker(index).account, to_dict(line))
    return sweep


def trial_end(number: int, reason: str, moment: float) -> WorkerSeen:
    return WorkerSeen(time=moment, trial=number, what="ended", reason=reason, decision="end", detail="no memory")


def told(sweep: SweepDir) -> list[str]:
    return [one.key for one in SweepEvents(sweep, ALL).notices()]


def test_sweep_summarises_failures_and_ends_with_its_last_worker(tmp_path: Path) -> None:
    failed = [trial_end(number, "failed", 20.0 + number) for number in range(5)]
    now = time.time()
    first = [WorkerStart(time=10.0, job_id="7_0"), *failed, WorkerEnd(time=now, reason="completed", decision="end")]
    second = [WorkerStart(time=11.0, job_id="7_1"), WorkerSeen(time=now)]
    sweep = sweep_with(tmp_path / "sweep", first, second)
    assert told(sweep) == ["start", "failures.1", "failures.2", "failures.4"]
    append_line(sweep.worker(1).account, to_dict(trial_end(7, "completed", now)))
    append_line(sweep.worker(1).account, to_dict(trial_end(8, "pruned", now)))
    append_line(sweep.worker(1).account, to_dict(WorkerEnd(time=now, reason="completed", decision="end")))
    *_, last = SweepEvents(sweep, ALL).notices()
    assert (last.event, last.key, last.reason) == ("end", "end.7", "completed")
    assert last.detail == "trials: 1 completed, 5 failed, 1 pruned"


def test_late_worker_without_trials_does_not_end_the_sweep_again(tmp_path: Path) -> None:
    worker = [WorkerStart(time=10.0, job_id="7_0"), WorkerEnd(time=20.0, reason="completed", decision="end")]
    late = [WorkerStart(time=30.0, job_id="7_1"), WorkerEnd(time=31.0, reason="completed", decision="end")]
    assert told(sweep_with(tmp_path / "one", worker)) == ["start", "end.0"]
    assert told(sweep_with(tmp_path / "two", worker, late)) == ["start", "end.0"]


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (WorkerEnd(time=20.0, reason="preempted", decision="requeue"), ["start"]),
        (WorkerEnd(time=20.0, reason="stop", decision="pause"), ["start", "end.0"]),
    ],
)
def test_requeued_worker_is_not_the_end(tmp_path: Path, line: WorkerEnd, keys: list[str]) -> None:
    assert told(sweep_with(tmp_path / "sweep", [WorkerStart(time=10.0, job_id="7_0"), line])) == keys


def test_sweep_tells_its_start_its_failures_and_its_end(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = receive()
    sweep = Sweep(tmp_path, "raise SystemExit(1)", IN_TURN.format(count=2), resilience={"restart_in_place": 0})
    path = secret_file(tmp_path / "secret", server.url)
    document = read_json(sweep.dir.spec) or {}
    document["spec"] |= {"name": "toy", "notify": {"events": ALL, "webhook_file": str(path)}}
    document["spec"]["resilience"]["max_failures"] = 1
    write_json(sweep.dir.spec, document)
    sweep.document["spec"]["resilience"]["max_failures"] = 1
    for number in range(2):
        sweep.trial(number)
    sweep.start()
    assert sweep.wait() == 0, sweep.worker.slurm_log.read_text()
    assert [message["event"] for message in server.got] == ["start", "failure", "failure", "end"]
    assert server.got[2]["text"] == "sweep toy: 2 trials failed"
    assert server.got[3]["detail"] == "trials: 2 failed"


# -- once -------------------------------------------------------------------------------------------------------------


def test_events_from_before_the_webhook_and_delivered_ones_are_not_sent(
    tmp_path: Path, receive: Callable[..., Receiver]
) -> None:
    run, server = made_run(tmp_path / "run", start(1), end(1, "preempted", "requeue"), start(2, 30.0)), receive()
    for _ in range(2):
        one = sender(run, server.url, since=15.0)
        one.look()
        one.look(last=True)
        assert one.done
        one._outbox.release()
    assert server.events == ["requeue:1", "start:2"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("point", "requests", "repeated"),
    [("intent", 1, False), ("trying", 1, True), ("post", 2, True), ("delivered", 1, False)],
)
def test_sender_killed_at_each_point(
    tmp_path: Path,
    receive: Callable[..., Receiver],
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    requests: int,
    repeated: bool,
) -> None:
    """After the lines ``intent`` and ``trying``, after the receiver's answer, and after the line ``delivered``."""
    run, server = made_run(tmp_path / "run", end(1, "completed", "end")), receive()
    with monkeypatch.context() as patch:
        if point == "post":
            patch.setattr(Outbox, "result", lambda *_, **__: (_ for _ in ()).throw(Killed))
        else:
            real = append_line

            def write_and_die(path: Path, line: dict[str, Any], *, sync: bool) -> None:
                real(path, line, sync=sync)
                if line["state"] == point:
                    raise Killed

            patch.setattr(outbox_module, "append_line", write_and_die)
        killed = sender(run, server.url)
        with pytest.raises(Killed):
            killed.look()
        assert killed._outbox._lock is not None
        os.close(killed._outbox._lock)  # as the kernel does
    for _ in range(2):
        later = sender(run, server.url)
        later.look(last=True)
        assert later.done
        later._outbox.release()
    assert server.events == ["end:1"] * requests
    assert set(server.keys) == {"run/1.end"}
    assert server.got[-1]["repeated"] is (repeated and point != "delivered")
    assert states(run)[-1] == "delivered 1.end"


def test_two_senders_send_once(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    run, server = made_run(tmp_path / "run", end(1, "completed", "end")), receive()
    first, second = sender(run, server.url), sender(run, server.url)
    first.look()
    second.look(last=True)
    assert server.events == ["end:1"]
    assert not second.done


# -- bad receivers ----------------------------------------------------------------------------------------------------


def test_receiver_that_fails_gets_the_notice_again_after_a_pause(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = made_run(tmp_path / "run", end(1, "completed", "end")), receive(500, 429, 200)
    one = sender(run, server.url)
    one.look()
    one.look()
    assert states(run) == ["intent 1.end", "trying 1.end", "failed 1.end"]
    monkeypatch.setattr(sender_module, "PAUSES_SECONDS", (0.0,))
    one._again = 0.0
    one.look()
    one.look()
    assert states(run)[3:] == ["trying 1.end", "failed 1.end", "trying 1.end", "delivered 1.end"]
    assert [message["repeated"] for message in server.got] == [False, False, False]


@pytest.mark.parametrize("answer", [404, 400, "elsewhere"])
def test_final_refusal_is_not_repeated_and_does_not_hold_up_others(
    tmp_path: Path, receive: Callable[..., Receiver], answer: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    other = receive()
    server = receive(other.url if answer == "elsewhere" else answer, 200)
    run = made_run(tmp_path / "run", start(1), end(1, "completed", "end"))
    one = sender(run, server.url)
    one.look()
    one.look(last=True)
    assert states(run)[2:] == ["trying 1.start", "given_up 1.start", "trying 1.end", "delivered 1.end"]
    assert server.events == ["start:1", "end:1"]
    assert other.got == []
    assert "was not delivered" in caplog.text
    assert_secret_is_absent(run, caplog.text)


def test_redirect_on_the_same_host_keeps_the_message(tmp_path: Path, receive: Callable[..., Receiver]) -> None:
    run, server = made_run(tmp_path / "run", end(1, "completed", "end")), receive("/moved", 200)
    sender(run, server.url).look()
    assert [message["path"] for message in server.got] == [SECRET, "/moved"]
    assert states(run)[-1] == "delivered 1.end"


def test_answer_that_never_ends_is_cut(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webhook, "TOTAL_SECONDS", 1.0)
    run, server = made_run(tmp_path / "run", end(1, "completed", "end")), receive("drip")
    sender(run, server.url).look()
    assert states(run)[-1] == "failed 1.end"
    assert "no complete answer within 1 s" in caplog.text


def test_proxy_of_the_environment_is_used(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, proxy = made_run(tmp_path / "run", end(1, "completed", "end")), receive()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server.server_port}")
    monkeypatch.setenv("no_proxy", "other.example")
    sender(run, f"http://chat.invalid{SECRET}").look()
    assert [message["path"] for message in proxy.got] == [f"http://chat.invalid{SECRET}"]
    assert states(run)[-1] == "delivered 1.end"


def test_refused_connection_is_tried_again_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, closed = made_run(tmp_path / "run", end(1, "completed", "end")), Receiver()
    closed.close()
    sender(run, closed.url).look()
    assert states(run)[-1] == "failed 1.end"
    assert "Connection refused (try 1 of 8)" in caplog.text


def test_notice_is_given_up_after_some_requests(
    tmp_path: Path, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "PAUSES_SECONDS", (0.0,))
    run, server = made_run(tmp_path / "run", end(1, "completed", "end")), receive(503)
    one = sender(run, server.url)
    for _ in range(20):
        one.look()
    assert len(server.got) == outbox_module.MOST_TRIES
    assert states(run)[-1] == "given_up 1.end"


def assert_secret_is_absent(run: RunDir, *texts: str) -> None:
    for path in run.path.rglob("*"):
        if path.is_file():
            texts = (*texts, path.read_text(errors="replace"))
    for text in texts:
        assert "verySecretToken" not in text
        assert "T00SECRET00" not in text


@pytest.mark.parametrize(
    ("mode", "url", "message"),
    [
        (0o640, "https://h/x", "has mode 640, so that others may read"),
        (0o600, "", "is empty"),
        (0o600, "verySecretToken", "holds no URL"),
        (0o600, "https://h/very SecretToken", "holds no URL"),
        (0o600, "file:///verySecretToken", "holds no URL"),
    ],
)
def test_unusable_file_is_named_without_its_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, url: str, message: str
) -> None:
    run = made_run(tmp_path / "run", end(1, "completed", "end"))
    one = sender(run, url)
    (tmp_path / "secret" / "webhook").chmod(mode)
    one.look(last=True)
    assert message in caplog.text
    assert "SecretToken" not in caplog.text
    assert states(run) == ["intent 1.end"]


def overdue(run: RunDir, server: Receiver, state: str) -> None:
    path = secret_file(run.path.parent / "secret", server.url)
    notify = {"events": ALL, "webhook_file": str(path)}
    write_json(run.spec, {"version": 1, "spec": {"name": "toy", "notify": notify}, "launch": LAUNCH})
    send_overdue_notices(run, state=state, detail="the batch step ended without writing an outcome")


@pytest.mark.parametrize(
    ("lines", "state", "told", "reason"),
    [
        ([start(1), end(1, "completed", "end")], "completed", "end:1", "completed"),  # its message was not sent
        ([start(1)], "cancelled", "end:1", "cancelled"),  # killed before it could write a line
        ([start(1), end(1, "preempted", "requeue"), start(2)], "lost", "end:2", "lost"),
    ],
)
def test_notices_of_a_killed_batch_step_are_sent_by_who_looks_next_and_once(
    tmp_path: Path, receive: Callable[..., Receiver], lines: list[Any], state: str, told: str, reason: str
) -> None:
    run, server = made_run(tmp_path / "run", *lines[:-1] if state == "completed" else lines), receive()
    first = sender(run, server.url)
    first.look()
    first._outbox.release()
    before = len(server.events)
    if state == "completed":
        append_line(run.ledger, to_dict(lines[-1]))
    for _ in range(2):
        overdue(run, server, state)
    assert server.events[before:] == [told]
    assert server.got[-1]["reason"] == reason
    assert [line["state"] for line, _ in read_lines(run.path / OUTBOX)][-1] == "settled"
    if state != "completed":  # the next batch step writes the missing line: the same end
        attempt = int(told[-1])
        append_line(run.ledger, to_dict(end(attempt, "lost", "requeue")))
        append_line(run.ledger, to_dict(start(attempt + 1, time.time())))
        sender(run, server.url).look(last=True)
        assert server.events[before:] == [told, f"start:{attempt + 1}"]


def test_overdue_notice_that_is_not_taken_is_tried_again_by_the_next_one(
    tmp_path: Path, receive: Callable[..., Receiver]
) -> None:
    run, server = made_run(tmp_path / "run", start(1)), receive(200, 503, 200)
    first = sender(run, server.url)
    first.look()
    first._outbox.release()
    overdue(run, server, "lost")
    assert states(run)[-1] == "failed 1.end"
    overdue(run, server, "lost")
    assert states(run)[-1] == "delivered 1.end"


def test_end_of_a_sweep_whose_workers_were_killed_is_sent_by_who_looks_next_and_once(
    tmp_path: Path, receive: Callable[..., Receiver]
) -> None:
    server = receive()
    killed = [WorkerStart(time=time.time() - 60, job_id="7_0"), trial_end(0, "completed", time.time() - 30)]
    sweep = sweep_with(tmp_path / "toy" / "sweep", killed)
    path = secret_file(tmp_path / "secret", server.url)
    notify = {"events": ["end"], "webhook_file": str(path)}
    write_json(sweep.spec, {"version": 1, "spec": {"name": "toy", "notify": notify}, "launch": LAUNCH})
    append_line(sweep.path / OUTBOX, {"state": "opened", "since": 1.0})
    for _ in range(2):
        send_overdue_notices(RunDir(sweep.path), state="cancelled", detail="cancelled by scancel")
    assert server.events == ["end:None"]
    assert server.got[0]["reason"] == "cancelled"
    assert server.got[0]["detail"] == "trials: 1 completed; cancelled by scancel"
    assert states(sweep)[-1] == "delivered end.1"


# -- the batch step ---------------------------------------------------------------------------------------------------


def test_run_tells_start_failure_and_end_although_its_supervisor_is_killed(
    local_run: Make, receive: Callable[..., Receiver]
) -> None:
    server = receive()
    run = with_webhook(local_run(RUNS_UNTIL_TOLD + DONE), server.url)
    run.start()
    run.wait_for("ready")
    eventually(lambda: server.events == ["start:1"], "the start is told")
    assert run.process is not None
    commands = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout
    kill(supervisor_of(run.dir))
    (run.dir.path / "go").touch()
    assert run.wait() == 0, run.log
    assert server.events == ["start:1", "failure:1", "end:2"]
    assert server.got[1]["reason"] == "lost"
    assert len(set(server.keys)) == 3
    assert_secret_is_absent(run.dir, commands)
    assert f"notices {run.dir.path}" in commands


def sender_of(run: LocalRun) -> int:
    assert run.process is not None
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == run.process.pid and b"notices" in words:
            return int(folder.name)
    return 0


def runs_another_sender(run: LocalRun, stopped: int) -> bool:
    return sender_of(run) not in (0, stopped)


def test_killed_sender_is_started_again(local_run: Make, receive: Callable[..., Receiver]) -> None:
    server = receive()
    run = with_webhook(local_run(RUNS_UNTIL_TOLD + DONE), server.url)
    run.start()
    eventually(lambda: server.events == ["start:1"], "the start is told")
    eventually(lambda: states(run.dir)[-1:] == ["delivered 1.start"], "and recorded")
    for _ in range(2):
        eventually(lambda: sender_of(run), "a sender")
        old = sender_of(run)
        kill(old)
        eventually(partial(runs_another_sender, run, old), "another sender")
    (run.dir.path / "go").touch()
    assert run.wait() == 0, run.log
    assert server.events == ["start:1", "end:1"]


def test_sender_killed_during_a_request_repeats_it_under_its_id(
    local_run: Make, receive: Callable[..., Receiver]
) -> None:
    server = receive("hang", 200)
    run = with_webhook(local_run(RUNS_UNTIL_TOLD + DONE), server.url)
    run.start()
    eventually(lambda: server.got, "a request")
    kill(sender_of(run))
    eventually(lambda: states(run.dir)[-1:] == ["delivered 1.start"], "another sender repeats it")
    (run.dir.path / "go").touch()
    assert run.wait() == 0, run.log
    assert [(message["event"], message["repeated"]) for message in server.got] == [
        ("start", False), ("start", True), ("end", False),
    ]  # fmt: skip
    assert server.keys[0] == server.keys[1] != server.keys[2]


def test_requeued_run_does_not_repeat_earlier_notices(local_run: Make, receive: Callable[..., Receiver]) -> None:
    stops_once = RUNS_UNTIL_TOLD + "if os.environ['HPCACCEL_ATTEMPT'] == '1':\n    raise SystemExit(1)\n" + DONE
    server = receive()
    run = with_webhook(local_run(stops_once, restart_in_place=0), server.url)
    (run.dir.path / "go").touch()
    run.start()
    assert run.wait() == 0, run.log
    assert server.events == ["start:1", "failure:1", "start:2", "end:2"]


def test_hanging_receiver_delays_the_end_by_a_limited_time_only(
    local_run: Make, receive: Callable[..., Receiver]
) -> None:
    server = receive("hang")
    run = with_webhook(local_run(DONE), server.url)
    run.start()
    assert run.wait(120) == 0, run.log  # the receiver waits for 120 s, too, and is not released before
    assert run.ends == [("completed", "end")]
    assert not server.released.is_set()
    assert_secret_is_absent(run.dir)


def test_run_without_a_webhook_starts_no_sender(local_run: Make) -> None:
    run = local_run(DONE)
    run.start()
    assert run.wait() == 0, run.log
    assert not (run.dir.path / OUTBOX).exists()


def test_url_from_a_variable(
    local_run: Make, receive: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = receive()
    monkeypatch.setenv("TEAM_WEBHOOK", server.url)
    run = with_webhook(local_run(DONE), "", webhook_file=None, webhook_env="TEAM_WEBHOOK")
    run.start()
    assert run.wait() == 0, run.log
    assert server.events == ["start:1", "end:1"]
    assert_secret_is_absent(run.dir)


def test_failed_setup_line_is_told(local_run: Make, receive: Callable[..., Receiver]) -> None:
    server = receive()
    run = with_webhook(local_run(DONE), server.url)
    command = [
        sys.executable,
        str(run.dir.node_program),
        "setup-failed",
        str(run.dir.path),
        "3",
        "environment.setup: x",
    ]
    subprocess.run(command, env={**os.environ, "HPCACCEL_LOCAL_JOB": "local-00000001"}, check=False, timeout=120)
    assert server.events == ["start:1", "end:1"]
    assert "environment.setup: x failed with exit code 3" in server.got[1]["detail"]


def test_spec_of_an_earlier_release_has_no_notices() -> None:
    assert not launch_of({"spec": {}, "launch": LAUNCH}, source=Path("spec.json")).notify.sends
