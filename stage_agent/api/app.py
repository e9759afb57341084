"""The HTTP API as one ASGI application: reads snapshots, submits commands, decides nothing.

Every answer is a JSON document, a problem document, metrics, an event stream or the console page. Bodies are bounded in
bytes and time. A command that the node refuses is a problem with the refusal's own code.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from config.absent import absent
from config.settings import ApiSettings
from stage_agent.api import commands, documents
from stage_agent.api.events import MAX_EVENTS
from stage_agent.api.gate import Gate
from stage_agent.api.metrics import build_registry, exposed
from stage_agent.api.openapi import openapi_document
from stage_agent.api.operations import READS, WRITES, Operation
from stage_agent.api.problems import Problem, invalid_body, on_bug, on_http_exception, on_problem
from stage_agent.api.readiness import not_ready_reasons
from stage_agent.api.snapshot import NodeSnapshot, NodeSnapshotSource, SlotView
from stage_agent.api.stream import EventStreams
from stage_agent.console import page

with absent("html"):  # for tracebacks as pages, which nobody gets: 0.4 MB
    from starlette.applications import Starlette

MAX_BODY_BYTES = 262_144
BODY_DEADLINE_S = 10.0
COMMAND_DEADLINE_S = 25.0

Handler = Callable[[Request], Awaitable[Response]]


def build_app(
    view: NodeSnapshotSource,
    sink: commands.CommandSink,
    *,
    settings: ApiSettings | None = None,
    token: str | None = None,
    engine_routes: Sequence[Route] = (),
) -> Starlette:
    """The application over ``view`` and ``sink``. ``token`` = what every request must carry; ``None`` = none needed.

    ``engine_routes`` lead to the engine that serves the model (``/v1/*``).

    ``app.state.streams.close()`` ends the open event streams.
    """
    settings = settings or ApiSettings()
    reads = _Reads(view, sink)
    handlers: dict[str, Handler] = {operation.name: getattr(reads, operation.name) for operation in READS}
    for operation in WRITES:
        handlers[operation.name] = _unserve(sink) if operation.command is None else _command(sink, operation)
    routes = [
        Route(operation.path, handlers[operation.name], methods=[operation.method], name=operation.name)
        for operation in (*READS, *WRITES)
    ]
    routes += [Route("/", _console), Route("/openapi.json", reads.description), *engine_routes]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Gate, token=token, host=settings.host)],
        exception_handlers={Problem: on_problem, HTTPException: on_http_exception, Exception: on_bug},
    )
    app.state.streams = reads.streams
    return app


class _Reads:
    """The handlers of the ``GET`` operations; their names are those of the table."""

    def __init__(self, view: NodeSnapshotSource, sink: commands.CommandSink) -> None:
        self._view = view
        self._sink = sink
        self._registry = build_registry(view)
        self.streams = EventStreams(view)

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readiness(self, _request: Request) -> Response:
        reasons = not_ready_reasons(self._view.snapshot())
        if reasons:
            raise Problem(503, "not_ready", "; ".join(reasons), details={"reasons": list(reasons)})
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        text, media_type = exposed(self._registry, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": media_type})

    async def status(self, _request: Request) -> Response:
        return JSONResponse(documents.status_document(self._view.snapshot()))

    async def nodes(self, _request: Request) -> Response:
        return JSONResponse(documents.nodes_document(self._view.snapshot()))

    async def links(self, _request: Request) -> Response:
        return JSONResponse(documents.links_document(self._view.snapshot()))

    async def plan(self, request: Request) -> Response:
        slot = _chosen_slot(self._view.snapshot(), request.query_params.get("slot"))
        if slot.plan is not None:
            return JSONResponse(dict(slot.plan))
        if slot.refusal is not None:
            raise Problem(
                409, str(slot.refusal["code"]), str(slot.refusal["message"]), details=slot.refusal.get("details")
            )
        raise Problem(404, "no_plan", f"no plan for slot {slot.slot} yet: {slot.reason or slot.state}")

    async def explain_plan(self, request: Request) -> Response:
        snapshot = self._view.snapshot()
        slot = _chosen_slot(snapshot, request.query_params.get("slot"))
        explained = commands.ExplainPlan(slot=slot.slot)
        return await _submit(self._sink, explained, 200, documents.orders_document(snapshot))

    async def plans(self, _request: Request) -> Response:
        return JSONResponse(documents.plans_document(self._view.snapshot()))

    async def stages(self, _request: Request) -> Response:
        return JSONResponse(documents.stages_document(self._view.snapshot()))

    async def orders(self, _request: Request) -> Response:
        return JSONResponse(documents.orders_document(self._view.snapshot()))

    async def models(self, _request: Request) -> Response:
        return JSONResponse(documents.models_document(self._view.snapshot()))

    async def events(self, request: Request) -> Response:
        events = self._view.events(_number(request, "after", 0, 2**53))
        limit = _number(request, "limit", MAX_EVENTS, MAX_EVENTS)
        return JSONResponse(documents.events_document(events[-limit:] if limit else (), self._view.snapshot().now_us))

    async def event_stream(self, request: Request) -> Response:
        last = request.headers.get("last-event-id", "")
        after = int(last) if last.isdecimal() and len(last) < 17 else _number(request, "after", 0, 2**53)
        return StreamingResponse(
            self.streams.open(after), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def targets(self, _request: Request) -> Response:
        return JSONResponse(documents.targets_document(self._view.snapshot()))

    async def description(self, _request: Request) -> Response:
        return JSONResponse(openapi_document(self._view.snapshot().version))


async def _console(_request: Request) -> Response:
    return HTMLResponse(page.HTML, headers=page.HEADERS)


def _command(sink: commands.CommandSink, operation: Operation) -> Handler:
    """A handler that validates the body as the operation's command and submits it."""
    model: Any = operation.command

    async def handle(request: Request) -> Response:
        try:
            command = model.model_validate_json(await _body(request) or b"{}")
        except ValidationError as error:
            raise invalid_body(error) from None
        return await _submit(sink, command, operation.success)

    return handle


def _unserve(sink: commands.CommandSink) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            command = commands.UnserveModel(slot=request.path_params["slot"])
        except ValidationError as error:
            raise invalid_body(error) from None
        return await _submit(sink, command, 202)

    return handle


async def _submit(
    sink: commands.CommandSink, command: commands.AnyCommand, success: int, beside: dict[str, Any] | None = None
) -> Response:
    """``beside`` is added to the answer's document."""
    try:
        async with asyncio.timeout(COMMAND_DEADLINE_S):
            answer = await sink.submit(command)
    except TimeoutError:
        raise Problem(504, "node_busy", "the node did not answer in time; see its log and try again") from None
    if isinstance(answer, commands.Refused):
        raise Problem(answer.status, answer.code, answer.message, details=answer.details)
    return JSONResponse(answer.document | (beside or {}), success)


async def _body(request: Request) -> bytes:
    """The body, at most ``MAX_BODY_BYTES`` within ``BODY_DEADLINE_S``."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise Problem(413, "body_too_large", f"a body may have at most {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise Problem(408, "body_too_slow", f"the body did not arrive within {BODY_DEADLINE_S:.0f} s") from None
    except ClientDisconnect:
        raise Problem(400, "body_cut_off", "the body ended early") from None
    return bytes(body)


def _number(request: Request, name: str, default: int, largest: int) -> int:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 16 or int(text) > largest:
        raise Problem(400, "invalid_parameter", f"{name} must be a whole number from 0 to {largest}")
    return int(text)


def _chosen_slot(snapshot: NodeSnapshot, name: str | None) -> SlotView:
    known = ", ".join(slot.slot for slot in snapshot.slots)
    if name is None:
        if not snapshot.slots:
            raise Problem(404, "no_plan", "nothing is served; ask for a model with `stagemesh serve MODEL`")
        default = [slot for slot in snapshot.slots if slot.slot == "default"]
        if len(snapshot.slots) > 1 and not default:
            raise Problem(400, "slot_required", f"several models are served; add ?slot= with one of: {known}")
        return (default or snapshot.slots)[0]
    chosen = next((slot for slot in snapshot.slots if slot.slot == name), None)
    if chosen is None:
        raise Problem(404, "unknown_slot", f"there is no slot {name[:64]!r}; there are: {known or 'none'}")
    return chosen
