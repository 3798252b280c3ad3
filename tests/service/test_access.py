"""Who may use the service: token, Host, Origin, sizes, paths; behind proxies, and on a Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import uvicorn

from hpcaccel import Client
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import UserError
from hpcaccel.service import web_server
from hpcaccel.service.access import MOST_BODY_BYTES, cookie_name
from hpcaccel.service.service_settings import ServiceSettings, normalized_base_path
from tests.service.conftest import SPEC, TOKEN, serving, until

BEARER = {"Authorization": f"Bearer {TOKEN}"}
OPEN_ON_DEMAND = "/rnode/n1.site/8000"


def ask(
    settings: ServiceSettings,
    path: str,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """One request with exactly these headers. Returns status, headers and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", settings.port, timeout=60)
    named = headers or {}
    try:
        connection.putrequest(method, path, skip_host="Host" in named)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        for name, value in named.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def refused(found: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    status, _, body = found
    return status, json.loads(body)["error"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {TOKEN[:-1]}"}, {"Authorization": TOKEN}])
def test_every_path_needs_the_token(settings: ServiceSettings, headers: dict[str, str]) -> None:
    for path in ("/api/v1/runs", "/api/v1/openapi.json", "/metrics", "/", "/nowhere"):
        status, sentence = refused(ask(settings, path, headers))
        assert (status, "token" in sentence) == (401, True), path


def test_the_token_is_accepted_in_a_header_a_cookie_and_once_in_a_link(settings: ServiceSettings) -> None:
    cookie = f"other=1; {cookie_name(TOKEN)}={TOKEN}"
    assert ask(settings, "/api/v1/clusters", BEARER)[0] == 200
    assert ask(settings, "/api/v1/clusters", {"Cookie": cookie})[0] == 200
    assert ask(settings, f"/api/v1/clusters?token={TOKEN}")[0] == 200
    assert ask(settings, f"/api/v1/runs/x/cancel?token={TOKEN}", method="POST")[0] == 401
    status, headers, _ = ask(settings, f"/run/x?token={TOKEN}&tab=log")
    assert (status, headers["location"], headers["cache-control"]) == (303, "x?tab=log", "no-store")
    assert headers["set-cookie"] == f"{cookie_name(TOKEN)}={TOKEN}; Path=/; HttpOnly; SameSite=Strict"


def test_a_browser_without_token_gets_a_page_that_says_what_to_do(settings: ServiceSettings) -> None:
    status, headers, body = ask(settings, "/", {"Accept": "text/html"})
    assert (status, headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert b"hpcaccel serve" in body


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
def test_other_hosts_are_refused_even_with_the_token(settings: ServiceSettings, host: str) -> None:
    assert refused(ask(settings, "/api/v1/runs", {**BEARER, "Host": host}))[0] == 403


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "LOCALHOST"])
def test_a_tunnel_may_have_another_port(settings: ServiceSettings, host: str) -> None:
    assert ask(settings, "/api/v1/clusters", {**BEARER, "Host": host})[0] == 200
    assert ask(settings, "/api/v1/clusters", {**BEARER, "Host": host, "Origin": f"http://{host}"})[0] == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:9999", "http://127.0.0.1", "file://"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_other_origins_are_refused(settings: ServiceSettings, origin: str, method: str) -> None:
    headers = {**BEARER, "Host": "localhost:8000", "Origin": origin}
    found = ask(settings, "/api/v1/runs", headers, method=method, body=b"{}")
    assert refused(found)[0] == 403


TRICKS = [
    "..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "%2fetc%2fpasswd", "a%00b",
    "~", "a%5c..%5cb", "-x", ".", "demo%0a", "%252e%252e%252f", "x" * 300,
]  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS)
def test_path_tricks_in_names_of_runs_and_logs_find_nothing(
    settings: ServiceSettings, client: Client, trick: str, a_run: str
) -> None:
    for path in (f"runs/{trick}", f"runs/{trick}/spec", f"runs/{a_run}/logs/{trick}", f"sweeps/{trick}/best"):
        status, _, body = ask(settings, f"/api/v1/{path}", BEARER)
        assert status in (400, 404), path
        assert b"root:" not in body
    assert client.run(a_run).name == "demo"


@pytest.fixture(scope="module")
def a_run(settings: ServiceSettings) -> str:
    with settings.client() as client:
        made = client.submit(SPEC, cluster="local")
        until(lambda: client.run(made.run_id).state == "completed")
        return made.run_id


