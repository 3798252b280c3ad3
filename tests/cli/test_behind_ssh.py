"""Every command for a cluster behind SSH: each option takes effect on the login node or here, or is refused.

The connection is faked, and the tests check what would be sent. tests/remote uses a real sshd.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from hpcaccel.cli.main import program
from hpcaccel.core.durable_files import write_json
from hpcaccel.core.records import RunRecord, to_dict
from hpcaccel.spec.loading import workflow
from hpcaccel.submission.remote import pulling, remote_index
from hpcaccel.submission.remote.remote_cluster import RemoteCluster, RemoteRequest

GOES = {
    "plan", "render", "validate --live", "submit", "logs", "pull", "shell", "status", "list", "wait", "explain",
    "clean", "report", "plot", "stop", "save", "profile", "resume", "cancel", "stacks", "sweep start", "sweep status",
    "sweep table", "sweep best", "sweep plot", "sweep export", "sweep stop", "sweep resume", "sweep retry-failed",
    "sweep extend", "sweep throttle", "checkpoint list", "checkpoint show", "checkpoint verify", "checkpoint pin",
    "checkpoint unpin", "test",
}  # fmt: skip
"""Commands that run on the login node."""
REFUSED = {"run", "top", "checkpoint convert"}
STAYS = {
    "answer", "config default", "config show", "config to-spec", "config update", "docs", "env", "estimate-memory",
    "init", "launch", "mcp", "notify",
    "schema", "serve", "validate",
}  # fmt: skip
"""Commands that need only what is stored here. ``cluster …`` connects to the login node in its own way."""

ARGUMENTS = {
    "file": "job.yaml", "run": "alps:toy", "runs": "alps:toy", "sweep": "alps:toy", "checkpoint": "alps:toy",
    "place": "alps:toy", "places": "alps:toy@10", "source": "alps:toy", "target": "out", "most": "3",
}  # fmt: skip
OPTIONS = {"--top": "3", "--to": "torch"}
"""Required options."""
FACTS = """\
{version: 1, name: alps, probed_at: 1700000000, slurm_version: 23.11.4,
 partitions: [{name: gpu, default: true, max_time_minutes: 60, nodes: 4}]}
"""
RUN = {"run_id": "20261121-100000-abcd", "name": "toy", "job_id": "7", "path": "/there/toy"}


class Played:
    """Fake login node: the frames that it sends, and the requests that it got."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.asks_for: list[str] = []
        """Names of variables of this machine that the login node requests."""
        self.given: list[dict[str, str]] = []

    def converse(self, _: RemoteCluster, request: dict[str, Any], talk: Any) -> Any:
        self.requests.append(json.loads(json.dumps(request)))
        frames: list[tuple[dict[str, Any], bytes]] = [({"frame": "exit", "code": 0}, b"")]
        if request["do"] == "receive":
            frames.insert(0, ({"frame": "have", "complete": True, "path": "/there/code"}, b""))
        if request["do"] == "environment":
            values = {name: f"/there/{name.lower()}" for name in request["names"]}
            frames.insert(0, ({"frame": "environment", "values": values}, b""))
        if request["do"] == "file":
            frames.insert(0, ({"frame": "file"}, b"drawn"))
        if request["do"] == "look":
            jobs = [{"estimated_start": 5.0}] * len(request["document"].get("jobs", ["one"]))
            said = {"valid": True, **jobs[0], **({"jobs": jobs} if len(jobs) > 1 else {})}
            frames.insert(0, ({"frame": "out"}, json.dumps(said).encode()))
        if self.asks_for and request["do"] == "command":
            frames.insert(0, ({"frame": "secrets", "names": self.asks_for}, b""))
        if request["do"] == "submit":
            several = request["document"].get("jobs")
            made = (
                {"run": RUN}
                if several is None
                else {"runs": [{**RUN, "run_id": f"{RUN['run_id']}-{name}", "name": name} for name in several]}
            )
            frames[0] = ({"frame": "exit", "code": 0, **made}, b"")
        return talk(_Conversation(iter(frames), self.given))

    def terminal(self, *args: str) -> int:
        self.requests.append({"terminal": args})
        return 0


