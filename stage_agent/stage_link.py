"""Stage frames over the bulk lane: one outgoing stream per peer, length-prefixed, in order, with back-pressure."""

import asyncio
from collections.abc import Callable

from protocol.frame_envelope import MAX_SEALED_BYTES
from protocol.ids import NodeId
from protocol.quic.bulk import BulkReader, BulkWriter
from protocol.quic.endpoint import QuicTransport

FRAMES_KIND = "stage_frames"
LENGTH_BYTES = 4
QUEUE_FRAMES = 256
"""Frames waiting for one peer; a sender waits beyond that."""


class BulkStageLink:
    """See ``runtimes.interface.StageLink``. A stream that breaks is opened again for the next frame."""

    def __init__(self, transport: QuicTransport, node_id: NodeId) -> None:
        self._transport = transport
        self._node_id = node_id
        self._writers: dict[str, BulkWriter] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self.deliver: Callable[[NodeId, bytes], None] | None = None

    async def send(self, peer: str, sealed: bytes) -> None:
        """Hand over one frame. Raises ``ConnectionError`` when the peer cannot be reached now."""
        if peer == self._node_id:
            assert self.deliver is not None
            self.deliver(self._node_id, sealed)
            return
        async with self._locks.setdefault(peer, asyncio.Lock()):
            writer = self._writers.get(peer)
            try:
                if writer is None:
                    _, writer = await self._transport.open_bulk(NodeId(peer), FRAMES_KIND, b"")
                    self._writers[peer] = writer
                writer.write(len(sealed).to_bytes(LENGTH_BYTES, "big") + sealed)
                await writer.drain()
            except (OSError, TimeoutError) as error:
                self._writers.pop(peer, None)
                raise ConnectionResetError(f"no bulk stream to {peer}: {error}") from None

    def forget(self, peer: NodeId) -> None:
        """The peer's process is gone or new: a stream to the old one would swallow the next frame without a word."""
        writer = self._writers.pop(peer, None)
        if writer is not None:
            writer.abort()

    async def receive(self, peer: NodeId, reader: BulkReader, take: Callable[[NodeId, bytes], None]) -> None:
        """Read frames until the stream ends; an oversized one ends it."""
        while True:
            try:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                if length > MAX_SEALED_BYTES:
                    return
                reader.meter.restart()  # what the sender computes between two frames says nothing of the link
                sealed = await reader.readexactly(length)
                reader.meter.report()
                take(peer, sealed)
            except (EOFError, OSError, TimeoutError):
                return
