"""``hpcaccel.Client`` against a real service on the local backend."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from hpcaccel import Client
from hpcaccel.core.profile_requests import RankProfile, profiles_folder, write_rank_profile
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunNotFound
from hpcaccel.service.client_connection import ServiceError, ServiceSpecError
from hpcaccel.service.service_settings import ServiceSettings
from tests.service.conftest import SPEC, TOKEN, until


def test_a_run_is_submitted_watched_stopped_and_resumed(client: Client, home: Path) -> None:
    (home / "hold").touch()
    made = client.submit(SPEC, cluster="local")
    assert (made.name, made.cluster, made.tasks, made.repeated) == ("demo", "local", None, False)
    until(lambda: client.run(made.run_id).state == "running")
    with pytest.raises(ServiceError, match="its program decides when to save") as refused:
        client.save(made.run_id)
    assert refused.value.status == 400
    client.stop(made.run_id)
    until(lambda: client.run(made.run_id).state == "paused")
    (home / "hold").unlink()
    assert client.resume(made.run_id).startswith("local-")
    until(lambda: client.run(made.run_id).state == "completed")

    whole = client.run(made.run_id)
    assert (whole.run_id, whole.attempts, len(whole.history)) == (made.run_id, 2, 2)
    start, end = whole.history[0].start, whole.history[0].end
    assert start is not None
    assert end is not None
    assert end.reason == "stop"
    assert [row.run_id for row in client.runs().runs] == [made.run_id]
    assert [line["event"] for line in client.ledger(made.run_id)] == ["start", "end"] * 2
    assert "hpcaccel job demo" in client.script("demo")
    assert "name: demo" in client.spec("demo")
    assert {"1/0.log", "2/0.log"} <= client.logs(made.run_id).keys()
    part = client.log(made.run_id, "2/0.log", offset=-5)
    assert (part.text, part.next_offset) == ("ends\n", part.size)
    assert "".join(client.follow(made.run_id, "2/0.log")) == "begins\nends\n"
    assert [line.text for line in client.merged_log(made.run_id) if line.sources == ["0"]] == ["begins", "ends"]
    assert client.metrics(made.run_id, ["loss"]) == {"loss": []}
    assert client.metric_names(made.run_id) == []
    assert client.traceback(made.run_id) is None
    assert client.diff(made.run_id) == ""
    assert client.checkpoints(made.run_id) == []


def test_a_key_submits_once(client: Client) -> None:
    first, again = (client.submit(SPEC, cluster="local", idempotency_key="key-12345678") for _ in range(2))
    assert not first.repeated
    assert again.repeated
    assert again.run_id == first.run_id


def test_mistakes_in_a_spec_are_data(client: Client) -> None:
    with pytest.raises(ServiceSpecError) as refused:
        client.submit("name: x\nentrypoint: {comand: [echo]}\nslurm:\n  nodes: -1\n", cluster="local")
    found = {one["path"]: one for one in refused.value.details}
    assert found["entrypoint.comand"] == {
        "path": "entrypoint.comand",
        "line": 2,
        "message": found["entrypoint.comand"]["message"],
        "suggestion": "command",
    }
    assert (found["slurm.nodes"]["line"], found["entrypoint"]["line"]) == (4, 2)


def test_the_difference_to_the_previous_run_of_the_name(client: Client) -> None:
    client.submit(SPEC.replace("demo", "other"), cluster="local")
    second = client.submit(SPEC.replace("demo", "other").replace("time: 10", "time: 20"), cluster="local")
    assert "slurm.time: 00:10:00 -> 00:20:00" in client.diff(second.run_id)


def test_traces_of_the_profiler_are_listed_and_downloaded(client: Client, settings: ServiceSettings) -> None:
    run = RunDir(client.submit(SPEC.replace("demo", "traced"), cluster="local").path)
    until(lambda: client.run(run.run_id).state == "completed")
    assert client.profiles(run.run_id) == []
    folder = profiles_folder(run, 1)
    trace = folder / "step_3-rank0.json.gz"
    for rank, file in ((0, trace), (1, run.spec)):  # a record that names another file
        record = RankProfile(
            request="1-a", rank=rank, state="done", first_step=3, steps=2, file=str(file.relative_to(run.path)), bytes=2
        )
        write_rank_profile(run, 1, record)
    trace.write_bytes(b"gz")
    (folder / "link.json.gz").symlink_to(run.spec)
    listed = client.profiles(run.run_id)
    assert [(one["name"], one["rank"]) for one in listed] == [("1/step_3-rank0.json.gz", 0), ("1/spec.json", 1)]
    path = f"{settings.url}/api/v1/runs/{run.run_id}/profiles"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with urlopen(Request(f"{path}/1/step_3-rank0.json.gz", headers=headers), timeout=60) as answer:
        assert (answer.read(), answer.headers["content-type"]) == (b"gz", "application/gzip")
    for name in ("1/spec.json", "1/link.json.gz", "1/..%2F..%2F..%2Fspec.json", "2/step_3-rank0.json.gz"):
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(f"{path}/{name}", headers=headers), timeout=60)
        refused.value.close()
        assert refused.value.code in (400, 404), name


def test_an_unknown_run_is_not_found(client: Client) -> None:
    with pytest.raises(RunNotFound, match="no run 'nowhere'"):
        client.run("nowhere")


def test_check_and_render_submit_nothing(client: Client) -> None:
    before = client.runs().total
    assert client.check(SPEC, cluster="local")["valid"]
    assert client.render(SPEC, cluster="slurm").startswith("#!/bin/bash")
    assert "properties" in client.schema()
    assert "sweep" in client.schema(sweep=True)["properties"]
    assert [row["name"] for row in client.clusters()] == ["local"]
    assert client.runs().total == before


def test_a_wrong_token_and_a_missing_service_are_named(settings: ServiceSettings) -> None:
    with (
        Client(settings.url, token="wrong") as client,
        pytest.raises(ServiceError, match="token is missing") as refused,
    ):
        client.runs()
    assert refused.value.status == 401
    with pytest.raises(ServiceError, match="cannot be reached"):
        Client(socket="/nowhere/at/all", token="x").runs()


def test_a_log_is_followed_from_before_its_rank_begins(client: Client) -> None:
    made = client.submit(SPEC, cluster="local")
    assert "".join(client.follow(made.run_id, "1/0.log")) == "begins\nends\n"
    with pytest.raises(RunNotFound, match="has no log"):
        list(client.follow(made.run_id, "2/0.log"))
