"""Calls of the service's REST from callbacks, in threads of their own: a callback itself runs on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from hpcaccel.service.client import Client

__all__ = ["ClientCalls"]

T = TypeVar("T")

THREADS = 16
"""Callbacks that wait for REST at once. The routes have other threads, so that waiting callbacks never block them."""


class ClientCalls:
    """``await calls(job)`` runs ``job(client)`` in a thread that keeps its client.

    Args:
        factory: makes a client of the service.
    """

    def __init__(self, factory: Callable[[], Client]) -> None:
        self._factory = factory
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="page")
        self._kept = threading.local()

    async def __call__(self, job: Callable[[Client], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, job)

    def _run(self, job: Callable[[Client], T]) -> T:
        client: Client | None = getattr(self._kept, "client", None)
        if client is None:
            client = self._kept.client = self._factory()
        return job(client)