class _Conversation(RemoteRequest):
    def __init__(self, frames: Iterator[tuple[dict[str, Any], bytes]], given: list[dict[str, str]]) -> None:
        self._frames = frames
        self._given = given

    def send(self, data: bytes) -> None:
        self._given.append(json.loads(data))

    def frame(self) -> tuple[dict[str, Any], bytes]:
        return next(self._frames)

    def expect(self, _: str) -> tuple[dict[str, Any], bytes]:
        return next(self._frames)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    """A laptop with a profile of a cluster behind SSH, and a project."""
    played = Played()
    for name, folder in (("HOME", ""), ("XDG_CONFIG_HOME", "config"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("HPCACCEL_RUNS_DIR", "HPCACCEL_PROFILES", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "config" / "hpcaccel" / "clusters"
    (place / "alps.facts").mkdir(parents=True)
    (place / "alps.facts" / "facts.yaml").write_text(FACTS)
    (place / "alps.yaml").write_text("host: me@alps\nruns_dir: ~/runs\nenvironment: {venv: '${env:SCRATCH}/venv'}\n")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import hpcaccel\n")
    job = "name: toy\nentrypoint: {script: train.py}\nslurm: {time: '10:00'}\n"
    (project / "job.yaml").write_text(job)
    sweep = "sweep: {metric: loss, parameters: {args.lr: {float: [0.1, 0.5]}}, max_trials: 4}\n"
    (project / "sweep.yaml").write_text(job + sweep)
    monkeypatch.chdir(project)
    monkeypatch.setattr(RemoteCluster, "converse", lambda *args: played.converse(*args))
    monkeypatch.setattr(RemoteCluster, "terminal", lambda _, *args: played.terminal(*args))
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": staticmethod(lambda: True)}))

    def fetch(_: RemoteCluster, run: str, target: Path | None, **options: Any) -> pulling.Pulled:
        played.requests.append({"pull": run, "target": str(target), **{key: str(one) for key, one in options.items()}})
        return pulling.Pulled(path=Path("here"), files=1, bytes=1, unchanged=0, checkpoint=None)

    monkeypatch.setattr(pulling, "pull", fetch)
    return played


@pytest.fixture
def effect(there: Played, capfdbinary: Any) -> Any:
    """Call the program: ``(requests sent, stdout, exit code), stderr``."""

    def call(*args: str) -> tuple[Any, bytes]:
        there.requests.clear()
        with pytest.raises(SystemExit) as ended:
            program()(args=args, prog_name="hpcaccel")
        sent = []
        for request in there.requests:
            key = request.get("key")
            made = {"id": "", "key": "made" if re.fullmatch("[0-9a-f]{32}", key or "") else key}
            sent.append({**request, **made})
        out, err = capfdbinary.readouterr()
        return (sent, out, ended.value.code), err

    return call


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, one in command.commands.items():
            yield from leaves(one, (*words, name))
    else:
        yield " ".join(words), command


COMMANDS = dict(leaves(typer.main.get_command(program())))


def call_of(name: str) -> list[str]:
    """Shortest valid call of a command, for something on the cluster."""
    command = COMMANDS[name.removesuffix(" --live")]
    words, options = [], []
    for param in command.params:
        if param.param_type_name == "argument" and param.name in ARGUMENTS:
            words.append("sweep.yaml" if name == "sweep start" else ARGUMENTS[param.name])
        elif param.param_type_name == "option" and param.required:
            option = max(param.opts, key=len)
            options += [option, OPTIONS[option]]
        elif param.name == "cluster" and not any(one.name == "runs" for one in command.params):
            options += ["--cluster", "alps"]
    return [*name.split(), *words, *options]


def samples(param: Any) -> list[list[str]]:
    """The option with sample values, one of which has the right type."""
    option = max(param.opts, key=len)
    return [[option]] if param.is_flag else [[option, value] for value in ("args.x=1,2", "3")]


def options(name: str) -> list[Any]:
    params = [one for one in COMMANDS[name.removesuffix(" --live")].params if one.param_type_name == "option"]
    return [one for one in params if not one.required and one.name not in ("cluster", "help", "live")]


def test_every_command_is_listed_as_remote_refused_or_local() -> None:
    known = {name.removesuffix(" --live") for name in GOES} | REFUSED | STAYS
    assert {name for name in COMMANDS if not name.startswith("cluster ")} == known


@pytest.mark.parametrize("name", sorted(GOES))
def test_remote_command_is_sent_and_each_option_has_an_effect(effect: Any, name: str) -> None:
    without, err = effect(*call_of(name))
    assert without[2] == 0, err
    assert without[0], "something was asked of the cluster"
    assert "alps:" not in json.dumps(without[0]), "a run has its own name there"
    for param in options(name):
        for words in samples(param):
            there, err = effect(*call_of(name), *words)
            if not err.startswith(b"Usage:"):
                break
        if there[2] == 2:
            assert words[0].encode() in err, "refused, and the option is named"
        else:
            assert there[2] == 0, (words, err)
            assert there != without, f"{words[0]} has an effect on what is sent, or on what is told"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_command_without_remote_support_is_refused_with_an_alternative(effect: Any, name: str) -> None:
    (sent, out, code), err = effect(*call_of(name))
    assert (sent, out, code) == ([], b"", 2)
    assert b"ssh me@alps" in err


def test_variables_of_the_spec_have_the_values_of_the_login_node(
    effect: Any, there: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/laptop")
    job = Path("job.yaml").read_text()
    Path("job.yaml").write_text(job.replace("train.py", "train.py, args: {data: '${env:SCRATCH}/data', out: ~/out}"))
    (sent, _, code), err = effect("submit", "job.yaml", "workdir=~/work", "args.x=$${env:SCRATCH}", "--cluster", "alps")
    assert code == 0, err
    document = sent[-1]["document"]
    assert document["entrypoint"]["args"] == {"data": "/there/scratch/data", "out": "~/out", "x": "$${env:SCRATCH}"}
    assert (document["workdir"], document["entrypoint"]["script"]) == ("~/work", "./train.py")
    assert document["environment"]["venv"] == "${env:SCRATCH}/venv", "the profile's own are expanded there"
    (sent, _, code), err = effect("submit", "job.yaml", "workdir=work", "--cluster", "alps")
    assert (sent[-1]["do"], code) == ("environment", 2)
    assert b"workdir 'work' is relative to this file, but the job runs on alps" in err


def test_stored_facts_are_sent_along_and_checked_before_connecting(effect: Any) -> None:
    (sent, _, _), _ = effect("submit", "job.yaml", "--cluster", "alps")
    assert (sent[-1]["do"], sent[-1]["facts"]) == ("submit", FACTS)
    (sent, _, code), err = effect("submit", "job.yaml", "slurm.time=90", "--cluster", "alps")
    assert (sent, code) == ([], 2)
    assert b"slurm.time 01:30:00 is longer than partition 'gpu'" in err
    assert err.count(b"hint: if cluster 'alps' has changed since it was probed") == 1
    assert b"or ignore its stored facts with --no-facts" in err
    (_, _, code), err = effect("sweep", "start", "sweep.yaml", "slurm.time=90", "--cluster", "alps")
    assert (code, b"hint: if cluster 'alps'" in err, b"--no-facts" in err) == (2, True, False)
    (sent, _, code), _ = effect("submit", "job.yaml", "slurm.time=90", "--no-facts", "--cluster", "alps")
    assert (sent[-1]["facts"], sent[-1]["options"], code) == (None, ["--no-facts"], 0)
    (sent, _, _), _ = effect("plan", "job.yaml", "--nodes", "1,2", "--cluster", "alps")
    assert (sent[-1]["facts"], sent[-1]["command"]) == (FACTS, ["plan", "--nodes=1,2"])


def test_paths_of_a_spec_from_a_pipe_are_relative_to_current_directory(
    effect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = Path("job.yaml").read_text().replace("train.py", "train.py, args: {data: '${env:SCRATCH}/data'}")
    writer = threading.Thread(target=pipe.write_text, args=(text,), daemon=True)
    writer.start()
    (sent, _, code), err = effect("submit", str(pipe), "--cluster", "alps")
    writer.join()
    assert code == 0, err
    entrypoint = sent[-1]["document"]["entrypoint"]
    assert (entrypoint["script"], entrypoint["args"]) == ("./train.py", {"data": "/there/scratch/data"})


def test_remote_sweep_is_found_despite_a_local_run_of_the_same_name(effect: Any, tmp_path: Path) -> None:
    remote_index.remember("alps", {**RUN, "kind": "sweep"})
    place = tmp_path / "project" / "runs" / "toy" / "20301121-100000-abcd"
    place.mkdir(parents=True)
    record = RunRecord(run_id=place.name, name="toy", backend="local", cluster="local", created=1.0)
    write_json(place / "record.json", to_dict(record))
    (sent, _, code), err = effect("sweep", "status", "toy")
    assert (code, sent[-1]["args"]) == (0, ["sweep", "status", RUN["run_id"]]), err


def test_arguments_on_different_machines_are_refused(effect: Any) -> None:
    (sent, _, code), err = effect("clean", "alps:toy", "other")
    assert (sent, code) == ([], 2)
    assert b"on different machines (alps:toy on alps, other on this machine)" in err
    (sent, _, code), err = effect("checkpoint", "verify", "alps:toy@10", "./x/step_1")
    assert (sent, code) == ([], 2)


JOBS = """\
slurm: {partition: gpu, time: '10:00'}
jobs:
  train: {entrypoint: {script: train.py}, after: [prepare]}
  prepare: {entrypoint: {command: [echo, hello]}, slurm: {partition: gpu}}
"""


def test_file_with_several_jobs_is_sent_as_one_request(effect: Any, there: Played) -> None:
    Path("jobs.yaml").write_text(JOBS)
    (sent, _, code), err = effect(
        "submit", "jobs.yaml", "train.slurm.nodes=2", "--after", "alps:old", "--cluster", "alps"
    )
    assert code == 0, err
    request = sent[-1]
    jobs = request["document"]["jobs"]
    assert (request["kind"], list(jobs), request["options"]) == ("jobs", ["prepare", "train"], ["--after=old"])
    assert (jobs["train"]["entrypoint"]["script"], jobs["train"]["slurm"]["nodes"]) == ("./train.py", "2")
    (sent, _, code), _ = effect("stop", "prepare")
    assert sent[-1]["args"] == ["stop", f"{RUN['run_id']}-prepare"], "both are remembered"
    (sent, _, code), err = effect("submit", "jobs.yaml", "train.slurm.time=90", "--cluster", "alps")
    assert (sent, code, b"slurm.time 01:30:00 is longer" in err) == ([], 2, True)
    (sent, _, code), err = effect("submit", "jobs.yaml", "--wait", "--grid", "args.x=1,2", "--cluster", "alps")
    assert (sent, code, b"not supported for a file with several jobs (jobs.yaml has 2): --grid, --wait" in err) == (
        [],
        2,
        True,
    )
    (sent, _, code), err = effect("plan", "jobs.yaml", "--cluster", "alps")
    assert (code, list(sent[-1]["document"]["jobs"])) == (0, ["prepare", "train"])


@pytest.mark.parametrize("words", [["submit"], ["plan"], ["render"], ["validate"], ["validate", "--live"]])
def test_a_file_with_several_jobs_is_read_once(effect: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    Path("jobs.yaml").write_text(JOBS)
    read, readings = workflow.read_document, list[str]()  # type: ignore[attr-defined]
    monkeypatch.setattr(workflow, "read_document", lambda path, shown: readings.append(shown) or read(path, shown))
    (_, _, code), err = effect(*words, "jobs.yaml", "--cluster", "alps")
    assert (code, readings) == (0, ["jobs.yaml"]), err
    if words in (["validate"], ["render"]):
        effect(*words, "jobs.yaml", "--cluster", "local")
        assert readings == ["jobs.yaml"] * 2


def test_run_may_have_the_name_of_a_command(effect: Any, there: Played) -> None:
    for words, once_only in ((("stop", "alps:status"), True), (("status", "alps:stop"), False)):
        effect(*words)
        assert ("id" in there.requests[-1]) == once_only, words


HANDS_IN = {"resume", "sweep resume", "sweep retry-failed", "sweep extend"}
"""Commands that submit jobs, which need their secrets."""


@pytest.fixture
def wanted(there: Played, effect: Any, monkeypatch: pytest.MonkeyPatch) -> Played:
    """Two variables with secrets, of which TOKEN was sent when the run was submitted."""
    for name in ("TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"the {name}")
    _, err = effect("submit", "job.yaml", "environment.secrets=[TOKEN]", "--cluster", "alps")
    assert there.requests[-1]["env"] == {"TOKEN": "the TOKEN"}, err
    return there


@pytest.mark.parametrize("name", sorted(GOES))
def test_login_node_gets_only_secrets_that_the_run_was_submitted_with(effect: Any, wanted: Played, name: str) -> None:
    wanted.asks_for = ["TOKEN"]
    effect(*call_of(name))
    assert wanted.given == ([{"TOKEN": "the TOKEN"}] if name in HANDS_IN else [])
    wanted.given.clear()
    wanted.asks_for = ["TOKEN", "AWS_SECRET_ACCESS_KEY"]
    (_, _, code), err = effect(*call_of(name))
    assert wanted.given == [], "all or nothing"
    if name in HANDS_IN:
        assert (code, b"(AWS_SECRET_ACCESS_KEY)" in err, b"TOKEN" in err) == (2, True, False)


@pytest.mark.parametrize("name", sorted(HANDS_IN))
def test_secret_option_sends_the_variable_and_is_not_passed_as_argument(effect: Any, wanted: Played, name: str) -> None:
    (plain, _, _), _ = effect(*call_of(name))
    wanted.asks_for = ["TOKEN", "AWS_SECRET_ACCESS_KEY", "NOT_SET"]
    for words in (["--secret", "AWS_SECRET_ACCESS_KEY"], ["--secret=AWS_SECRET_ACCESS_KEY"]):
        (_, _, code), err = effect(*call_of(name), *words)
        assert (code, b"(NOT_SET)" in err, wanted.given) == (2, True, []), "nor is told whether it is set"
    wanted.asks_for.remove("NOT_SET")
    (sent, _, code), err = effect(*call_of(name), *words)
    assert (code, sent[-1]["args"]) == (0, plain[-1]["args"]), err
    assert wanted.given == [{"TOKEN": "the TOKEN", "AWS_SECRET_ACCESS_KEY": "the AWS_SECRET_ACCESS_KEY"}]


def test_secrets_are_remembered_per_cluster_and_run(effect: Any, wanted: Played) -> None:
    jobs = JOBS.replace("[echo, hello]}", "[echo, hello]}, environment: {secrets: [AWS_SECRET_ACCESS_KEY]}")
    Path("jobs.yaml").write_text(jobs)
    (_, _, code), err = effect("submit", "jobs.yaml", "--cluster", "alps")
    assert code == 0, err
    remote_index.remember("jura", {**RUN, "run_id": "20261121-110000-beef"}, secrets=["OTHER"])
    known = [("alps", "prepare"), ("alps", "train"), ("alps", "toy"), ("jura", "toy"), ("jura", "train"), ("x", "toy")]
    found = [sorted(remote_index.secrets_of(*one)) for one in known]
    assert found == [["AWS_SECRET_ACCESS_KEY"], [], ["TOKEN"], ["OTHER"], [], []]


def test_secret_option_is_refused_for_a_run_of_this_machine(effect: Any) -> None:
    (sent, _, code), err = effect("resume", "./here", "--secret", "HOME")
    assert (sent, code, b"from this shell" in err) == ([], 2, True)
