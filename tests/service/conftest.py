from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn

from hpcaccel import Client
from hpcaccel.core.run_dir import RunDir
from hpcaccel.service.app import create_app
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.submission.jobs import local
from hpcaccel.submission.remote.remote_cluster import RemoteCluster
from tests.service.stand_in_login_node import LoginNode

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef" * 3

SPEC = """\
name: demo
entrypoint:
  command: [bash, -c, "echo begins; while [ -e hold ]; do sleep 0.05; done; echo ends"]
slurm:
  nodes: 1
  time: 10
code: {copy: false}
runtime: {stop: signals}
resilience: {restart_in_place: 0, requeue: false}
"""


def until(condition: Callable[[], object], *, seconds: float = 90.0) -> None:
    """Wait until ``condition`` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.05)


SERVERS: dict[int, uvicorn.Server] = {}
"""The servers by port."""


@contextmanager
def serving(settings: ServiceSettings, *, page: bool | None = False) -> Iterator[ServiceSettings]:
    """A service in a thread, on its Unix socket or a free port."""
    with socket.socket(socket.AF_INET if settings.socket is None else socket.AF_UNIX) as listening:
        if settings.socket is None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", settings.port))
            settings = replace(settings, port=listening.getsockname()[1])
        else:
            listening.bind(os.fspath(settings.socket))
        app = create_app(settings, page=page)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        SERVERS[settings.port] = server
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        until(lambda: server.started or not thread.is_alive())
        try:
            yield settings
        finally:
            server.should_exit = True
            thread.join(timeout=60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a project, an environment without the user's index, profiles and runs."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [
            name for name in os.environ if name.startswith(("HPCACCEL_", "SBATCH_", "SLURM_")) and "TEST" not in name
        ]:
            patch.delenv(name)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("PYTHONPATH", str(ROOT))
        (folder / "project").mkdir()
        patch.chdir(folder / "project")
        yield folder / "project"
        for file in (folder / "project" / "runs").rglob("local.json"):
            local.kill(RunDir(file.parent))


@pytest.fixture(scope="module")
def settings(home: Path) -> Iterator[ServiceSettings]:
    """A running service on the local backend."""
    with serving(ServiceSettings(token=TOKEN, directory=home)) as found:
        yield found


@pytest.fixture
def client(settings: ServiceSettings) -> Iterator[Client]:
    with settings.client() as client:
        yield client


@pytest.fixture
def login_node(monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    made = LoginNode()
    monkeypatch.setattr(RemoteCluster, "converse", lambda *args: made.converse(*args))
    return made


@pytest.fixture
def on_laptop(
    home: Path, tmp_path: Path, login_node: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceSettings]:
    """A service on a laptop, with a profile of the cluster ``alps`` behind SSH."""
    profiles = tmp_path / "config" / "hpcaccel" / "clusters"
    profiles.mkdir(parents=True)
    (profiles / "alps.yaml").write_text("name: alps\nhost: me@alps\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with serving(ServiceSettings(token=TOKEN, directory=home)) as settings:
        yield settings


@pytest.fixture
def laptop(on_laptop: ServiceSettings) -> Iterator[Client]:
    with on_laptop.client() as client:
        yield client
