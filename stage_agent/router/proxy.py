"""The reverse proxy behind ``/v1/*``: streaming is kept, and a client always learns what became of its request.

* no head (replanning, nothing served): 503 with ``Retry-After``; nothing was sent anywhere
* the plan died before the answer began: 502 ``plan_lost``; the client sends the request again
* … in the middle of a stream: a last event with the error, then the end

Errors have the shape that clients of this API read: ``{"error": {"message", "type", "code"}}``. The engine's key is put
in here, and the client's own authorisation, which was for this node, goes no further.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from stage_agent.api.snapshot import NodeSnapshotSource
from stage_agent.router.heads import HeadOf, choose_slot, find_head
from stage_agent.tunnel.tunnels import LOOPBACK, MAX_CONNECTIONS, Listener, Tunnels, http_door

if TYPE_CHECKING:
    import httpx  # at run time only when the first request comes: most nodes never forward one

MAX_BODY_BYTES = 8_388_608
BODY_DEADLINE_S = 30.0
MAX_ANSWER_BYTES = 67_108_864
READ_S = 600.0
"""The longest silence of the engine: a long prompt on slow stages."""
RETRY_AFTER_S = 5
IDLE_S = 2.0
"""How long a connection to the engine is kept for the next request. llama-server closes after 5 s, and a request that meets its
close on the way would be told that the plan is lost."""
_EVENTS = "text/event-stream"
_FORWARDED = ("content-type", "accept")


class _Unavailable(Exception):  # noqa: N818 - a refusal on its way to the client
    """No head can be reached now."""


@dataclass(slots=True)
class _Way:
    """How this node reaches one head."""

    head: HeadOf
    client: "httpx.AsyncClient"
    listener: Listener | None

    async def close(self) -> None:
        await self.client.aclose()
        if self.listener is not None:
            await self.listener.close()


class HeadProxy:
    """Routes of ``/v1/*``. ``tasks`` owns the connections of its tunnels; ``close`` ends them."""

    def __init__(self, view: NodeSnapshotSource, tunnels: Tunnels, node_id: str, tasks: asyncio.TaskGroup) -> None:
        self._view = view
        self._tunnels = tunnels
        self._node_id = node_id
        self._tasks = tasks
        self._ways: dict[str, _Way] = {}
        self._finding = asyncio.Lock()

    def routes(self) -> list[Route]:
        """For the API's application."""
        return [Route("/v1/{path:path}", self.forward, methods=["GET", "POST"], name="engine")]

    async def close(self) -> None:
        """Drop every way."""
        ways, self._ways = list(self._ways.values()), {}
        for way in ways:
            await way.close()

    async def forward(self, request: Request) -> Response:
        """One request to the head of the slot that its ``model`` names."""
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                body = await _body(request)
        except (TimeoutError, ClientDisconnect):
            return _error(408, "body_too_slow", f"the body did not arrive within {BODY_DEADLINE_S:.0f} s")
        if body is None:
            return _error(413, "body_too_large", f"a body may have at most {MAX_BODY_BYTES} bytes")
        try:
            way = await self._way(_model_of(body))
        except _Unavailable as reason:
            return _error(503, "replanning", str(reason), {"retry-after": str(RETRY_AFTER_S)})
        return await self._exchange(way, request, body)

    async def _exchange(self, way: _Way, request: Request, body: bytes) -> Response:
        import httpx

        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        asked = way.client.build_request(
            request.method,
            f"/v1/{request.path_params['path']}",
            params=request.query_params,
            content=body,
            headers=headers,
        )
        try:
            answer = await way.client.send(asked, stream=True)
        except httpx.PoolTimeout:
            return _error(503, "busy", "too many requests are waiting", {"retry-after": str(RETRY_AFTER_S)})
        except httpx.HTTPError as error:
            return _lost(error)
        kept = {"content-type": answer.headers.get("content-type", "application/octet-stream")}
        if kept["content-type"].startswith(_EVENTS):
            kept["cache-control"] = "no-store"
            return StreamingResponse(
                _events(answer), answer.status_code, headers=kept, background=BackgroundTask(answer.aclose)
            )
        try:
            return Response(await _whole(answer), answer.status_code, headers=kept)
        except httpx.HTTPError as error:
            return _lost(error)
        finally:
            await answer.aclose()

    async def _way(self, model: object) -> _Way:
        snapshot = self._view.snapshot()
        slot = choose_slot(snapshot, model)
        if slot is None:
            raise _Unavailable("no model is served, or several and the request names none of them as its model")
        head = find_head(snapshot, slot)
        if head is None:
            raise _Unavailable(f"no plan serves {slot} now; the mesh is planning or loading")
        async with self._finding:
            way = self._ways.get(slot)
            if way is None or way.head != head:
                if way is not None:
                    del self._ways[slot]
                    await way.close()
                way = self._ways[slot] = await self._open(head)
        return way

    async def _open(self, head: HeadOf) -> _Way:
        import httpx

        door, listener = http_door(head.slot), None
        if head.node_id == self._node_id:
            own = self._tunnels.door(door)
            if own is None:
                raise _Unavailable(f"the engine of {head.slot} takes no requests")
            port, secret = own.port, own.secret
        else:
            try:
                answer = await self._tunnels.ask(head.node_id, door)
            except ConnectionError as error:
                raise _Unavailable(f"the head cannot be reached: {error}") from None
            if not answer.open:
                raise _Unavailable(f"the head takes no requests: {answer.reason}")
            listener = await self._tunnels.listen(head.node_id, door, self._tasks)
            port, secret = listener.port, answer.secret
        client = httpx.AsyncClient(
            base_url=f"http://{LOOPBACK}:{port}",
            headers={"authorization": f"Bearer {secret}"},
            timeout=httpx.Timeout(5.0, read=READ_S, pool=30.0),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=2, keepalive_expiry=IDLE_S),
            trust_env=False,
        )
        return _Way(head, client, listener)


async def _body(request: Request) -> bytes | None:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _model_of(body: bytes) -> object:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return document.get("model") if isinstance(document, dict) else None


async def _whole(answer: "httpx.Response") -> bytes:
    import httpx

    body = bytearray()
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise httpx.DecodingError(f"an answer over {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


async def _events(answer: "httpx.Response") -> AsyncIterator[bytes]:
    import httpx

    try:
        async for piece in answer.aiter_bytes():
            yield piece
    except httpx.HTTPError as error:
        yield b"data: " + json.dumps(_document(_LOST.format(type(error).__name__), "plan_lost")).encode() + b"\n\n"
    finally:
        await answer.aclose()  # also when the client has gone: the engine then stops generating for nobody


_LOST = "the plan that served this request was lost ({}); send the request again"


def _lost(error: "httpx.HTTPError") -> Response:
    return _error(502, "plan_lost", _LOST.format(type(error).__name__), {"retry-after": str(RETRY_AFTER_S)})


def _document(message: str, code: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": message, "type": "server_error", "code": code}}


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(_document(message, code), status, headers=headers)
