"""One file from whoever has it: resumed where it stands, at another peer when one goes, verified as a whole.

Only the whole file has a hash, so a wrong byte costs the whole file. When all of it came from one peer, that peer is to
blame: it is told, reported, and not asked for this file again for a while. When several gave parts (or an earlier run of
this process did), nobody can be blamed: the file begins anew and from then on comes from one peer at a time.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from config.settings import ArtifactSettings
from protocol.ballots import ArtifactRef
from protocol.ids import NodeId
from stage_agent.artifacts.errors import ArtifactError
from stage_agent.artifacts.events import ArtifactEvent, ArtifactFetched, MixedPartsWrong, PeerFault, PeerMisbehaved
from stage_agent.artifacts.partial_file import PartialFile
from stage_agent.artifacts.session import PEER_FAULTS, HolderSession, OpenBulk
from stage_agent.artifacts.store import ArtifactStore
from stage_agent.artifacts.token_bucket import TokenBucket
from stage_agent.artifacts.wire import WAITING, Complaint, FileRequest, Granted, Refused

DISTRUST_US = 600_000_000
MAX_DISTRUSTED = 4_096
MAX_ATTEMPTS = 256
"""Of one file in one load, whatever progress they make."""
PAUSE_MIN_US, PAUSE_MAX_US = 200_000, 5_000_000

Holders = Callable[[str], Sequence[NodeId]]
"""Connected peers that may hold something of the model, best first."""


@dataclass(slots=True)
class Distrust:
    """Who lied about what, lately."""

    clock_us: Callable[[], int]
    _until_us: dict[tuple[NodeId, str], int] = field(default_factory=dict)

    def add(self, peer: NodeId, digest: str) -> None:
        """From now on, for ``DISTRUST_US``."""
        while len(self._until_us) >= MAX_DISTRUSTED:
            del self._until_us[next(iter(self._until_us))]
        self._until_us[peer, digest] = self.clock_us() + DISTRUST_US

    def __contains__(self, key: tuple[NodeId, str]) -> bool:
        return self._until_us.get(key, 0) > self.clock_us()


@dataclass(frozen=True, slots=True)
class Means:
    """What every download of this node shares."""

    settings: ArtifactSettings
    store: ArtifactStore
    open_bulk: OpenBulk
    holders: Holders
    report: Callable[[ArtifactEvent], None]
    clock_us: Callable[[], int]
    die: random.Random
    bucket: TokenBucket
    distrust: Distrust

    def blame(self, peer: NodeId, digest: str, fault: PeerFault) -> None:
        """Report, and do not ask again for a while."""
        self.distrust.add(peer, digest)
        self.report(PeerMisbehaved(peer, digest, fault))

    async def rounds(self, moved: Callable[[], int]) -> AsyncGenerator[int, None]:
        """Attempts with growing pauses between them, until ``give_up_us`` went by without ``moved()`` growing."""
        pause_us, last, last_us = PAUSE_MIN_US, moved(), self.clock_us()
        for attempt in range(MAX_ATTEMPTS):
            yield attempt
            now_us, grown = self.clock_us(), moved()
            if grown > last:
                pause_us, last, last_us = PAUSE_MIN_US, grown, now_us
            elif now_us - last_us >= self.settings.give_up_us:
                return
            await asyncio.sleep(pause_us * self.die.uniform(0.5, 1.0) / 1_000_000)
            pause_us = min(2 * pause_us, PAUSE_MAX_US)


class Download:
    """One file of ``model_digest`` into the store. ``sessions`` are the calling worker's own streams by peer."""

    def __init__(
        self,
        means: Means,
        model_digest: str,
        file: ArtifactRef,
        sessions: dict[NodeId, HolderSession],
        progress: Callable[[int], None],
    ) -> None:
        self._means = means
        self._model = model_digest
        self._file = file
        self._sessions = sessions
        self._progress = progress
        self._received = 0
        self._waits = 0
        self._alone = False
        self._refusals: dict[NodeId, str] = {}

    async def run(self) -> None:
        """Until the blob is installed. Raises ``ArtifactError``; a partial stays for the next attempt unless the disk is full.

        ``progress`` is told the file's bytes that are here, and may go back when wrong ones are discarded.
        """
        begun_us = self._means.clock_us()
        partial = await self._begin()
        try:
            self._progress(partial.position)
            await self._complete(partial)
            sources = partial.sources
            await asyncio.to_thread(self._means.store.install, partial)
        except ArtifactError as error:
            if error.reason == "disk_full":
                partial.discard()
            raise
        finally:
            await asyncio.to_thread(partial.close)
            self._means.store.end(self._file.sha256)
        self._means.report(
            ArtifactFetched(
                self._file.sha256,
                self._file.size_bytes,
                self._received,
                self._means.clock_us() - begun_us,
                sources,
            )
        )

    async def _begin(self) -> PartialFile:
        """What a thread opened for a load that was cancelled meanwhile is closed again."""
        store, file = self._means.store, self._file
        opening = asyncio.get_running_loop().run_in_executor(None, store.begin, file.sha256, file.size_bytes)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda opened: _abandon(store, opened))
            raise

    async def _complete(self, partial: PartialFile) -> None:
        if await self._judged(partial):
            return
        async with aclosing(self._means.rounds(lambda: self._received + self._waits)) as rounds:
            async for _ in rounds:
                for peer in self._candidates(partial):
                    await self._from(peer, partial)
                    if await self._judged(partial):
                        return
        told = ", ".join(f"{peer[:8]}: {why}" for peer, why in sorted(self._refusals.items())) or "no peer has it"
        raise ArtifactError("gave_up", f"{self._file.path} ({self._file.sha256[:12]}) could not be fetched: {told}")

    def _candidates(self, partial: PartialFile) -> list[NodeId]:
        """In the order to ask them: files begin at different holders, so that all share the load.

        Whoever gave the last part comes first, though: only then can a wrong byte be blamed on somebody.
        """
        holders = list(self._means.holders(self._model))
        first = int(self._file.sha256[:8], 16) % max(1, len(holders))
        order = [peer for peer in holders[first:] + holders[:first] if self._trusts(peer)]
        return sorted(order, key=lambda peer: peer not in partial.sources[-1:])

    def _trusts(self, peer: NodeId) -> bool:
        return (peer, self._file.sha256) not in self._means.distrust

    async def _judged(self, partial: PartialFile) -> bool:
        """Whether the file is complete and right. A complete wrong one is discarded, and its peers are dealt with."""
        if not partial.complete:
            return False
        if partial.genuine:
            return True
        sources = partial.sources
        await asyncio.to_thread(partial.start_anew)
        self._progress(0)
        self._alone = True
        if len(sources) == 1:
            await self._complain(NodeId(sources[0]))
        else:
            self._means.report(MixedPartsWrong(self._file.sha256, sources))
        return False

    async def _complain(self, peer: NodeId) -> None:
        self._refusals[peer] = "sent wrong bytes"
        self._means.blame(peer, self._file.sha256, "wrong_bytes")
        session = self._session(peer)
        try:
            await session.ask(Complaint(model_digest=self._model, sha256=self._file.sha256))
        except PEER_FAULTS:
            session.drop()

    async def _from(self, peer: NodeId, partial: PartialFile) -> None:
        """As much as this peer gives now."""
        if self._alone and partial.sources not in {(), (peer,)}:
            await asyncio.to_thread(partial.start_anew)
        session = self._session(peer)
        left = self._file.size_bytes - partial.position
        request = FileRequest(
            model_digest=self._model,
            sha256=self._file.sha256,
            offset=partial.position,
            length=left,
            paced=self._means.bucket.rate_bytes_per_s is not None,
        )
        try:
            reply = await session.ask(request)
            match reply:
                case Refused(reason=reason):
                    self._refusals[peer] = reason
                    self._waits += reason in WAITING
                case Granted(size_bytes=size, length=length) if size == self._file.size_bytes and length == left:
                    await self._receive(session, reply, partial)
                case Granted():
                    self._refusals[peer] = "has another size of it"
                    self._means.blame(peer, self._file.sha256, "wrong_size")
                    session.drop()
                case _:
                    self._means.blame(peer, self._file.sha256, "malformed")
                    session.drop()
        except PEER_FAULTS as fault:
            self._refusals[peer] = str(fault) or type(fault).__name__
            session.drop()

    async def _receive(self, session: HolderSession, granted: Granted, partial: PartialFile) -> None:
        """Hash and write one chunk in a thread while the next one arrives."""
        loop = asyncio.get_running_loop()
        writing: asyncio.Future[None] | None = None
        try:
            async with aclosing(session.chunks(granted)) as chunks:
                async for chunk in chunks:
                    if writing is not None:
                        await writing
                    self._received += len(chunk)
                    writing = loop.run_in_executor(None, partial.append, chunk, session.peer)
                    self._progress(partial.position)
                    wait_us = self._means.bucket.take(len(chunk), self._means.clock_us())
                    if wait_us:
                        await asyncio.sleep(wait_us / 1_000_000)
        finally:
            if writing is not None:
                await asyncio.wait({writing})
                writing.result()  # a disk that failed outweighs whatever the peer did
        self._progress(partial.position)

    def _session(self, peer: NodeId) -> HolderSession:
        if peer not in self._sessions:
            self._sessions[peer] = HolderSession(peer, self._means.open_bulk, self._means.settings)
        return self._sessions[peer]


def _abandon(store: ArtifactStore, opened: "asyncio.Future[PartialFile]") -> None:
    if opened.exception() is None:
        partial = opened.result()
        partial.close()
        store.end(partial.sha256)
