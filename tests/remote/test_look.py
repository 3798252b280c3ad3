"""docs/service.md, "From your own computer" and "Other ways in", done by a new user: a login node with sshd,
its tunnels, a browser."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import Client

from ..browser.chromium import chromium
from .login_node import REPOSITORY, LoginNode, free_port, wait_for

pytestmark = pytest.mark.chaos


def section(page: str, title: str) -> str:
    return (REPOSITORY / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


LOOK = section("docs/service.md", "From your own computer")
ROWS = dict(re.findall(r"^\| ([^|]+?) \| (.+?) \|$", section("docs/service.md", "Other ways in"), re.MULTILINE))
TRAINS = 'import time\nprint("step 1", flush=True)\ntime.sleep(600)\n'
GPT = "name: gpt\nentrypoint: {script: train.py}\nslurm: {time: '20:00'}\nruntime: {stop: signals}\n"


def command_of(row: str, number: int = 0) -> str:
    """A command in a row of the table."""
    return re.findall(r"`([^`]+)`", ROWS[row])[number]


def typed(sign: str) -> str:
    """The command below a prompt: ``login$`` or ``laptop$``."""
    found = re.search(rf"^{sign}\$ (.+?)(?:\s+#.*)?$", LOOK, re.MULTILINE)
    assert found is not None
    return found[1]


class Place:
    """The login node, the laptop's terminal, and the files of ssh."""

    def __init__(self, node: LoginNode) -> None:
        self.node = node
        self.ssh = ["ssh", "-F", str(node.client / ".ssh" / "config"), "-o", "LogLevel=ERROR"]

    def start(self, command: str, *options: str) -> subprocess.Popen[str]:
        """Start a command in a login shell over SSH."""
        return subprocess.Popen(
            [*self.ssh, *options, "alps", f"bash -lc {shlex.quote('cd; exec ' + command)}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.node.client,
        )  # fmt: skip

    def run(self, command: str) -> str:
        process = self.start(command)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, f"{command}: {err}"
        return out.removeprefix("Welcome to alps\n")

    @contextmanager
    def running(self, command: str) -> Iterator[list[str]]:
        """A service over SSH, until its end; what it printed: the link, then its notes."""
        process = self.start(command, "-tt")  # a terminal, so that it ends with the connection
        assert process.stdout is not None
        lines: list[str] = []
        try:
            while not any("ssh -L" in line for line in lines):
                line = process.stdout.readline()
                assert line, f"{command} ended: {lines}"
                if (line := line.strip()) and line != "Welcome to alps":
                    lines.append(line)
            yield lines
        finally:
            process.terminate()
            process.communicate(timeout=60)

    @contextmanager
    def tunnel(self, command: str) -> Iterator[int]:
        """The tunnel of an ``ssh -L`` command, from a free port of the laptop in place of the one that it names."""
        words = shlex.split(command)
        assert words[:2] == ["ssh", "-L"]
        there = words[2].partition(":")[2].replace("/home/me", str(self.node.home))
        port = free_port()
        process = subprocess.Popen([*self.ssh, "-N", "-L", f"{port}:{there}", "alps"])
        try:
            wait_for(lambda: answers(port), "the tunnel")
            yield port
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.fixture
def place(node: LoginNode) -> Iterator[Place]:
    """A login node where hpcaccel is in PATH, and a run called gpt trains."""
    if shutil.which("ssh") is None or shutil.which("curl") is None:
        pytest.skip("needs ssh and curl")
    program = node.home / ".local" / "share" / "hpcaccel" / "env" / "bin" / "hpcaccel"
    (Path(node.path) / "hpcaccel").symlink_to(program)
    made = Place(node)
    (node.home / "job.yaml").write_text(GPT)
    (node.home / "train.py").write_text(TRAINS)
    made.run("hpcaccel submit job.yaml --cluster local")
    yield made
    made.run("hpcaccel cancel gpt")


def answers(port: int) -> bool:
    """Whether something answers HTTP on the port, whatever the status."""
    with socket.socket() as probe:
        probe.settimeout(20)
        try:
            probe.connect(("127.0.0.1", port))
            probe.sendall(b"GET /api/v1/schema HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return probe.recv(20).startswith(b"HTTP/")
        except OSError:
            return False


def shows(url: str, selector: str, text: str) -> None:
    """Open a page in a browser, and wait until it shows a text."""
    with chromium() as browser:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.goto(url)
        page.locator(selector, has_text=text).first.wait_for()
        context.close()


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def test_a_socket_through_a_tunnel(place: Place) -> None:
    with place.running(typed("login")) as printed:
        assert printed[0] == "http://localhost:8000/"
        assert f"ssh -L 8000:{place.node.home}/.hpcaccel.sock " in printed[-1]
        with place.tunnel(typed("laptop")) as port:
            shows(f"http://localhost:{port}/", ".run-name", "gpt")
            with Client(f"http://localhost:{port}") as client:
                assert [row.name for row in client.runs().runs] == ["gpt"]
        found = json.loads(place.run(command_of("other programs")))
        assert [row["name"] for row in found["runs"]] == ["gpt"]


def test_the_demo_through_the_tunnel_that_it_prints(place: Place) -> None:
    with place.running(command_of("a first look, without a cluster")) as printed:
        link = next(line for line in printed if line.startswith("http"))
        with place.tunnel(printed[-1]) as port:
            shows(re.sub(r":\d+/", f":{port}/", link), ".run-name", "")


def test_a_port_through_the_tunnel_that_it_prints(place: Place) -> None:
    with place.running(command_of("a port in place of the socket")) as printed, place.tunnel(printed[-1]) as port:
        link = re.sub(r":\d+/", f":{port}/", printed[0])
        shows(link, ".run-name", "gpt")
        token = link.partition("token=")[2]
        metrics = get(f"http://127.0.0.1:{port}/metrics", Authorization=f"Bearer {token}")
        assert command_of("Prometheus") == "http://127.0.0.1:PORT/metrics"
        assert 'hpcaccel_runs{state="running"} 1' in metrics


def test_behind_open_ondemand(place: Place) -> None:
    port = free_port()
    command = command_of("Open OnDemand").replace("8000", str(port))
    with place.running(command), place.tunnel(f"ssh -L {port}:127.0.0.1:{port} alps") as here:
        for path in (f"/rnode/n1/{port}/", "/"):  # a proxy passes the whole path, or removes it
            request = urllib.request.Request(f"http://127.0.0.1:{here}{path}", headers={"Host": "ondemand.site"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            refused.value.close()
            assert refused.value.code == 401, "the proxy's name is allowed, and the token is asked for"


def test_all_clusters_on_the_laptop(place: Place) -> None:
    process = place.node.start_command(*shlex.split(command_of("all clusters at once"))[1:])
    try:
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        shows(link, ".run-name", "gpt")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_agents(place: Place) -> None:
    process = place.start(command_of("agents"))
    assert process.stdin is not None
    assert process.stdout is not None
    hello: dict[str, Any] = {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
    }  # fmt: skip
    for message in (
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": {"name": "list_runs", "arguments": {}}},
    ):
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        process.stdin.flush()
    try:
        answer = next(line for line in process.stdout if line.startswith("{") and json.loads(line).get("id") == 2)
        assert '\\"gpt\\"' in answer
    finally:
        process.communicate(timeout=60)


def test_a_terminal_over_ssh(place: Place) -> None:
    command = command_of("a terminal over SSH")
    with terminal([*place.ssh, "-t", "alps", f"bash -lc 'cd; {command}'"]) as (until_shown, press):
        until_shown("gpt")
        press("q")


def test_a_report_for_a_colleague(place: Place) -> None:
    place.run(command_of("a colleague, a paper"))
    page = (place.node.home / "gpt.html").read_text()
    assert "gpt" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)


def test_every_row_is_tried() -> None:
    tried = set(re.findall(r'command_of\(\s*"([^"]+)"', Path(__file__).read_text()))
    assert tried == set(ROWS) - {"for", "---"}


@contextmanager
def terminal(words: list[str]) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A program in a terminal of 80 × 24: wait until it shows a text, and press keys. It must end by itself."""
    master, slave = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "xterm"}
    )
    os.close(slave)
    seen = b""

    def read(seconds: float) -> None:
        nonlocal seen
        if select.select([master], [], [], seconds)[0]:
            try:
                seen += os.read(master, 65536)
            except OSError:  # the program has ended
                return

    def press(keys: str) -> None:
        os.write(master, keys.encode())

    def until_shown(text: str) -> None:
        deadline = time.monotonic() + 120
        while text.encode() not in seen:
            assert time.monotonic() < deadline, seen[-2000:]
            assert process.poll() is None, seen[-2000:]
            read(1)

    try:
        yield until_shown, press
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            read(0.2)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(master)
