"""The node's tunnels: doors that its own engines open to peers, and loopback listeners that lead to peers' doors.

A door is a name for one loopback port that an engine *of this node* listens on; only named doors can be reached, never a
port that a peer asks for. A listener accepts on loopback and carries every connection to one door of one peer.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import WireError
from protocol.ids import NodeId
from stage_agent.tunnel.relay import FAULTS, KEEPALIVE_S, ByteReader, ByteWriter, Relay, TunnelCounters
from stage_agent.tunnel.wire import (
    ANSWER_MAX_BYTES,
    LENGTH_BYTES,
    TUNNEL_KIND,
    Answer,
    Question,
    answer_bytes,
    answer_of,
    question_bytes,
    question_of,
)

LOOPBACK = "127.0.0.1"
BUFFER_BYTES = 1_048_576
CONNECT_S = 5.0
ANSWER_S = 5.0
MAX_CONNECTIONS = 8
"""Per listener; more are reset at once. The lane takes 16 bulk streams from one peer."""
MAX_DOORS = 256


class BulkOpener(Protocol):
    """The part of the transport that tunnels use."""

    async def open_bulk(self, peer: NodeId, kind: str, header: bytes) -> tuple[ByteReader, ByteWriter]:
        """See ``QuicTransport.open_bulk``."""


@dataclass(frozen=True, slots=True)
class Door:
    """A loopback port of this node behind a name. ``allowed`` = who may use it; ``None`` = every admitted peer."""

    port: int
    engine: str = ""
    secret: str = ""
    allowed: frozenset[str] | None = None


@dataclass(slots=True)
class Listener:
    """A loopback port that leads to a peer's door, with its own counters."""

    server: asyncio.Server
    port: int
    """On loopback; chosen by the kernel."""
    counters: TunnelCounters = field(default_factory=TunnelCounters)
    carried: set[asyncio.Task[None]] = field(default_factory=set)

    async def close(self) -> None:
        """Accept nothing more and reset what is still open; idempotent."""
        self.server.close()
        tasks = tuple(self.carried)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Tunnels:
    """All tunnels of this node. ``serve`` is the handler of incoming bulk streams of ``TUNNEL_KIND``."""

    def __init__(self, opener: BulkOpener, *, keepalive_s: float = KEEPALIVE_S) -> None:
        self._opener = opener
        self._keepalive_s = keepalive_s
        self._doors: dict[str, Door] = {}
        self.counters = TunnelCounters()

    def open_door(self, name: str, door: Door) -> None:
        """Let peers in; replaces a door of that name."""
        assert len(self._doors) < MAX_DOORS or name in self._doors, len(self._doors)
        self._doors[name] = door

    def close_door(self, name: str, door: Door) -> None:
        """Let nobody new in; nothing when ``name`` is another door by now. Open connections end with their engine."""
        if self._doors.get(name) == door:
            del self._doors[name]

    def door(self, name: str) -> Door | None:
        """This node's own door."""
        return self._doors.get(name)

    async def ask(self, peer: str, name: str) -> Answer:
        """Whether ``peer`` has that door open. Raises ``ConnectionError`` when it cannot be asked now."""
        try:
            _, writer, answer = await self._knock(peer, Question(door=name, ask=True))
        except FAULTS as error:
            raise ConnectionRefusedError(f"{peer} cannot be asked: {error or type(error).__name__}") from None
        writer.abort()
        return answer

    async def listen(self, peer: str, name: str, tasks: asyncio.TaskGroup) -> Listener:
        """A listener whose connections are tasks of ``tasks``. The caller closes it."""

        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(listener.carried) >= MAX_CONNECTIONS:
                writer.transport.abort()
                return
            task = tasks.create_task(self._carry(listener, peer, name, reader, writer), name=f"tunnel to {peer}")
            listener.carried.add(task)
            task.add_done_callback(listener.carried.discard)

        server = await asyncio.start_server(accepted, LOOPBACK, 0, limit=BUFFER_BYTES)
        listener = Listener(server, int(server.sockets[0].getsockname()[1]))
        return listener

    async def serve(self, peer: NodeId, header: bytes, reader: ByteReader, writer: ByteWriter) -> None:
        """One incoming stream: answer, then carry. Raises ``WireError`` for a malformed question."""
        question = question_of(header)
        door = self._doors.get(question.door)
        if door is None or (door.allowed is not None and peer not in door.allowed):
            self.counters.refused += 1
            await _answer(writer, Answer(open=False, reason="no such door" if door is None else "not for this peer"))
            return
        said = Answer(open=True, engine=door.engine, secret=door.secret)
        if question.ask:
            await _answer(writer, said)
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                local = await asyncio.open_connection(LOOPBACK, door.port, limit=BUFFER_BYTES)
        except (OSError, TimeoutError) as error:
            self.counters.refused += 1
            await _answer(writer, Answer(open=False, reason=f"the engine does not accept ({type(error).__name__})"))
            return
        await _answer(writer, said)
        await Relay(*local, reader, writer, [self.counters], self._keepalive_s).run()

    async def _carry(
        self, listener: Listener, peer: str, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far_writer, answer = await self._knock(peer, Question(door=name))
        except FAULTS:
            answer = None
        if answer is None or not answer.open:
            self.counters.refused += 1
            listener.counters.refused += 1
            writer.transport.abort()
            if answer is not None:
                far_writer.abort()
            return
        totals = [self.counters, listener.counters]
        await Relay(reader, writer, far_reader, far_writer, totals, self._keepalive_s).run()

    async def _knock(self, peer: str, question: Question) -> tuple[ByteReader, ByteWriter, Answer]:
        reader, writer = await self._opener.open_bulk(NodeId(peer), TUNNEL_KIND, question_bytes(question))
        try:
            async with asyncio.timeout(CONNECT_S + ANSWER_S):
                return reader, writer, await _read_answer(reader)
        except BaseException:
            writer.abort()
            raise


async def _answer(writer: ByteWriter, answer: Answer) -> None:
    writer.write(answer_bytes(answer))
    await writer.drain()


async def _read_answer(reader: ByteReader) -> Answer:
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if size > ANSWER_MAX_BYTES:
        raise WireError("oversized", f"a tunnel's answer of {size} bytes is over {ANSWER_MAX_BYTES}")
    return answer_of(await reader.readexactly(size))


def rpc_door(slot: str, epoch: str) -> str:
    """The door of a plan's rpc-server."""
    return f"rpc/{slot}/{epoch}"


def http_door(slot: str) -> str:
    """The door of the slot's present head."""
    return f"http/{slot}"
