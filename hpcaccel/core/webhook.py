"""The webhook of a user's notices: where its URL is stored, and a POST to it that has a time limit.

The URL is a secret: whoever has it can post. It is read from an environment variable or from a file of mode 600 at each
use, and never appears in an error, in a log or in a command line.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from types import FrameType
from typing import IO, Any
from urllib.parse import SplitResult, urlsplit

from hpcaccel.core.launch_spec import NoticePolicy
from hpcaccel.core.log import MASKED, Mask
from hpcaccel.errors import UserError

__all__ = ["Answer", "find_url", "post", "shown_host", "webhook_file", "webhook_place"]

SOCKET_SECONDS = 5.0
"""Time limit of each connect, send and receive."""
TOTAL_SECONDS = 15.0
"""Time limit of a whole POST, for receivers that send their answer byte by byte."""
MOST_REDIRECTS = 3
SHOWN = 200
"""Largest number of characters of a receiver's answer that are recorded."""
_REPEATABLE = {408, 425, 429}
"""HTTP status codes below 500 after which the same request may succeed later."""
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Result of a POST."""

    delivered: bool
    status: int | None = None
    """The HTTP status code; None if there was no answer."""
    text: str = ""
    """The start of the receiver's answer, or the error in words, without the URL."""
    final: bool = False
    """Whether the same request would fail again."""


def _default_file() -> Path:
    """``$XDG_CONFIG_HOME/hpcaccel/webhook``, by default ``~/.config/hpcaccel/webhook``."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "hpcaccel" / "webhook"


def webhook_place(policy: NoticePolicy) -> str:
    """Where the URL is stored, as a phrase for the user."""
    if policy.webhook_env is not None:
        return f"the environment variable {policy.webhook_env}"
    return str(webhook_file(policy))


def webhook_file(policy: NoticePolicy) -> Path:
    """The file that holds the URL if no environment variable is named."""
    return _default_file() if policy.webhook_file is None else Path(os.path.expanduser(policy.webhook_file))


def find_url(policy: NoticePolicy, env: Mapping[str, str] = os.environ) -> str:
    """The URL of the webhook.

    Raises:
        UserError: it is not set, others can read its file, or it is not a URL. The message does not contain it.
    """
    if policy.webhook_env is not None:
        url = env.get(policy.webhook_env, "").strip()
        if not url:
            raise UserError(f"{webhook_place(policy)}, which notify.webhook_env names, is not set: export it")
    else:
        url = _read(webhook_file(policy))
    _check(url, where=webhook_place(policy))
    return url


def _read(path: Path) -> str:
    how = f"write the webhook's URL into {path} with mode 600, or name another file in notify.webhook_file"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(10_000).decode(errors="replace").strip()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: {how}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {how[0].upper()}{how[1:]}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        allowed = stat.S_IMODE(mode)
        raise UserError(
            f"{path} has mode {allowed:03o}, so that others may read the webhook's URL: run chmod 600 {path}"
        )
    if not text:
        raise UserError(f"{path} is empty: {how}")
    return text


def _check(url: str, *, where: str) -> None:
    """Raise UserError unless ``url`` is a usable URL. The message does not contain it."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in _PORTS and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable, parts = False, urlsplit("")
    if not usable or not url.isascii() or any(not "!" <= letter <= "~" for letter in url):
        raise UserError(f"{where} holds no URL: it must be one line that begins with https:// or http://")
    if parts.username or parts.password:
        raise UserError(f"{where} holds a URL with a user name, which is not supported: use a webhook with a token")


def post(url: str, content: Mapping[str, Any], *, identifier: str) -> Answer:
    """POST ``content`` as JSON. Proxies are taken from the environment (``https_proxy``, ``no_proxy`` …).

    The call takes at most about 15 seconds if it runs in the main thread. Redirects are followed only on the same host.

    Args:
        identifier: sent in the header ``Idempotency-Key``, by which a receiver can recognise a repeated request.
    """
    mask = _mask(url)
    redirects = _SameHost(urlsplit(url))
    opener = urllib.request.build_opener(redirects)
    headers = {"Content-Type": "application/json", "User-Agent": "hpcaccel", "Idempotency-Key": identifier}
    body = json.dumps(content).encode()
    try:
        with _time_limit(TOTAL_SECONDS):
            request = urllib.request.Request(url, data=body, headers=headers, method="POST")
            with opener.open(request, timeout=SOCKET_SECONDS) as response:
                # The status decides. Do not wait for a long body: the delivery is to be recorded soon.
                return Answer(delivered=True, status=response.status, text=_start(response, mask))
    except urllib.error.HTTPError as error:
        with error:
            text = redirects.refused or _start(error, mask)
            final = error.code < 500 and error.code not in _REPEATABLE
            return Answer(delivered=False, status=error.code, text=text, final=final)
    except urllib.error.URLError as error:
        return Answer(delivered=False, text=mask(_words(error.reason)))
    except (OSError, ValueError, _Late) as error:  # ValueError: not HTTP
        return Answer(delivered=False, text=mask(_words(error)))
    except Exception as error:  # http.client's exceptions: the receiver is not an HTTP server
        return Answer(delivered=False, text=f"the receiver's answer is not HTTP ({type(error).__name__})")


class _Late(Exception):
    """A POST took longer than its time limit."""

    def __str__(self) -> str:
        return f"no complete answer within {TOTAL_SECONDS:.0f} s"


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Repeats a POST at the new place if it is on the same host; urllib itself would send a GET without the message."""

    def __init__(self, first: SplitResult) -> None:
        self._first = _origin(first)
        self._count = 0
        self.refused = ""
        """Why a redirect was not followed."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        self._count += 1
        if _origin(urlsplit(newurl)) != self._first:
            self.refused = "redirected to another host, which would get the message: refused. Store the final URL"
            return None
        if self._count > MOST_REDIRECTS:
            self.refused = f"redirected more than {MOST_REDIRECTS} times"
            return None
        return urllib.request.Request(newurl, data=req.data, headers=req.headers, method="POST")


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _mask(url: str) -> Mask:
    parts = urlsplit(url)
    words = [word for word in parts.path.split("/") if len(word) >= 8]
    return Mask([url, parts.path if len(parts.path) >= 8 else "", parts.query, *words])


def _start(response: Any, mask: Mask) -> str:
    try:
        text = response.read1(4 * SHOWN).decode(errors="replace")
    except (OSError, ValueError, _Late):
        return ""
    except Exception:
        return ""  # a body that is not HTTP; the status has been received
    return mask(" ".join(text.split()))[:SHOWN]


def _words(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return f"no answer within {SOCKET_SECONDS:.0f} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return str(reason).replace("\n", " ")[:SHOWN] or type(reason).__name__


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise ``_Late`` in the block after ``seconds``. Without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shown_host(url: str) -> str:
    """The scheme and host of ``url``, without the secret path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/{MASKED}"
