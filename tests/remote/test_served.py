"""``hpcaccel serve`` with a real sshd: on the laptop for all clusters, and on the login node through a tunnel."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import Client
from hpcaccel.errors import RunNotFound
from hpcaccel.service.client_connection import ServiceError

from .login_node import LoginNode, free_port, wait_for

TOKEN = "t" * 40


@pytest.mark.chaos
def test_a_service_on_the_laptop_shows_and_steers_the_runs_of_a_cluster(node: LoginNode) -> None:
    node.project()
    run = json.loads(node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps", "--json").stdout)
    process = node.start_command("serve", "--no-browser", HPCACCEL_SERVICE_TOKEN=TOKEN)
    try:
        assert process.stdout is not None
        with Client(process.stdout.readline().strip()) as client:
            wait_for(lambda: [row for row in client.runs().runs if row.cluster == "alps"], "the list of the cluster")
            token = f"alps:{run['run_id']}"
            assert client.run(token).state == "pending"
            assert "#SBATCH" in client.script(token)
            assert "name: toy" in client.spec(token)
            assert client.ledger(token) == []
            assert client.metric_names(token) == []
            assert client.traceback(token) is None
            assert client.diff(token) == ""
            assert client.merged_log(token) == []
            log = node.runs / "toy" / run["run_id"] / "slurm.log"
            log.write_text("hello from there\n")
            wait_for(lambda: "slurm.log" in client.logs(token), "the log")
            assert client.log(token, "slurm.log", -6).text == "there\n"
            node.kill_programs()
            with pytest.raises(RunNotFound, match="no run"):
                client.script("alps:nowhere")
            client.cancel(token)
            wait_for(lambda: client.run(token).state == "cancelled", "cancelled")
            assert [job[2] for job in node.jobs()] == ["CANCELLED"]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_service_on_the_laptop_submits_to_a_cluster_once(node: LoginNode) -> None:
    spec = node.project().read_text()
    with served(node) as (client, process):
        options = {"cluster": "alps", "directory": str(node.client / "project")}
        assert client.check(spec, **options)["spec"]["name"] == "toy"
        script = client.render(spec, **options)
        assert "#SBATCH --partition=gpu" in script
        assert str(node.runs) in script
        assert [one["partition"] for one in client.plan(spec, partitions=["gpu"], nodes=["1"], **options)] == ["gpu"]
        (Path(node.env["STAND_IN_QUEUE"]) / "delay").write_text("1")
        with ThreadPoolExecutor() as threads:
            lost = threads.submit(_submitted, client, spec, options)
            wait_for((Path(node.env["STAND_IN_QUEUE"]) / "at-work").exists, "sbatch")
            process.kill()
            with pytest.raises(ServiceError):
                lost.result(timeout=60)
    (Path(node.env["STAND_IN_QUEUE"]) / "delay").unlink()
    with served(node) as (client, process):
        found = client.submit(spec, idempotency_key="tuesday-0001", **options)
        assert found.run_id.startswith("alps:")
        again = client.submit(spec, idempotency_key="tuesday-0001", **options)
        assert (again.run_id, again.repeated) == (found.run_id, True)
        assert len(node.jobs()) == 1
        assert client.run(found.run_id).job_id == "1"
        assert (node.runs / "toy" / found.run_id.partition(":")[2] / "code" / "train.py").exists()
        assert client.sweeps().runs == []
        with pytest.raises(ServiceError, match="only the steps of a running training can be recorded"):
            client.profile(found.run_id)


def _submitted(client: Client, spec: str, options: dict[str, str]) -> str:
    return client.submit(spec, idempotency_key="tuesday-0001", **options).run_id


@contextmanager
def served(node: LoginNode) -> Iterator[tuple[Client, subprocess.Popen[str]]]:
    """A service on the client's machine."""
    process = node.start_command("serve", "--no-browser", HPCACCEL_SERVICE_TOKEN=TOKEN)
    try:
        assert process.stdout is not None
        with Client(process.stdout.readline().strip()) as client:
            yield client, process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.chaos
def test_a_socket_on_the_login_node_is_reached_through_a_tunnel(node: LoginNode, tmp_path: Path) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("no ssh")
    path = tmp_path / "serve.sock"
    process = node.start_command("serve", "--socket", str(path), "--no-browser")
    port = free_port()
    config = node.client / ".ssh" / "config"
    tunnel = subprocess.Popen(["ssh", "-N", "-F", str(config), "-L", f"{port}:{path}", "alps"])
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "http://localhost:8000/\n"
        wait_for(lambda: _answers(port), "the tunnel")
        with Client(f"http://localhost:{port}") as client:
            assert "local" in [row["name"] for row in client.clusters()]
    finally:
        tunnel.terminate()
        tunnel.wait(timeout=60)
        process.terminate()
        process.communicate(timeout=60)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/api/v1/schema", timeout=20) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.chaos
def test_an_agent_on_the_laptop_submits_to_a_cluster_and_cancels(node: LoginNode) -> None:
    """``hpcaccel mcp`` connects by itself; the login does not touch its standard input, which carries the protocol."""
    pytest.importorskip("mcp")
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    spec = node.project().read_text()
    words = ["-m", "hpcaccel", "mcp", "--allow-actions"]
    server = StdioServerParameters(command=sys.executable, args=words, env=node.environment(), cwd=node.client)

    async def call(agent: Any, tool: str, **arguments: Any) -> Any:
        answer = await agent.call_tool(tool, arguments)
        text = "\n".join(getattr(one, "text", "") for one in answer.content)
        assert not answer.is_error, text
        return text

    async def talk() -> None:
        async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as agent:
            await agent.initialize()
            assert '"name": "alps"' in await call(agent, "clusters")
            asked = {
                "yaml": spec, "cluster": "alps", "directory": str(node.client / "project"),
                "idempotency_key": "agent-0001",
            }  # fmt: skip
            await call(agent, "validate_spec", yaml=spec, cluster="alps", directory=asked["directory"])
            assert '"gpu"' in await call(agent, "plan", yaml=spec, cluster="alps", directory=asked["directory"])
            first, again = [json.loads(await call(agent, "submit", **asked)) for _ in range(2)]
            assert (first["run_id"], again["repeated"]) == (again["run_id"], True)
            assert json.loads(await call(agent, "run_status", run=first["run_id"]))["state"] == "pending"
            await call(agent, "logs", run=first["run_id"])
            assert "cancelled" in await call(agent, "cancel", run=first["run_id"])

    asyncio.run(asyncio.wait_for(talk(), 280))
    assert [job[2] for job in node.jobs()] == ["CANCELLED"]
