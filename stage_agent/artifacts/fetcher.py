"""``ensure``: a path at which the assigned stage can be read, fetching from peers what is not here.

Where to look, in order: the operator's own files, what was fetched before, the peers. What the stage needs is pinned in
the store before anything is checked or fetched, and stays so until ``release``. A layer package is fetched in part, any
other model whole: engines map whole files, and a range of a GGUF has no hash of its own to be verified by.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from protocol.ballots import ArtifactRef, StageAssignment
from protocol.errors import ModelError
from stage_agent.artifacts.assembly import Assembly
from stage_agent.artifacts.download import Download, Means
from stage_agent.artifacts.errors import ArtifactError
from stage_agent.artifacts.listings import Listings, Wanted
from stage_agent.artifacts.stage_files import Listing, has_size, manifest_at, needed
from stage_agent.artifacts.wire import WAITING
from stage_agent.model_files import PackageFiles, locate
from stage_agent.model_source import model_files, open_model

if TYPE_CHECKING:
    from protocol.ids import NodeId
    from stage_agent.artifacts.session import HolderSession

Progress = Callable[[int, int], None]
"""``progress(here_bytes, needed_bytes)`` of the stage's files; never goes back, ends with both equal."""
PROGRESS_US = 200_000
"""Between two reports."""

_Key = tuple[str, str, int, int]