def test_a_link_in_place_of_a_log_is_not_shown(client: Client, a_run: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    link = RunDir(client.run(a_run).path).attempt(1) / "7.log"
    link.symlink_to(secret)
    assert "1/7.log" not in client.logs(a_run)
    with pytest.raises(UserError, match="no log"):
        client.log(a_run, "1/7.log")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_50_mb_is_refused(settings: ServiceSettings, chunked: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", settings.port, timeout=120)
    piece = b" " * (1 << 20)
    body = iter([piece] * 50) if chunked else piece * 50
    headers = {**BEARER, "Content-Type": "application/json"}
    try:
        connection.request("POST", "/api/v1/check", body=body, headers=headers, encode_chunked=chunked)
    except ConnectionError:  # the service has answered and closed before it had the whole body
        assert chunked
    else:
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]) == (413, "the request is larger than 8 MB")
    finally:
        connection.close()
    assert ask(settings, "/api/v1/clusters", BEARER)[0] == 200


def test_a_large_but_allowed_body_is_read(settings: ServiceSettings) -> None:
    body = json.dumps({"yaml": "#" * (3 << 20)}).encode()
    found = ask(settings, "/api/v1/check", {**BEARER, "Content-Type": "application/json"}, method="POST", body=body)
    assert refused(found)[0] == 422
    assert len(body) < MOST_BODY_BYTES


def test_websockets_are_refused(settings: ServiceSettings) -> None:
    key = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "x" * 24,
        "Sec-WebSocket-Version": "13",
    }
    assert ask(settings, "/api/v1/runs", key)[0] in (400, 401, 403)


# -- behind proxies ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxied(home: Path) -> Iterator[ServiceSettings]:
    found = ServiceSettings(token=TOKEN, directory=home, base_path=OPEN_ON_DEMAND, hosts=("ondemand.site",))
    with serving(found) as running:
        yield running


def test_a_proxy_may_keep_or_remove_the_base_path(proxied: ServiceSettings) -> None:
    for path in ("/api/v1/clusters", f"{OPEN_ON_DEMAND}/api/v1/clusters"):
        headers = {"Host": "ondemand.site", "Origin": "https://ondemand.site"}
        assert ask(proxied, path, {**BEARER, **headers})[0] == 200
    with proxied.client() as client:
        assert [row["name"] for row in client.clusters()] == ["local"]


@pytest.mark.parametrize("shown", ["", OPEN_ON_DEMAND])
def test_the_redirect_is_relative_and_the_cookie_is_for_the_base_path(proxied: ServiceSettings, shown: str) -> None:
    status, headers, _ = ask(proxied, f"{shown}/?token={TOKEN}", {"Host": "ondemand.site"})
    assert (status, headers["location"]) == (303, "./")
    assert f"; Path={OPEN_ON_DEMAND}/;" in headers["set-cookie"]


@pytest.mark.parametrize(("given", "path"), [("", ""), ("/", ""), ("a/b/", "/a/b"), ("/node/n1/80", "/node/n1/80")])
def test_base_paths_are_normalized(given: str, path: str) -> None:
    assert normalized_base_path(given) == path


@pytest.mark.parametrize("given", ["/a/../b", "/a b", "/a?b", "/a//b", "/a/%2e"])
def test_what_is_not_a_base_path_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="--base-path"):
        normalized_base_path(given)


# -- on a Unix socket -------------------------------------------------------------------------------------------------


@pytest.fixture
def on_socket(home: Path, tmp_path: Path) -> Iterator[Path]:
    """``hpcaccel serve --socket`` in a thread, without a page."""
    path = tmp_path / "serve.sock"
    listening = web_server._on_socket(path)
    settings = ServiceSettings(socket=path, directory=home)
    config = web_server._config(settings, page=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    until(lambda: server.started)
    yield path
    server.should_exit = True
    thread.join(timeout=60)
    listening.close()


def test_a_socket_belongs_to_the_user_and_needs_no_token(on_socket: Path) -> None:
    assert stat.S_IMODE(on_socket.stat().st_mode) == 0o600
    with Client(socket=on_socket) as client:
        assert [row["name"] for row in client.clusters()] == ["local"]


@pytest.mark.parametrize("header", ["Host: evil.example", "Host: localhost\r\nOrigin: https://evil.example"])
def test_a_socket_refuses_other_hosts_and_origins(on_socket: Path, header: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(on_socket))
        connection.sendall(f"GET /api/v1/runs HTTP/1.1\r\n{header}\r\nConnection: close\r\n\r\n".encode())
        assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 403")


def test_the_socket_of_a_killed_service_is_replaced_and_that_of_a_running_one_is_not(
    on_socket: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="belongs to a service that is running"):
        web_server._on_socket(on_socket)
    abandoned = tmp_path / "abandoned.sock"
    web_server._on_socket(abandoned).close()  # the file stays
    web_server._on_socket(abandoned).close()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="is not a socket"):
        web_server._on_socket(file)


def test_a_port_needs_a_token_and_a_port_in_use_is_named(settings: ServiceSettings) -> None:
    with pytest.raises(UserError, match="needs a token"):
        ServiceSettings(port=8000)
    with pytest.raises(UserError, match=f"port {settings.port} cannot be used"):
        web_server._on_port(settings.port)
