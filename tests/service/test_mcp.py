"""``hpcaccel mcp`` over stdio, with the client of the official SDK."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from hpcaccel.service.service_settings import ServiceSettings
from tests.service.conftest import ROOT, SPEC, TOKEN, serving, until
from tests.service.stand_in_login_node import LoginNode

READING = {
    "list_runs", "run_status", "explain", "logs", "metrics", "checkpoints", "traceback", "sweeps", "best",
    "clusters", "validate_spec", "plan",
}  # fmt: skip
ACTING = {"submit", "stop", "save", "cancel", "resume"}


def talk(folder: Path, use: Callable[[ClientSession], Awaitable[None]], *words: str) -> None:
    """Start the command, and use it as an agent's program does."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"), "HPCACCEL_RUNS_DIR": str(folder / "runs"),
    }  # fmt: skip
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "hpcaccel", "mcp", *words], env=environment, cwd=folder
    )

    async def session() -> None:
        async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as client:
            await client.initialize()
            await use(client)

    asyncio.run(asyncio.wait_for(session(), 240))


async def call(client: ClientSession, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    text = "\n".join(getattr(one, "text", "") for one in answer.content)
    return f"ERROR {text}" if answer.is_error else text


def test_tools_read_only_unless_actions_are_allowed(tmp_path: Path) -> None:
    async def use(client: ClientSession) -> None:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == READING
        assert all(tool.annotations and tool.annotations.read_only_hint and tool.description for tool in tools)
        assert json.loads(await call(client, "list_runs")) == {"total": 0, "runs": []}
        assert "no run 'nothing'" in await call(client, "run_status", run="nothing")
        assert (await call(client, "validate_spec", yaml=SPEC, cluster="local")).startswith("{")
        wrong = await call(client, "validate_spec", yaml=f"{SPEC}nonsense: 1\n", cluster="local")
        assert wrong.startswith("ERROR")
        assert "nonsense" in wrong
        assert (await call(client, "submit", yaml=SPEC, idempotency_key="12345678")).startswith("ERROR")

    talk(tmp_path, use)
    assert not list((tmp_path / "runs").glob("*/*/spec.json"))


@pytest.mark.chaos
def test_agent_submits_once_watches_and_cancels(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()

    async def use(client: ClientSession) -> None:
        assert {tool.name for tool in (await client.list_tools()).tools} == READING | ACTING
        asked = {"yaml": SPEC, "cluster": "local", "directory": str(tmp_path), "idempotency_key": "once-and-only"}
        first, again = [json.loads(await call(client, "submit", **asked)) for _ in range(2)]
        assert (first["run_id"], again["repeated"]) == (again["run_id"], True)
        run = first["run_id"]
        until(lambda: list((tmp_path / "runs").glob("*/*/attempts/1/0.log")))
        for tool in ("run_status", "explain", "logs", "metrics", "traceback"):
            said = await call(client, tool, run=run)
            assert not said.startswith("ERROR"), (tool, said)
        assert not (await call(client, "checkpoints", run=run)).startswith("ERROR")
        assert "cancelled" in await call(client, "cancel", run=run)

    talk(tmp_path, use, "--allow-actions")


def test_a_running_service_and_its_clusters_behind_ssh_are_used(
    on_laptop: ServiceSettings, login_node: LoginNode, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a port with the token in the environment, and over a Unix socket; the command itself knows no cluster."""
    monkeypatch.setenv("HPCACCEL_SERVICE_TOKEN", TOKEN)
    place = tempfile.mkdtemp(prefix="mcp-", dir="/tmp")
    settings = ServiceSettings(socket=Path(place) / "service", directory=home)

    async def act(client: ClientSession) -> None:
        assert '"host": "me@alps"' in await call(client, "clusters")
        asked = {"yaml": SPEC, "cluster": "alps", "idempotency_key": "once-and-only"}
        first, again = [json.loads(await call(client, "submit", **asked)) for _ in range(2)]
        assert (first["cluster"], first["run_id"], again["repeated"]) == ("alps", again["run_id"], True)
        assert "cancelled" in await call(client, "cancel", run=first["run_id"])
        assert not (await call(client, "plan", yaml=SPEC, cluster="alps")).startswith("ERROR")

    async def read(client: ClientSession) -> None:
        assert json.loads(await call(client, "run_status", run="alps:gpt"))["step"] == 5
        assert "no run 'nowhere'" in await call(client, "run_status", run="alps:nowhere")

    try:
        talk(tmp_path, act, "--allow-actions", "--url", on_laptop.url)
        with serving(settings):
            talk(tmp_path, read, "--socket", str(settings.socket))
    finally:
        shutil.rmtree(place)
    assert len(login_node.runs) == 1
