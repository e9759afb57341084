"""Errors of the HTTP API as RFC 9457 problem documents, and nothing else."""

from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

MEDIA_TYPE = "application/problem+json"
MAX_LISTED_ERRORS = 16
TITLES = {
    400: "Bad request",
    401: "Token required",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Request too slow",
    409: "Refused",
    413: "Body too large",
    415: "Wrong content type",
    421: "Wrong host",
    422: "Invalid request",
    500: "Internal error",
    503: "Not ready",
    504: "Node busy",
}


class Problem(Exception):  # noqa: N818 - RFC 9457's own name
    """A refusal on its way to the client: HTTP status, stable snake_case code, one sentence, JSON-ready details."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        details: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.details = details or {}
        self.headers = headers or {}


def respond(problem: Problem, instance: str) -> Response:
    """``problem`` as its document; ``instance`` is the path that was asked."""
    document = {
        "type": f"urn:stagemesh:problem:{problem.code}",
        "title": TITLES.get(problem.status, "Error"),
        "status": problem.status,
        "detail": str(problem),
        "instance": instance,
        "code": problem.code,
        "details": problem.details,
    }
    return JSONResponse(document, problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def invalid_body(error: ValidationError) -> Problem:
    """What is wrong with a body, by JSON pointer; the first mistake is the sentence."""
    listed = [
        {"pointer": "/" + "/".join(str(part) for part in detail["loc"]), "detail": detail["msg"]}
        for detail in error.errors(include_url=False, include_input=False)[:MAX_LISTED_ERRORS]
    ]
    first = listed[0]
    where = "the body" if first["pointer"] == "/" else first["pointer"]
    return Problem(422, "invalid_request", f"{where}: {first['detail']}", details={"errors": listed})


async def on_problem(request: Request, error: Exception) -> Response:
    """Exception handler for ``Problem``."""
    assert isinstance(error, Problem)
    return respond(error, request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for what the router itself refuses."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    sentences = {
        404: f"there is nothing at {request.url.path[:200]}; /openapi.json lists what there is",
        405: f"{request.method} is not possible here; /openapi.json lists what is",
    }
    problem = Problem(
        error.status_code,
        codes.get(error.status_code, "http_error"),
        sentences.get(error.status_code, str(error.detail)),
        headers=dict(error.headers or {}),
    )
    return respond(problem, request.url.path)


async def on_bug(request: Request, _error: Exception) -> Response:
    """Exception handler for our own bugs: the traceback goes to the log, never to the client."""
    return respond(Problem(500, "internal_error", "a bug in stagemesh; its log has the details"), request.url.path)
