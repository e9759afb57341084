"""When an engine counts as ready: its port accepts, a line appeared, or HTTP answers 200."""

import asyncio
import contextlib
import socket

import httpx

from config.settings import RuntimeSettings
from stage_agent.runtimes.engine import Engine
from stage_agent.runtimes.interface import RuntimeFailure

_POLL_SECONDS = 0.1
_ATTEMPT_SECONDS = 2.0
LOOPBACK = "127.0.0.1"


async def until_ready(settings: RuntimeSettings, engine: Engine, port: int) -> None:
    """Returns when the engine is ready; for ever otherwise: the caller has the deadline and watches for the exit.

    The port is only connected to and closed again: engines such as llama.cpp's rpc-server serve one client at a time and
    may die when a probe speaks and leaves.
    """
    match settings.ready:
        case "log":
            await engine.line_seen.wait()
        case "port":
            while not await _accepts(port):  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(_POLL_SECONDS)
        case "http":
            url = f"http://{LOOPBACK}:{port}{settings.ready_http_path}"
            async with httpx.AsyncClient(timeout=_ATTEMPT_SECONDS, trust_env=False) as client:
                while not await _answers(client, url):  # noqa: ASYNC110 - another process decides
                    await asyncio.sleep(_POLL_SECONDS)


def free_port(first: int, last: int) -> int:
    """The first port in the range that can be bound on loopback. Raises ``RuntimeFailure`` when there is none."""
    for port in range(first, last + 1):
        with socket.socket() as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                attempt.bind((LOOPBACK, port))
                return port
    raise RuntimeFailure(
        "engine_not_ready", f"no free port between {first} and {last}: set runtime.port_first and _last"
    )


async def _accepts(port: int) -> bool:
    try:
        async with asyncio.timeout(_ATTEMPT_SECONDS):
            _, writer = await asyncio.open_connection(LOOPBACK, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
