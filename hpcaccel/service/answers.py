"""Answers to requests that failed: an exception becomes a status and ``{"error": sentence}``."""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from hpcaccel.core.finite_values import finite
from hpcaccel.errors import HpcaccelError, RunBusy, RunNotFound, SlurmCommandError, SpecError, UserError
from hpcaccel.spec import JobSpec
from hpcaccel.submission.remote.protocol import ConnectionLost, Unreachable

__all__ = ["ERRORS", "ErrorAnswer", "JsonAnswer", "SpecProblem", "add_error_answers", "problems_of"]

_LINE = re.compile(r"(?P<source>[^\s:]+)(?::(?P<line>\d+))?: (?P<message>.*)", re.DOTALL)
_PATH = re.compile(r"(?:job [\w.-]+: )?(?P<path>[A-Za-z_][\w-]*(?:\.[\w-]+)*)(?= |$)")
_SUGGESTION = re.compile(r"Did you mean '([^']*)'")


class JsonAnswer(JSONResponse):
    """JSON in ASCII: names of files may have bytes that are not UTF-8. NaN and infinity become null."""

    def render(self, content: Any) -> bytes:
        try:
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
        return text.encode("ascii")


class SpecProblem(BaseModel):
    """One mistake in a spec."""

    path: str
    """The key, such as ``slurm.nodes``; empty if the mistake is not about one key."""
    line: int | None
    """The line in the YAML text; null if the spec was JSON, or the value comes from elsewhere."""
    message: str
    suggestion: str | None
    """The closest allowed value or key; null if none is close."""


class ErrorAnswer(BaseModel):
    """Why a request failed, in a sentence for users."""

    error: str
    problems: list[SpecProblem] = []
    hints: list[str] = []


_ERROR = "#/components/schemas/ErrorAnswer"
_SENTENCES = {
    400: "The request cannot be fulfilled as it is.",
    401: "The token is missing or wrong.",
    403: "The Host or the Origin of the request is not accepted.",
    404: "There is no such run, file or page.",
    405: "This path does not support the method.",
    409: "The run is in a state that does not allow this.",
    413: "The body is too large.",
    422: "Parameters or the spec are not valid; problems has one item for each mistake.",
    503: "Slurm, or a cluster behind SSH, did not respond; the same request can be repeated.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": sentence, "content": {"application/json": {"schema": {"$ref": _ERROR}}}}
    for status, sentence in _SENTENCES.items()
}
"""The error answers of all routes, for OpenAPI."""


def problems_of(error: SpecError) -> list[SpecProblem]:
    """The mistakes of a spec, as data."""
    return [_problem(line) for line in error.problems]


def _problem(text: str) -> SpecProblem:
    found = _LINE.fullmatch(text)
    message = found["message"] if found else text
    path = _PATH.match(message)
    dotted = path["path"] if path else ""
    suggestion = _SUGGESTION.search(message)
    return SpecProblem(
        path=dotted if "." in dotted or dotted in JobSpec.model_fields or dotted == "sweep" else "",
        line=int(found["line"]) if found and found["line"] else None,
        message=message,
        suggestion=suggestion[1] if suggestion else None,
    )


def add_error_answers(app: FastAPI) -> None:
    """Register the handlers of exceptions."""
    app.add_exception_handler(HpcaccelError, _of_ours)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_parameters)
    app.add_exception_handler(OSError, _of_system)


def _answer(status: int, sentence: str, **more: Any) -> JsonAnswer:
    return JsonAnswer(ErrorAnswer(error=sentence, **more).model_dump(), status_code=status)


async def _of_ours(_: Request, error: Exception) -> JsonAnswer:
    if isinstance(error, SpecError):
        return _answer(422, str(error), problems=problems_of(error), hints=error.hints)
    if isinstance(error, RunNotFound):
        return _answer(404, str(error))
    if isinstance(error, RunBusy):
        return _answer(409, str(error))
    if isinstance(error, SlurmCommandError | ConnectionLost | Unreachable):
        return _answer(503, str(error))
    return _answer(400 if isinstance(error, UserError) else 409, str(error))


async def _of_http(_: Request, error: Exception) -> JsonAnswer:
    assert isinstance(error, HTTPException)
    sentence = "there is no such page" if error.status_code == 404 and error.detail == "Not Found" else error.detail
    answer = _answer(error.status_code, str(sentence))
    answer.headers.update(error.headers or {})
    return answer


async def _of_parameters(_: Request, error: Exception) -> JsonAnswer:
    assert isinstance(error, RequestValidationError)
    problems = [
        SpecProblem(path=".".join(map(str, one["loc"][1:])), line=None, message=str(one["msg"]), suggestion=None)
        for one in error.errors()
    ]
    sentences = [f"{one.path or 'the body'}: {one.message}" for one in problems]
    return _answer(422, "; ".join(sentences), problems=problems)


async def _of_system(_: Request, error: Exception) -> JsonAnswer:
    assert isinstance(error, OSError)
    return _answer(409, f"{error.filename}: {error.strerror}" if error.filename else str(error))
