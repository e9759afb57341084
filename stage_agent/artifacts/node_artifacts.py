"""One node's artifacts, put together: what the composition root builds, and everything the rest of the node calls."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.settings import ArtifactSettings
from coordinator.model.package import ModelPackage
from protocol.ballots import StageAssignment
from protocol.errors import ModelError
from protocol.ids import NodeId
from protocol.quic.bulk import BulkReader, BulkWriter
from protocol.rows import ModelFact, NodeRow
from stage_agent.artifacts.assembly import Assembly
from stage_agent.artifacts.download import Distrust, Means
from stage_agent.artifacts.events import ArtifactDiscarded, ArtifactEvent, OwnFileDamaged
from stage_agent.artifacts.fetcher import PackageFetcher, Progress
from stage_agent.artifacts.file_hashes import FileHashes
from stage_agent.artifacts.inventory import holders_of, missing_weight_bytes, model_facts, offered_models
from stage_agent.artifacts.policy import AssignedRange, assigned_ranges
from stage_agent.artifacts.serving import ArtifactServer
from stage_agent.artifacts.session import OpenBulk
from stage_agent.artifacts.shelf import Shelf
from stage_agent.artifacts.store import ArtifactStore
from stage_agent.artifacts.token_bucket import TokenBucket

HASHES_FILE = "file-hashes.json"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the node lends to its artifacts. Everything is called on the loop except ``find_local``."""

    open_bulk: OpenBulk
    rows: Callable[[], Iterable[NodeRow]]
    """Rows of connected peers, the own one not included."""
    admitted: Callable[[NodeId], bool]
    local_models: Callable[[], Mapping[str, Path]]
    """The operator's models that can be read here, by digest."""
    find_local: Callable[[StageAssignment], Path]
    """The operator's path of an assigned model, or ``ModelError``. Called in a thread."""
    report: Callable[[ArtifactEvent], None]
    clock_us: Callable[[], int]
    start: Callable[[Any, str], object]
    """Runs a coroutine, with a task name, in the node's group."""
    changed: Callable[[], None]
    """What is here has changed: publish the own row."""


class NodeArtifacts:
    """``root`` is created by ``prepare``, which must come first. With mode ``off`` nothing is served or fetched."""

    def __init__(
        self, settings: ArtifactSettings, root: Path, around: Surroundings, die: random.Random | None = None
    ) -> None:
        self._settings = settings
        self._root = root
        self._around = around
        self._loop = asyncio.get_running_loop()
        self._missing: dict[str, int] = {}
        self._store = ArtifactStore(root, settings, self._discarded)
        self._assembly = Assembly(root, self._store)
        hashes = FileHashes(root / HASHES_FILE, around.start, self._store.hash)
        self._hashes = hashes
        shelf = Shelf(around.local_models, self._assembly, self._store, hashes)
        self.server = ArtifactServer(
            settings=settings,
            shelf=shelf,
            admitted=around.admitted,
            assigned=self._assigned,
            recheck=lambda sha256, path: around.start(self._recheck(sha256, path), f"recheck {sha256[:12]}"),
            clock_us=around.clock_us,
        )
        means = Means(
            settings=settings,
            store=self._store,
            open_bulk=around.open_bulk,
            holders=self._holders,
            report=around.report,
            clock_us=around.clock_us,
            die=die or random.SystemRandom(),
            bucket=TokenBucket(settings.bandwidth_limit_bytes_per_s),
            distrust=Distrust(around.clock_us),
        )
        self._fetcher = PackageFetcher(means, self._assembly, around.find_local)

    async def prepare(self) -> None:
        """Create the store, clean it up, look at what is here. Raises ``ArtifactError``; mode ``off`` touches no disk."""
        if self._settings.mode != "off":
            await asyncio.to_thread(self._store.prepare)
        await self.refresh()

    async def on_bulk(self, peer: NodeId, header: bytes, reader: BulkReader, writer: BulkWriter) -> None:
        """Serve an incoming stream of kind ``ARTIFACT_KIND``; raises what a peer can cause, as bulk handlers may."""
        await self.server.serve(peer, header, reader, writer)

    async def ensure(self, assignment: StageAssignment, progress: Progress) -> Path:
        """A path at which the stage's files can be read; see ``fetcher``. Raises ``ModelError``."""
        try:
            path = await self._fetcher.ensure(assignment, progress)
        except ModelError:
            await self.refresh()
            raise
        try:
            await self.refresh()
        except BaseException:
            self.release(assignment)
            raise
        return path

    def release(self, assignment: StageAssignment) -> None:
        """The stage that ``ensure`` was called for is unloaded."""
        self._fetcher.release(assignment)

    def close(self) -> None:
        """The node stops: work in threads ends soon. Streams and loads end with their tasks."""
        self._store.stop()

    def facts(self, packages: Iterable[ModelPackage]) -> tuple[ModelFact, ...]:
        """Of these models, for the own row; from memory."""
        local = dict.fromkeys(self._around.local_models(), 0)
        return model_facts(self._settings.mode, packages, local | self._missing, offered_models(self._around.rows()))

    async def refresh(self) -> None:
        """Look at the disk again: call when the operator serves another model. Tells ``changed`` when something did."""
        fetched = await asyncio.to_thread(self._assembly.models)
        found: dict[str, int] = {}
        for digest, path in [*fetched.items(), *self._around.local_models().items()]:
            lacking = await asyncio.to_thread(missing_weight_bytes, path)
            if lacking is not None:
                found[digest] = min(lacking, found.get(digest, lacking))
        if found != self._missing:
            self._missing = found
            self._around.changed()

    def _holders(self, digest: str) -> tuple[NodeId, ...]:
        return tuple(NodeId(node_id) for node_id in holders_of(digest, self._around.rows()))

    def _assigned(self, peer: NodeId) -> tuple[AssignedRange, ...]:
        return tuple(stage for row in self._around.rows() if row.node_id == peer for stage in assigned_ranges(row))

    def _discarded(self, sha256: str, size_bytes: int, damaged: bool) -> None:
        """Called by the store in any thread."""
        event = ArtifactDiscarded(sha256, size_bytes, "damaged" if damaged else "evicted")
        self._loop.call_soon_threadsafe(self._around.report, event)

    async def _recheck(self, sha256: str, path: Path) -> None:
        """A peer says that this file is wrong: look. A blob that is goes; the operator's own file is hashed anew."""
        blob = self._store.name_of(path)
        if blob is not None:
            if not await asyncio.to_thread(self._store.verify, blob):
                await asyncio.to_thread(self._store.discard, blob, damaged=True)
                await self.refresh()
            return
        self._hashes.forget(path)
        if await asyncio.to_thread(self._is_other, path, sha256):
            self._around.report(OwnFileDamaged(sha256, str(path)))

    def _is_other(self, path: Path, sha256: str) -> bool:
        try:
            return self._store.hash(path) != sha256
        except OSError:
            return False  # gone meanwhile: then it is not shown either
