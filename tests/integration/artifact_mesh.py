"""Nodes with artifacts over real transports: who holds what, who was assigned what, and everything they reported."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.settings import ArtifactSettings
from protocol.ballots import StageAssignment
from protocol.errors import ModelError
from protocol.rows import ModelFact, NodeRow, StageFact
from protocol.wire import Epoch
from stage_agent.artifacts.node_artifacts import NodeArtifacts, Surroundings
from stage_agent.artifacts.wire import ARTIFACT_KIND
from stage_agent.model_source import open_model
from tests.integration.transport_mesh import Node, mesh, now_us, running

if TYPE_CHECKING:
    from protocol.ids import NodeId
    from stage_agent.artifacts.events import ArtifactEvent

Act = Callable[[bytearray, int], bool]
QUICK = {
    "mode": "trusted",
    "free_bytes_min": 0,
    "give_up_us": 700_000,
    "stall_timeout_us": 1_500_000,
    "reply_timeout_us": 3_000_000,
}


class Holder:
    """One node: a transport, its artifacts, and the rows that it has been told."""

    def __init__(self, node: Node, root: Path, model: Path | None, group: asyncio.TaskGroup, **settings: Any) -> None:
        self.node, self.root = node, root
        self.id: NodeId = node.id
        self.models: dict[str, Path] = {}
        if model is not None:
            self.models[open_model(model).digest] = model
        self.rows: dict[NodeId, NodeRow] = {}
        self.events: list[ArtifactEvent] = []
        self.progress: list[tuple[int, int]] = []
        self.artifacts = NodeArtifacts(
            ArtifactSettings(**(QUICK | settings)),
            root,
            Surroundings(
                open_bulk=node.transport.open_bulk,
                rows=self.rows.values,
                admitted=node.book.__contains__,
                local_models=lambda: self.models,
                find_local=self._find,
                report=self.events.append,
                clock_us=now_us,
                start=lambda work, name: group.create_task(work, name=name),
                changed=lambda: None,
            ),
        )
        node.transport.on_bulk = self._on_bulk

    async def _on_bulk(self, peer, kind, header, reader, writer) -> None:
        assert kind == ARTIFACT_KIND
        await self.artifacts.on_bulk(peer, header, reader, writer)

    def _find(self, assignment: StageAssignment) -> Path:
        if assignment.model_digest not in self.models:
            raise ModelError("the model is not here: copy the file from the node that serves it")
        return self.models[assignment.model_digest]

    async def ensure(self, assignment: StageAssignment) -> Path:
        return await self.artifacts.ensure(assignment, lambda here, total: self.progress.append((here, total)))

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def assignment_of(digest: str, start: int, end: int, **more: Any) -> StageAssignment:
    return StageAssignment(
        slot="default",
        stage_index=0,
        stage_count=1,
        node_id="me",
        instance="ab" * 16,
        model_digest=digest,
        model_source="/nowhere/model",
        layer_start=start,
        layer_end=end,
        roles=(),
        required_bytes=1,
        parameter_bytes=1,
        context_length=16,
        lanes=1,
        **more,
    )


def row_of(node: Node, *, holds: tuple[str, ...] = (), stage: StageAssignment | None = None) -> NodeRow:
    """What the node would gossip: models it offers whole, and the stage it is loading."""
    stages = ()
    if stage is not None:
        stages = (
            StageFact(
                slot="default",
                state="loading",
                accepted=Epoch(term=1, node_id="coordinator", instance="cd" * 16),
                model_digest=stage.model_digest,
                layer_start=stage.layer_start,
                layer_end=stage.layer_end,
            ),
        )
    return NodeRow(
        node_id=node.id,
        public_key=node.identity.public_key,
        boot_counter=1,
        seq=1,
        instance="ab" * 16,
        name=node.name,
        version="test",
        models=tuple(ModelFact(digest=digest, cached_bytes=1, artifact_transfer=True) for digest in holds),
        stages=stages,
    )


@contextlib.asynccontextmanager
async def holders(
    tmp_path: Path, models: dict[str, Path | None], *, settings: dict[str, dict[str, Any]] | None = None, **options: Any
) -> AsyncIterator[list[Holder]]:
    """One running, connected node per name; every one knows which models the others hold. Nobody is assigned anything."""
    nodes = mesh(*models, **options)
    async with running(*nodes), asyncio.TaskGroup() as group:
        made = [
            Holder(
                node, tmp_path / f"cache-{node.name}", models[node.name], group, **(settings or {}).get(node.name, {})
            )
            for node in nodes
        ]
        for index, node in enumerate(nodes):
            for other in nodes[index + 1 :]:
                await node.meet(other)
        for one in made:
            await one.artifacts.prepare()
            one.rows.update({each.id: row_of(each.node, holds=tuple(each.models)) for each in made if each is not one})
        yield made


def asked_for(sha256: str, *holders: Holder) -> list[Holder]:
    """Equal holders in the order in which they are asked for a file."""
    ranked = sorted(holders, key=lambda holder: holder.id)
    first = int(sha256[:8], 16) % len(ranked)
    return ranked[first:] + ranked[:first]


def assign(to: Holder, stage: StageAssignment, *told: Holder) -> None:
    """The others learn from ``to``'s row that it loads ``stage``."""
    for other in told:
        other.rows[to.id] = row_of(to.node, holds=tuple(to.models), stage=stage)


class Tampered:
    """A writer that changes what contains byte ``at`` of the stream; when ``act`` says so, that write is the last one."""

    def __init__(self, writer: Any, at: int, act: Act) -> None:
        self._writer, self._left, self._act, self._over = writer, at, act, False

    def write(self, data) -> None:
        if self._over:
            raise ConnectionResetError("this end hung up")
        content = bytearray(data)
        if 0 <= self._left < len(content):
            self._over = self._act(content, self._left)
        self._left -= len(data)
        self._writer.write(bytes(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


def tamper(holder: Holder, at: int, act: Act, *, times: int = 10**9) -> list[int]:
    """The holder's next ``times`` streams are written through ``act`` at byte ``at``; returns the bytes asked from where."""
    from stage_agent.artifacts.wire import FileRequest, decode_request

    offsets: list[int] = []

    async def on_bulk(peer, _kind, header, reader, writer) -> None:
        request = decode_request(header)
        if isinstance(request, FileRequest):
            offsets.append(request.offset)
            if len(offsets) <= times:
                writer = Tampered(writer, at, act)
        await holder.artifacts.on_bulk(peer, header, reader, writer)

    holder.node.transport.on_bulk = on_bulk
    return offsets


def flip(content: bytearray, index: int) -> bool:
    content[index] ^= 0xFF
    return False


def hang_up(content: bytearray, index: int) -> bool:
    """What was written before still leaves; then the stream ends."""
    del content[index:]
    return True


def flip_then_hang_up(content: bytearray, index: int) -> bool:
    return flip(content, index // 2) or hang_up(content, index)
