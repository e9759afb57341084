"""Carries one connection: a loopback socket on this side, a bulk stream on the other, both directions at once.

Back-pressure is the sockets' own: nothing is read from one side before the other has room. Half-close is carried as a
frame. When either side breaks, both are reset, so that the engine at each end sees a broken connection, not silence.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import WireError
from stage_agent.tunnel.wire import CHUNK_BYTES, END, KEEPALIVE, KEEPALIVE_LENGTH, LENGTH_BYTES

JOINED_BYTES = 16_384
"""Up to here length and bytes are copied into one write, one TLS record: cheaper than two."""
KEEPALIVE_S = 15.0
"""A third of the bulk lane's idle timeout."""
FAULTS = (OSError, EOFError, TimeoutError, WireError)


class ByteReader(Protocol):
    """The receiving half of a bulk stream."""

    async def read(self, limit: int) -> bytes:
        """Up to ``limit`` bytes; empty at the end."""

    async def readexactly(self, size: int) -> bytes:
        """Exactly ``size`` bytes, or ``asyncio.IncompleteReadError``."""


class ByteWriter(Protocol):
    """The sending half of a bulk stream."""

    def write(self, data: bytes) -> None:
        """Hand over bytes."""

    async def drain(self) -> None:
        """Wait until there is room."""

    async def close(self) -> None:
        """Flush and end."""

    def abort(self) -> None:
        """Drop at once."""


@dataclass(slots=True)
class TunnelCounters:
    """Totals of this node since its start; ``active`` is the present number."""

    sent_bytes: int = 0
    received_bytes: int = 0
    opened: int = 0
    refused: int = 0
    broken: int = 0
    active: int = 0


@dataclass(slots=True)
class Relay:
    """One connection. ``run`` ends when both directions have ended, or at the first fault."""

    local_reader: asyncio.StreamReader
    local_writer: asyncio.StreamWriter
    reader: ByteReader
    writer: ByteWriter
    totals: list[TunnelCounters]
    """All of them count every byte."""
    keepalive_s: float = KEEPALIVE_S
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _quiet: bool = True

    async def run(self) -> bool:
        """Whether it ended in order; a peer's or an engine's fault resets both sides and gives false. Never raises those."""
        for total in self.totals:
            total.opened += 1
            total.active += 1
        whole = False
        try:
            async with asyncio.TaskGroup() as group:
                both = [
                    group.create_task(self._outwards(), name="tunnel out"),
                    group.create_task(self._inwards(), name="tunnel in"),
                ]
                keeping = group.create_task(self._keep_alive(), name="tunnel keepalive")
                await asyncio.wait(both, return_when=asyncio.ALL_COMPLETED)
                keeping.cancel()
            whole = True
        except* FAULTS:
            pass
        finally:
            for total in self.totals:
                total.active -= 1
                total.broken += not whole
            if not whole:
                self.writer.abort()
                self.local_writer.transport.abort()
        if whole:
            self.local_writer.close()
            await self.writer.close()
        return whole

    async def _outwards(self) -> None:
        while data := await self.local_reader.read(CHUNK_BYTES):
            length = len(data).to_bytes(LENGTH_BYTES, "big")
            await self._send(length + data) if len(data) <= JOINED_BYTES else await self._send(length, data)
            for total in self.totals:
                total.sent_bytes += len(data)
        await self._send(END)

    async def _inwards(self) -> None:
        while length := int.from_bytes(await self.reader.readexactly(LENGTH_BYTES), "big"):
            if length == KEEPALIVE_LENGTH:
                continue
            if length > CHUNK_BYTES:
                raise WireError("oversized", f"a tunnel chunk of {length} bytes is over {CHUNK_BYTES}")
            while length:
                data = await self.reader.read(length)
                if not data:
                    raise EOFError("the tunnel's stream ended inside a chunk")
                length -= len(data)
                self.local_writer.write(data)
                await self.local_writer.drain()
                for total in self.totals:
                    total.received_bytes += len(data)
        if self.local_writer.can_write_eof():
            self.local_writer.write_eof()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self.keepalive_s)
            if self._quiet:
                await self._send(KEEPALIVE)
            self._quiet = True

    async def _send(self, *parts: bytes) -> None:
        # A drain may pause between two pieces: without the lock another write could land inside a chunk.
        async with self._lock:
            self._quiet = False
            for part in parts:
                self.writer.write(part)
            await self.writer.drain()
