"""One connection from the event loop's side: lent to its thread, watched, ended, counted, closed.

When either side breaks, both are reset, so that the engine at each end sees a broken connection, not silence.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from protocol.quic.bulk import BulkReader, BulkWriter
from protocol.quic.interface import Direction, LimitedBy
from stage_agent.tunnel.ledger import Fault, Ledger
from stage_agent.tunnel.pump import Pump, Terms

_RESET = struct.pack("ii", 1, 0)


async def relay(
    local: socket.socket,
    stream: tuple[BulkReader, BulkWriter],
    peer: str,
    ledgers: Sequence[Ledger],
    keepalive_s: float,
) -> None:
    """Carry until both directions have ended, or either side breaks. Cancelling breaks both. Closes everything.

    Every ledger counts. Raises ``OSError`` or ``TimeoutError`` when the stream broke before it was lent.
    """
    reader, writer = stream
    try:
        loan = await writer.lend(reader)
    except BaseException:
        local.close()
        writer.abort()
        raise
    loop = asyncio.get_running_loop()

    def observe(direction: Direction, size: int, duration_us: int, limit: LimitedBy) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            loop.call_soon_threadsafe(loan.observe, direction, size, duration_us, limit)

    terms = Terms(keepalive_s, loan.idle_s, loan.link, observe)
    pump = Pump(local, loan.channel, loan.early, terms)
    for ledger in ledgers:
        ledger.begin(peer, pump)
    ended = in_thread(pump.run, f"tunnel {peer[:8]}")

    def over(future: "asyncio.Future[Fault | None]") -> None:
        fault: Fault | None = "reset" if future.exception() is not None else future.result()
        for ledger in ledgers:
            ledger.end(pump, fault)
        if fault is not None:
            with contextlib.suppress(OSError):
                local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        local.close()
        loan.give_back()

    ended.add_done_callback(over)
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        pump.stop()
        while not ended.done():  # a moment: nothing in the thread blocks, and its sockets must outlive it
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
        raise


def in_thread(call: Callable[[], Fault | None], name: str) -> "asyncio.Future[Fault | None]":
    """Run ``call`` in a thread of its own that does not outlive the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Fault | None] = loop.create_future()

    def settle(result: Fault | None, error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def body() -> None:
        result: Fault | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as caught:  # noqa: BLE001 - it goes on where the caller waits
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future
