"""The node's tunnels: doors that its own engines open to peers, and loopback listeners that lead to peers' doors.

A door is a name for one loopback port that an engine *of this node* listens on; only named doors can be reached, never a
port that a peer asks for. A listener accepts on loopback and carries every connection to one door of one peer.
"""

import asyncio
import socket
from dataclasses import dataclass, field
from typing import Protocol

from protocol.errors import WireError
from protocol.ids import NodeId
from protocol.quic.address import HostPort
from protocol.quic.bulk import BulkReader, BulkWriter
from stage_agent.tunnel.ledger import Fault, Ledger, TunnelCounters
from stage_agent.tunnel.relay import relay
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
CONNECT_S = 5.0
ANSWER_S = 5.0
KEEPALIVE_S = 15.0
"""A third of the bulk lane's idle timeout."""
MAX_CONNECTIONS = 8
"""Per listener; more are reset at once. The lane takes 16 bulk streams from one peer."""
MAX_CARRIED = 64
"""Of a node, both ends counted: each is a thread. More are refused as busy."""
MAX_DOORS = 256
PEER_FAULTS = (OSError, EOFError, TimeoutError, WireError)


class BulkOpener(Protocol):
    """The part of the transport that tunnels use."""

    async def open_bulk(self, peer: NodeId, kind: str, header: bytes) -> tuple[BulkReader, BulkWriter]:
        """See ``QuicTransport.open_bulk``."""


@dataclass(frozen=True, slots=True)
class Door:
    """A port of an engine of this node behind a name, on loopback unless the operator trusts a network. ``allowed`` = who may use it; ``None`` = every admitted peer."""

    port: int
    engine: str = ""
    secret: str = ""
    allowed: frozenset[str] | None = None
    host: str = LOOPBACK
    """Another address of this node: peers that are allowed in may go there directly, if they trust the network too."""

    @property
    def direct(self) -> str:
        """Where the engine listens for everybody on that network; empty = loopback."""
        return "" if self.host == LOOPBACK else str(HostPort(self.host, self.port))


@dataclass(slots=True)
class Listener:
    """A loopback port that leads to a peer's door, with its own counters."""

    listening: socket.socket
    port: int
    """On loopback; chosen by the kernel."""
    ledger: Ledger = field(default_factory=Ledger)
    accepting: asyncio.Task[None] | None = None
    carried: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def counters(self) -> TunnelCounters:
        """Of this listener alone, as they stand."""
        return self.ledger.counters()

    async def close(self) -> None:
        """Accept nothing more and reset what is still open; idempotent."""
        tasks = [*self.carried, *([self.accepting] if self.accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.listening.close()


class Tunnels:
    """All tunnels of this node. ``serve`` is the handler of incoming bulk streams of ``TUNNEL_KIND``."""

    def __init__(self, opener: BulkOpener, *, keepalive_s: float = KEEPALIVE_S, ledger: Ledger | None = None) -> None:
        self._opener = opener
        self._keepalive_s = keepalive_s
        self._doors: dict[str, Door] = {}
        self.ledger = ledger if ledger is not None else Ledger()

    @property
    def counters(self) -> TunnelCounters:
        """Of this node, as they stand."""
        return self.ledger.counters()

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
        except PEER_FAULTS as error:
            raise ConnectionRefusedError(f"{peer} cannot be asked: {error or type(error).__name__}") from None
        writer.abort()
        return answer

    async def listen(self, peer: str, name: str, tasks: asyncio.TaskGroup) -> Listener:
        """A listener whose connections are tasks of ``tasks``. The caller closes it."""
        listening = socket.create_server((LOOPBACK, 0))
        listening.setblocking(False)
        listener = Listener(listening, int(listening.getsockname()[1]))
        listener.accepting = tasks.create_task(
            self._accept(listener, peer, name, tasks), name=f"tunnel door to {peer[:8]}"
        )
        return listener

    async def serve(self, peer: NodeId, header: bytes, reader: BulkReader, writer: BulkWriter) -> None:
        """One incoming stream: answer, then carry. Raises what a peer can cause, as bulk handlers may."""
        question = question_of(header)
        door = self._doors.get(question.door)
        if door is None or (door.allowed is not None and peer not in door.allowed):
            await self._refuse(writer, "door", "no such door" if door is None else "not for this peer")
            return
        said = Answer(open=True, engine=door.engine, secret=door.secret, direct=door.direct)
        if question.ask:
            await _answer(writer, said)
            return
        if self.ledger.active >= MAX_CARRIED:
            await self._refuse(writer, "busy", f"{MAX_CARRIED} connections are open here already")
            return
        try:
            local = await _connected(door.host, door.port)
        except (OSError, TimeoutError) as error:
            await self._refuse(writer, "engine", f"the engine does not accept ({type(error).__name__})")
            return
        try:
            await _answer(writer, said)
        except BaseException:
            local.close()
            raise
        await relay(local, (reader, writer), peer, [self.ledger], self._keepalive_s)

    async def _refuse(self, writer: BulkWriter, fault: Fault, reason: str) -> None:
        self.ledger.errors[fault] += 1
        await _answer(writer, Answer(open=False, reason=reason))

    async def _accept(self, listener: Listener, peer: str, name: str, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                local, _ = await loop.sock_accept(listener.listening)
            except OSError:  # the client is gone already, or descriptors ran out: both pass
                await asyncio.sleep(0.1)
                continue
            local.setblocking(False)
            local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(listener.carried) >= MAX_CONNECTIONS or self.ledger.active >= MAX_CARRIED:
                self._count(listener, "busy")
                local.close()
                continue
            task = tasks.create_task(self._carry(listener, peer, name, local), name=f"tunnel to {peer}")
            listener.carried.add(task)
            task.add_done_callback(listener.carried.discard)

    async def _carry(self, listener: Listener, peer: str, name: str, local: socket.socket) -> None:
        try:
            reader, writer, answer = await self._knock(peer, Question(door=name))
            if not answer.open:
                writer.abort()
                raise ConnectionRefusedError(answer.reason)
        except PEER_FAULTS:
            self._count(listener, "peer")
            local.close()
            return
        except asyncio.CancelledError:
            local.close()
            raise
        try:
            await relay(local, (reader, writer), peer, [self.ledger, listener.ledger], self._keepalive_s)
        except PEER_FAULTS:
            self._count(listener, "reset")

    def _count(self, listener: Listener, fault: Fault) -> None:
        self.ledger.errors[fault] += 1
        listener.ledger.errors[fault] += 1

    async def _knock(self, peer: str, question: Question) -> tuple[BulkReader, BulkWriter, Answer]:
        reader, writer = await self._opener.open_bulk(NodeId(peer), TUNNEL_KIND, question_bytes(question))
        try:
            async with asyncio.timeout(CONNECT_S + ANSWER_S):
                return reader, writer, await _read_answer(reader)
        except BaseException:
            writer.abort()
            raise


async def _connected(host: str, port: int) -> socket.socket:
    """To an engine of this node. Raises ``OSError`` or ``TimeoutError``."""
    local = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        local.setblocking(False)
        local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(local, (host, port))
    except BaseException:
        local.close()
        raise
    return local


async def _answer(writer: BulkWriter, answer: Answer) -> None:
    writer.write(answer_bytes(answer))
    await writer.drain()


async def _read_answer(reader: BulkReader) -> Answer:
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
