"""What a client sees of ``/v1/*``: the engine's answer, or always the same kinds of clear error."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette

from stage_agent.router.proxy import MAX_BODY_BYTES, RETRY_AFTER_S, HeadProxy
from stage_agent.tunnel.tunnels import Door, Tunnels, http_door
from tests.unit.router.test_heads import snapshot, stage

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
EVENT = b"data: {}\n\n"


class View:
    """What the node knows, changed by the test."""

    def __init__(self, shown) -> None:
        self.shown = shown

    def snapshot(self):
        return self.shown


class Unreachable:
    """No peer can be reached."""

    async def open_bulk(self, peer, _kind, _header):
        raise ConnectionRefusedError(f"{peer} is not connected")


@asynccontextmanager
async def client_of(answer=b"", shown=None):
    """A client of the proxy on node ``me``, whose own engine says ``answer`` and hangs up; and what the engine was asked."""
    asked: list[bytes] = []

    async def engine(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        asked.append(head + await reader.readexactly(size))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    tunnels = Tunnels(Unreachable())
    tunnels.open_door(http_door("default"), Door(server.sockets[0].getsockname()[1], secret="the engine's key"))
    view = View(snapshot(stage("me", 3)) if shown is None else shown)
    async with asyncio.TaskGroup() as tasks, server:
        proxy = HeadProxy(view, tunnels, "me", tasks)
        transport = httpx.ASGITransport(Starlette(routes=proxy.routes()))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            yield client, asked
        await proxy.close()


def whole(content_type: bytes, body: bytes) -> bytes:
    return HEAD % content_type + b"content-length: %d\r\n\r\n" % len(body) + body


def error_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_request_gets_the_engine_s_answer_and_the_engine_its_own_key_instead_of_the_client_s() -> None:
    async def main():
        async with client_of(whole(b"application/json", b'{"ok": 1}')) as (client, asked):
            answer = await client.post(
                "/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer mine"}
            )
            assert (answer.status_code, answer.json()) == (200, {"ok": 1})
            assert b"Bearer the engine's key" in asked[0]
            assert b"mine" not in asked[0]
            assert b'"prompt"' in asked[0]

    asyncio.run(main())


def test_while_the_mesh_replans_the_client_is_told_when_to_come_back_and_nothing_is_sent() -> None:
    async def main():
        async with client_of(shown=snapshot(stage("me", 3, state="loading"))) as (client, asked):
            answer = await client.post("/v1/completions", json={})
            assert error_of(answer) == (503, "replanning")
            assert answer.headers["retry-after"] == str(RETRY_AFTER_S)
            assert asked == []

    asyncio.run(main())


def test_a_head_that_cannot_be_reached_is_a_503_too() -> None:
    async def main():
        async with client_of(shown=snapshot(stage("far", 3))) as (client, _):
            answer = await client.get("/v1/models")
            assert error_of(answer) == (503, "replanning")
            assert "cannot be reached" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_a_plan_that_dies_before_its_answer_began_or_in_the_middle_of_it_is_a_502_to_send_again() -> None:
    async def main():
        for cut in (b"", HEAD % b"application/json" + b'content-length: 99\r\n\r\n{"half'):
            async with client_of(cut) as (client, asked):
                answer = await client.post("/v1/completions", json={})
                assert error_of(answer) == (502, "plan_lost")
                assert "send the request again" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"]
                assert len(asked) == 1  # never sent twice: the engine may have begun

    asyncio.run(main())


def test_a_plan_that_dies_in_the_middle_of_a_stream_ends_it_with_an_event_that_says_so() -> None:
    async def main():
        chunk = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
        async with client_of(HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n" + chunk) as (
            client,
            _,
        ):
            answer = await client.post("/v1/completions", json={"stream": True})
            events = [line for line in answer.text.splitlines() if line]
            assert events[0] == "data: {}"
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "plan_lost"

    asyncio.run(main())


def test_a_body_over_the_limit_is_refused_before_the_engine_sees_it() -> None:
    async def main():
        async with client_of(whole(b"application/json", b"{}")) as (client, asked):
            answer = await client.post("/v1/completions", content=bytes(MAX_BODY_BYTES + 1))
            assert error_of(answer) == (413, "body_too_large")
            assert asked == []

    asyncio.run(main())
