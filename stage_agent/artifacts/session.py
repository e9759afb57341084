"""One stream to one holder: ask, and take what it grants.

A stream serves many requests in turn. Everything raises what a peer can cause (``PEER_FAULTS``): then the stream is over
and must be dropped, while what had arrived is kept by whoever took it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from config.settings import ArtifactSettings
from protocol.errors import WireError
from protocol.ids import NodeId
from protocol.quic.bulk import BulkReader, BulkWriter
from stage_agent.artifacts.serving import CHUNK_BYTES, measures_no_link
from stage_agent.artifacts.wire import (
    ARTIFACT_KIND,
    MAX_REPLY_BYTES,
    Granted,
    Listed,
    Reply,
    Request,
    decode_reply,
    encode,
    framed,
    read_frame,
)

OpenBulk = Callable[[NodeId, str, bytes], Awaitable[tuple[BulkReader, BulkWriter]]]
PEER_FAULTS = (OSError, EOFError, TimeoutError, WireError)


class HolderSession:
    """A stream to ``peer``, opened by the first ``ask``."""

    def __init__(self, peer: NodeId, open_bulk: OpenBulk, settings: ArtifactSettings) -> None:
        self.peer = peer
        self._open_bulk = open_bulk
        self._settings = settings
        self._stream: tuple[BulkReader, BulkWriter] | None = None
        self._lower_bound = False
        self._owed = False

    async def ask(self, request: Request) -> Reply:
        """The answer, within the reply timeout."""
        self._owed = True
        async with asyncio.timeout(self._settings.reply_timeout_us / 1_000_000):
            if self._stream is None:
                self._stream = await self._open_bulk(self.peer, ARTIFACT_KIND, encode(request))
            else:
                self._stream[1].write(framed(request))
                await self._stream[1].drain()
            reply = decode_reply(await read_frame(self._stream[0], MAX_REPLY_BYTES))
        self._owed = isinstance(reply, Granted) or (isinstance(reply, Listed) and reply.manifest_bytes > 0)
        return reply

    async def chunks(self, granted: Granted) -> AsyncGenerator[bytes, None]:
        """The granted bytes. ``CHUNK_BYTES`` must come within the stall timeout; what came before a fault is yielded."""
        assert self._stream is not None
        reader = self._stream[0]
        if granted.paced and not self._lower_bound:
            self._lower_bound = True
            measures_no_link(reader.meter)
        left = granted.length
        while left:
            chunk, fault = await self._chunk(reader, min(CHUNK_BYTES, left))
            left -= len(chunk)
            if chunk:
                yield chunk
            if fault is not None:
                raise fault
        self._owed = False
        reader.meter.report()

    async def exactly(self, size: int) -> bytes:
        """``size`` bytes that follow an answer."""
        assert self._stream is not None
        async with asyncio.timeout(self._settings.stall_timeout_us / 1_000_000):
            content = await self._stream[0].readexactly(size)
        self._owed = False
        return content

    async def end(self) -> None:
        """Say goodbye when every answer was read, otherwise just go."""
        if self._stream is not None and not self._owed:
            self._stream[0].meter.report()
            await self._stream[1].close()
            self._stream = None
        self.drop()

    def drop(self) -> None:
        """Break the stream off; the session can be used again and then opens another."""
        if self._stream is not None:
            self._stream[0].meter.report()
            self._stream[1].abort()
        self._stream = None
        self._lower_bound = False

    async def _chunk(self, reader: BulkReader, size: int) -> tuple[bytes, Exception | None]:
        parts: list[bytes] = []
        held = 0
        try:
            async with asyncio.timeout(self._settings.stall_timeout_us / 1_000_000):
                while held < size:
                    part = await reader.read(size - held)
                    if not part:
                        return b"".join(parts), EOFError(f"{self.peer} ended the stream early")
                    parts.append(part)
                    held += len(part)
        except (OSError, TimeoutError) as fault:
            return b"".join(parts), fault
        return b"".join(parts), None