class PackageFetcher:
    """``find_local`` gives the operator's path of an assigned model, or raises ``ModelError``; it may block."""

    def __init__(self, means: Means, assembly: Assembly, find_local: Callable[[StageAssignment], Path]) -> None:
        self._means = means
        self._assembly = assembly
        self._find_local = find_local
        self._listings = Listings(means, assembly)
        self._pinned: dict[_Key, list[tuple[str, ...]]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ensure(self, assignment: StageAssignment, progress: Progress) -> Path:
        """See the module. Raises ``ModelError`` (``ArtifactError`` when fetching failed); nothing is pinned then.

        Each success needs one ``release`` with the same slot, model and range.
        """
        own, refusal = await self._own_path(assignment)
        fetched = await asyncio.to_thread(self._assembly.path, assignment.model_digest)
        for path in (own, fetched):
            if path is not None and await self._take(path, assignment):
                return path
        if self._means.settings.mode == "off":
            raise refusal or ArtifactError(
                "mode_off",
                f"{own} lacks files of layers {assignment.layer_start}..{assignment.layer_end - 1}: copy them here, "
                "or set artifacts.mode on this node and on one that has them",
            )
        return await self._fetch(assignment, own, progress)

    def release(self, assignment: StageAssignment) -> None:
        """The stage is unloaded: its files may be evicted. One call too many does nothing."""
        held = self._pinned.get(_key(assignment))
        if held:
            self._means.store.unpin(held.pop())
            if not held:
                del self._pinned[_key(assignment)]

    # ---- what is here -----------------------------------------------------------------------------------------------

    async def _own_path(self, assignment: StageAssignment) -> tuple[Path | None, ModelError | None]:
        try:
            return await asyncio.to_thread(self._find_local, assignment), None
        except ModelError as refusal:
            return None, refusal

    async def _take(self, path: Path, assignment: StageAssignment) -> bool:
        """Pin and check what the stage needs at ``path``; nothing stays pinned when something is missing."""
        try:
            files = await asyncio.to_thread(_stage_paths, path, assignment)
        except ModelError:
            return False
        blobs = tuple(name for file, _ in files if (name := self._means.store.name_of(file)) is not None)
        self._means.store.pin(blobs)
        try:
            right = await asyncio.to_thread(self._all_right, files)
        except BaseException:
            self._means.store.unpin(blobs)
            raise
        if right:
            self._remember(assignment, blobs)
        else:
            self._means.store.unpin(blobs)
        return right

    def _all_right(self, files: Sequence[tuple[Path, int | None]]) -> bool:
        for file, size_bytes in files:
            blob = self._means.store.name_of(file)
            if blob is not None:
                size = file.stat().st_size if size_bytes is None and file.exists() else size_bytes
                if size is None or self._means.store.held(blob, size) is None:
                    return False
            elif size_bytes is not None and not has_size(file, size_bytes):
                return False
        return True

    def _remember(self, assignment: StageAssignment, blobs: tuple[str, ...]) -> None:
        self._pinned.setdefault(_key(assignment), []).append(blobs)

    # ---- what is fetched --------------------------------------------------------------------------------------------

    async def _fetch(self, assignment: StageAssignment, own: Path | None, progress: Progress) -> Path:
        known = await self._listings.known(assignment, own)
        if known is not None:
            return await self._complete(assignment, known, own, progress)
        told: dict[NodeId, str] = {}
        waits = 0
        async with aclosing(self._means.rounds(lambda: waits)) as rounds:
            async for _ in rounds:
                for peer in self._means.holders(assignment.model_digest):
                    if (peer, assignment.model_digest) in self._means.distrust:
                        continue
                    wanted = await self._listings.ask(peer, assignment, told)
                    if wanted is None:
                        waits += told.get(peer) in WAITING
                        continue
                    try:
                        return await self._complete(assignment, wanted, own, progress)
                    except ArtifactError as error:
                        if error.reason != "wrong_model":
                            raise
                        told[peer] = str(error)
        why = ", ".join(f"{peer[:8]}: {each}" for peer, each in sorted(told.items())) or "nobody offers it"
        raise ArtifactError(
            "gave_up" if told else "no_peer",
            f"model {assignment.model_digest[:12]} is not here and no peer lists its files ({why}): "
            "copy it here, or set artifacts.mode on a node that has it",
        )

    async def _complete(
        self, assignment: StageAssignment, wanted: Wanted, own: Path | None, progress: Progress
    ) -> Path:
        blobs = tuple({file.sha256: None for file in wanted.files})
        beside = await asyncio.to_thread(_package_directory, own)
        self._means.store.pin(blobs)
        try:
            await self._fetch_files(assignment.model_digest, wanted.files, beside, progress)
            path = await asyncio.to_thread(
                self._assembly.assemble, assignment.model_digest, wanted.listing, wanted.files, beside
            )
            await self._check_model(assignment, wanted, path, blobs)
        except BaseException:
            self._means.store.unpin(blobs)
            raise
        self._remember(assignment, blobs)
        return path

    async def _check_model(self, assignment: StageAssignment, wanted: Wanted, path: Path, blobs: Sequence[str]) -> None:
        """The files are what was listed; now they must be the model. Whoever listed other files lied."""
        try:
            digest = (await asyncio.to_thread(open_model, path)).digest
            problem = f"it is another model ({digest[:12]})" if digest != assignment.model_digest else ""
        except ModelError as error:
            problem = str(error)
        if not problem:
            return
        self._assembly.forget(assignment.model_digest)
        if wanted.listing.manifest is None:  # a package's manifest vouches for its files, a plain listing does not
            for blob in blobs:
                await asyncio.to_thread(self._means.store.discard, blob, damaged=True)
        if wanted.source is not None:
            self._means.blame(wanted.source, assignment.model_digest, "wrong_model")
        raise ArtifactError("wrong_model", f"what was fetched is not model {assignment.model_digest[:12]}: {problem}")

    async def _fetch_files(
        self, model_digest: str, files: Sequence[ArtifactRef], beside: Path | None, progress: Progress
    ) -> None:
        """Raises ``ArtifactError``; the first failure ends the other downloads, which keep what they have."""
        here = dict.fromkeys((file.sha256 for file in files), 0)
        total = sum({file.sha256: file.size_bytes for file in files}.values())
        shown, told_us = 0, 0

        def tell(sha256: str, held_bytes: int) -> None:
            nonlocal shown, told_us
            here[sha256] = held_bytes
            shown = max(shown, sum(here.values()))
            now_us = self._means.clock_us()
            if now_us - told_us >= PROGRESS_US or shown == total:
                told_us = now_us
                progress(shown, total)

        missing: deque[ArtifactRef] = deque()
        for file in {file.sha256: file for file in files}.values():
            if await asyncio.to_thread(self._is_here, file, beside):
                tell(file.sha256, file.size_bytes)
            else:
                missing.append(file)
        failures: list[ArtifactError] = []
        async with asyncio.TaskGroup() as group:
            workers: list[asyncio.Task[None]] = []

            def stop() -> None:
                for worker in workers:
                    worker.cancel()

            for _ in range(min(self._means.settings.downloads_max, len(missing))):
                work = self._work(model_digest, missing, tell, failures, stop)
                workers.append(group.create_task(work, name=f"fetch {model_digest[:12]}"))
        if failures:
            raise failures[0]

    async def _work(
        self,
        model_digest: str,
        missing: deque[ArtifactRef],
        tell: Callable[[str, int], None],
        failures: list[ArtifactError],
        stop: Callable[[], object],
    ) -> None:
        sessions: dict[NodeId, HolderSession] = {}
        try:
            while missing:
                file = missing.popleft()
                async with self._lock(file.sha256):
                    if not await asyncio.to_thread(self._is_here, file, None):
                        told = partial(tell, file.sha256)
                        await Download(self._means, model_digest, file, sessions, told).run()
                tell(file.sha256, file.size_bytes)
        except ArtifactError as error:
            failures.append(error)
            stop()
        finally:
            for session in sessions.values():
                await session.end()

    def _lock(self, sha256: str) -> asyncio.Lock:
        return self._locks.setdefault(sha256, asyncio.Lock())

    def _is_here(self, file: ArtifactRef, beside: Path | None) -> bool:
        if beside is not None:
            own = beside / file.path
            if self._means.store.name_of(own) is None and has_size(own, file.size_bytes):
                return True
        return self._means.store.held(file.sha256, file.size_bytes) is not None


def _key(assignment: StageAssignment) -> _Key:
    return assignment.slot, assignment.model_digest, assignment.layer_start, assignment.layer_end


def _stage_paths(path: Path, assignment: StageAssignment) -> list[tuple[Path, int | None]]:
    """The files that the stage reads at ``path``, with the size they must have when somebody said it."""
    files = locate(path)
    if isinstance(files, PackageFiles):
        listing = Listing(manifest=manifest_at(files.directory)[0])
        return [(files.directory / file.path, file.size_bytes) for file in needed(listing, assignment)]
    return [(file, None) for file in model_files(path)]


def _package_directory(own: Path | None) -> Path | None:
    """Where the operator's own, incomplete layer package is."""
    try:
        files = None if own is None else locate(own)
    except ModelError:
        return None
    return files.directory if isinstance(files, PackageFiles) else None
