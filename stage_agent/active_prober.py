"""Carries out active bandwidth probes over the bulk lane, and serves those of peers. Decides nothing (``active_probe``).

A stream of kind ``bandwidth_probe`` has the size as its header (8 bytes, big-endian). The receiver says ``TAKEN`` or hangs
up, the sender sends that many bytes, the receiver says ``DONE`` when it has read them all; a sender's time ends with that,
so that nothing that still lies in its own buffers counts as carried. Both ends' figures go the way of every transfer's.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import assert_never

from protocol.ids import NodeId
from protocol.links.active_probe import PEERS_MAX, AbortProbe, ActiveProbe, Effect, StartProbe
from protocol.quic.bulk import BUFFER_BYTES, PIECE_BYTES, BulkReader, BulkWriter

PROBE_KIND = "bandwidth_probe"
SIZE_BYTES = 8
TAKEN = b"\x01"
DONE = b"\x02"
PROBE_S = 30.0
"""A probe that takes longer is given up: the link carries less than anything that is planned for."""
LOOK_S = 1.0
WATCH_S = 0.02
"""How soon traffic is noticed while a probe runs."""
SAMPLE_LATE_US = 1_000_000
"""A probe's last sample is told no later than this after its end."""
QUIET_US = 2_000_000
"""Traffic is over when nothing moved for this long: tokens come in breaths."""

OpenBulk = Callable[[NodeId, str, bytes], Awaitable[tuple[BulkReader, BulkWriter]]]


