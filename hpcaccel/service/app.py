"""The FastAPI application: access control, the routes of REST under ``/api/v1``, and the page if Dash is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer

import hpcaccel
from hpcaccel.service.access import AccessControl
from hpcaccel.service.action_routes import action_routes
from hpcaccel.service.answers import ErrorAnswer, add_error_answers
from hpcaccel.service.cluster_routes import cluster_routes
from hpcaccel.service.detail_routes import detail_routes
from hpcaccel.service.log_routes import log_routes
from hpcaccel.service.prometheus import prometheus_routes
from hpcaccel.service.run_routes import run_routes
from hpcaccel.service.run_source import RunSource
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.service.spec_file_routes import spec_file_routes
from hpcaccel.service.spec_requests import SpecRequest
from hpcaccel.service.submit_routes import submit_routes
from hpcaccel.service.sweep_routes import sweep_routes

__all__ = ["create_app"]

THREADS = 64
"""Routes run in this many threads at once. Reads are short: 200 clients share them. Callbacks of the page wait for
routes, and must have threads of their own."""


def create_app(settings: ServiceSettings, *, page: bool | None = None) -> FastAPI:
    """Make the application.

    Args:
        page: whether to add the page; None: if Dash is installed.
    """
    prefix = f"{settings.base_path}/api/v1"
    app = FastAPI(
        title="hpcaccel",
        version=hpcaccel.__version__,
        summary="Runs on Slurm: submit, watch, steer. It acts as the user who started it.",
        openapi_url=f"{prefix}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        separate_input_output_schemas=False,
    )
    add_error_answers(app)
    source = RunSource(settings)
    app.state.source = source
    bearer = [Depends(HTTPBearer(auto_error=False))] if settings.token is not None else []
    routes = APIRouter(prefix=prefix, dependencies=bearer)
    for part in (
        run_routes(source),
        detail_routes(source),
        log_routes(source),
        submit_routes(source, settings),
        action_routes(source),
        sweep_routes(source, settings),
        cluster_routes(source),
        spec_file_routes(settings),
    ):
        routes.include_router(part)
    app.include_router(routes)
    app.include_router(prometheus_routes(source), prefix=settings.base_path, dependencies=bearer)
    _add_schemas(app)
    app.add_middleware(AccessControl, settings=settings)
    if page or (page is None and _has_page()):
        from hpcaccel.service.page.dash_app import add_page

        add_page(app, settings)
    return app


def _has_page() -> bool:
    return find_spec("dash") is not None and find_spec("hpcaccel.service.page") is not None


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
    yield
    app.state.source.remote.close()


def _add_schemas(app: FastAPI) -> None:
    """Add schemas that routes refer to by name: of ``SpecRequest``, which they read themselves, and of errors."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (SpecRequest, ErrorAnswer):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[model.__name__] = schema
        return document

    app.openapi = openapi  # type: ignore[method-assign]
