"""Real transports on loopback for tests: a mesh of admitted nodes, and waiting for what they report."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from config.settings import ListenSettings, QuicSettings
from protocol.admission import AdmissionBook, make_admission, mesh_id_of
from protocol.messages import Hello
from protocol.quic.conditioner import Conditioner
from protocol.quic.endpoint import QuicTransport
from protocol.quic.identity import Identity
from protocol.quic.interface import JoinDesk, TransportEvent

E = TypeVar("E")
PATIENCE_S = 10.0


def now_us() -> int:
    return time.monotonic_ns() // 1_000


def run(main: Coroutine[Any, Any, None], *, loop: str = "asyncio") -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(main)


class Node:
    """One transport with everything it said."""

    def __init__(
        self,
        identity: Identity,
        name: str,
        book: AdmissionBook,
        *,
        settings: QuicSettings | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        instance: str | None = None,
        boot_counter: int = 1,
        desk: JoinDesk | None = None,
        shapes: Path | None = None,
        addresses: tuple[str, ...] = (),
    ) -> None:
        self.identity, self.name, self.book = identity, name, book
        self.id = identity.node_id
        self.events: list[TransportEvent] = []
        self._news = asyncio.Event()
        self._host = host
        self.transport = QuicTransport(
            identity=identity,
            settings=settings or QuicSettings(),
            listen=ListenSettings(host=host, port=port),
            admission=book,
            mesh_id=book.mesh_id,
            conditioner=Conditioner(str(shapes) if shapes else "", own_id=identity.node_id, own_name=name),
            events=self._take,
            clock_us=now_us,
            hello=Hello(
                mesh_id=book.mesh_id,
                instance=instance or identity.public_key[:16].hex(),
                boot_counter=boot_counter,
                name=name,
                version="test",
                addresses=addresses,
            ),
            desk=desk,
        )

    @property
    def address(self) -> str:
        host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(self._host, self._host)
        return f"[{host}]:{self.transport.port}" if ":" in host else f"{host}:{self.transport.port}"

    def _take(self, event: TransportEvent) -> None:
        self.events.append(event)
        self._news.set()

    def seen(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(
        self, kind: type[E], matches: Callable[[E], bool] = lambda _: True, *, patience_s: float = PATIENCE_S
    ) -> E:
        async with asyncio.timeout(patience_s):
            while True:
                for event in self.seen(kind):
                    if matches(event):
                        return event
                self._news.clear()
                await self._news.wait()

    async def meet(self, other: "Node") -> None:
        """Dial ``other`` and wait until both ends report the connection."""
        self.transport.dial(other.address, other.id)
        await eventually(lambda: other.id in self.transport.connected and self.id in other.transport.connected)


async def eventually(holds: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Until ``holds``; the transport's own sweep is the finest grain there is to see."""
    async with asyncio.timeout(patience_s):
        while not holds():  # noqa: ASYNC110 - looks at state that has no event
            await asyncio.sleep(0.005)


def identities(count: int) -> tuple[list[Identity], list[AdmissionBook]]:
    """``count`` admitted identities, each with its own full book; the first founded the mesh."""
    made = [Identity.generate() for _ in range(count)]
    founder = made[0]
    mesh_id = mesh_id_of("test", founder.public_key)
    statements = [
        make_admission(mesh_id, identity.public_key, signer_public_key=founder.public_key, sign=founder.sign)
        for identity in made
    ]
    return made, [AdmissionBook(mesh_id, statements) for _ in made]


@contextlib.asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    """All transports run inside; at the end they are cancelled and awaited."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.transport.run()) for node in nodes]
        for node in nodes:
            await asyncio.wait_for(node.transport.started.wait(), PATIENCE_S)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


def mesh(*names: str, **options: Any) -> list[Node]:
    """Nodes of one mesh, not running yet. Must be called inside a running loop."""
    made, books = identities(len(names))
    return [Node(identity, name, book, **options) for identity, name, book in zip(made, names, books, strict=True)]