class ActiveProber:
    """The shell of one node's probes.

    ``unknown``: connected peers without a sending bandwidth. ``moved``: changes with every byte of other traffic here;
    ``busy``: there is other traffic even if nothing moves now. ``carried`` counts bytes of probes by direction.
    """

    def __init__(
        self,
        core: ActiveProbe,
        *,
        open_bulk: OpenBulk,
        unknown: Callable[[], Collection[NodeId]],
        moved: Callable[[], int],
        busy: Callable[[], bool],
        carried: Counter[str],
        clock_us: Callable[[], int],
    ) -> None:
        self._core = core
        self._open_bulk = open_bulk
        self._unknown = unknown
        self._moved = moved
        self._busy = busy
        self._carried = carried
        self._clock_us = clock_us
        self._last_moved = moved()
        self._quiet_us: int | None = None
        """When the traffic that was seen is over; ``None`` = there is none."""
        self._probe: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._spans: dict[NodeId, tuple[int, int | None]] = {}
        """When the latest probe with each peer began and ended, whoever sent it."""

    def explains(self, peer: NodeId, sample_us: int) -> bool:
        """Whether a bandwidth sample of that moment came from a probe, as far as this process remembers."""
        begun_us, ended_us = self._spans.get(peer, (sample_us + 1, None))
        return begun_us <= sample_us and (ended_us is None or sample_us <= ended_us + SAMPLE_LATE_US)

    async def run(self) -> None:
        """Until cancelled; at once over when probing is off."""
        if not self._core.enabled:
            return
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                self._look()
                now_us, due_us = self._clock_us(), self._core.next_deadline()
                if due_us is not None and due_us <= now_us:
                    self._carry(self._core.on_timer(self._unknown(), now_us))
                await self._pause()

    async def serve(self, peer: NodeId, header: bytes, reader: BulkReader, writer: BulkWriter) -> None:
        """A peer's probe: read and thrown away, or refused by returning."""
        self._look()
        size = int.from_bytes(header, "big") if len(header) == SIZE_BYTES else 0
        if not self._core.asked(peer, size, self._clock_us()):
            return
        # A cancelled child ends its group in order: to be called off is no error.
        async with asyncio.TaskGroup() as group:
            self._probe = group.create_task(self._drink(peer, size, reader, writer), name=f"probe from {peer}")
            self._begun.set()

    def _look(self) -> None:
        now_us, moved = self._clock_us(), self._moved()
        if moved != self._last_moved or self._busy():
            self._last_moved = moved
            begins, self._quiet_us = self._quiet_us is None, now_us + QUIET_US
            if begins:
                self._carry(self._core.traffic_started(now_us))
        elif self._quiet_us is not None and now_us >= self._quiet_us:
            self._quiet_us = None
            self._core.traffic_ended(now_us)

    def _carry(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartProbe(peer, size):
                    assert self._tasks is not None
                    self._probe = self._tasks.create_task(self._send(peer, size), name=f"probe to {peer}")
                case AbortProbe():
                    assert self._probe is not None
                    # A task that is cancelled before its first step would never answer the core.
                    asyncio.get_running_loop().call_soon(self._probe.cancel)
                case _:
                    assert_never(effect)

    async def _pause(self) -> None:
        if self._core.running:
            await asyncio.sleep(WATCH_S)
            return
        self._begun.clear()
        due_us = self._core.next_deadline()
        wait_s = LOOK_S if due_us is None else min(LOOK_S, max(0, due_us - self._clock_us()) / 1e6)
        try:
            async with asyncio.timeout(wait_s):
                await self._begun.wait()
        except TimeoutError:
            return

    def _begins(self, peer: NodeId) -> int:
        self._spans.pop(peer, None)
        while len(self._spans) >= PEERS_MAX:
            del self._spans[next(iter(self._spans))]
        begun_us = self._clock_us()
        self._spans[peer] = begun_us, None
        return begun_us

    async def _send(self, peer: NodeId, size: int) -> None:
        outgoing = _Outgoing(size, self._carried, self._clock_us)
        begun_us = self._begins(peer)
        try:
            async with asyncio.timeout(PROBE_S):
                await outgoing.run(*await self._open_bulk(peer, PROBE_KIND, size.to_bytes(SIZE_BYTES, "big")))
        except (EOFError, OSError, TimeoutError):
            pass  # refused, gone or too slow: which of them, the figures say
        finally:
            outgoing.close()
            self._spans[peer] = begun_us, self._clock_us()
            if outgoing.taken:
                self._core.finished(peer, outgoing.sent, outgoing.duration_us, self._clock_us())
            else:
                self._core.refused(peer, self._clock_us())

    async def _drink(self, peer: NodeId, size: int, reader: BulkReader, writer: BulkWriter) -> None:
        # Where this end breaks off, what is under way comes nevertheless: all of it is charged.
        got, charged, whole = 0, size, False
        begun_us = self._begins(peer)
        try:
            async with asyncio.timeout(PROBE_S):
                writer.write(TAKEN)
                await writer.drain()
                while got < size and (part := await reader.read(min(size - got, BUFFER_BYTES))):
                    if got == 0:
                        reader.meter.restart()  # how long the peer took to begin says nothing of the link
                    got += len(part)
                    self._carried["received"] += len(part)
                charged, whole = got, got == size
                if whole:
                    reader.meter.report()
                    writer.write(DONE)
                    await writer.drain()
        except TimeoutError:
            pass
        except OSError:
            charged = got
        finally:
            if not whole:
                writer.abort()  # a mere end would leave the sender sending
            self._spans[peer] = begun_us, self._clock_us()
            self._core.received(peer, charged, self._clock_us())


class _Outgoing:
    """One probe on its stream."""

    def __init__(self, size: int, carried: Counter[str], clock_us: Callable[[], int]) -> None:
        self._size = size
        self._carried = carried
        self._clock_us = clock_us
        self._writer: BulkWriter | None = None
        self.taken = False
        self.sent = 0
        self.duration_us: int | None = None

    async def run(self, reader: BulkReader, writer: BulkWriter) -> None:
        """Raises ``EOFError`` when the peer refuses or breaks off, ``OSError`` or ``TimeoutError`` when it is gone."""
        self._writer = writer
        await reader.readexactly(len(TAKEN))
        self.taken = True
        piece = os.urandom(PIECE_BYTES)  # a VPN that compresses must not look fast
        began_us = self._clock_us()
        while self.sent < self._size:
            part = memoryview(piece)[: self._size - self.sent]
            self.sent += len(part)
            self._carried["sent"] += len(part)
            writer.write(part)
            await writer.drain()
        waited_us = writer.meter.begin()
        await reader.readexactly(len(DONE))
        writer.meter.moved(0, waited_us)
        self.duration_us = self._clock_us() - began_us
        await writer.close()

    def close(self) -> None:
        """After a probe that broke off nothing more may leave."""
        if self._writer is not None and self.duration_us is None:
            self._writer.abort()
