"""What this node can show: the files of every model it can read, by model and by hash.

Local models come from the operator's paths, fetched ones from the store. A layer package's hashes stand in its manifest;
those of plain files are computed when a peer first asks. Descriptions are kept until the model's files change.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coordinator.model.layer_package import MANIFEST_NAME, LayerPackageManifest
from protocol.ballots import ArtifactRef
from protocol.errors import ModelError
from stage_agent.artifacts.assembly import Assembly
from stage_agent.artifacts.file_hashes import FileHashes, Stamp, stamp_of
from stage_agent.artifacts.policy import FileUse
from stage_agent.artifacts.stage_files import Listing, has_size, is_plain_name, manifest_at, uses_of
from stage_agent.artifacts.store import ArtifactStore
from stage_agent.artifacts.wire import MAX_FILES
from stage_agent.model_files import PackageFiles, locate
from stage_agent.model_source import model_files

MAX_DESCRIPTIONS = 64


@dataclass(frozen=True, slots=True)
class _Described:
    """``whole`` are a plain model's files in order; a layer package has ``manifest`` instead."""

    stamp: Stamp | None
    directory: Path
    raw: bytes | None = None
    manifest: LayerPackageManifest | None = None
    whole: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file that may be served, to whom ``uses`` says. ``size_bytes`` is what it should have."""

    path: Path
    size_bytes: int
    uses: tuple[FileUse, ...]


class Shelf:
    """``local`` gives the operator's models by digest. All methods run on the loop; disk work is done in threads."""

    def __init__(
        self, local: Callable[[], Mapping[str, Path]], assembly: Assembly, store: ArtifactStore, hashes: FileHashes
    ) -> None:
        self._local = local
        self._assembly = assembly
        self._store = store
        self._hashes = hashes
        self._described: dict[Path, _Described] = {}

    async def listing(self, digest: str) -> Listing | None:
        """The model's files; ``None`` when it is not here. An empty listing: its hashes are being computed."""
        for path in await self._paths(digest):
            described = await self._describe(path)
            if described is None:
                continue
            if described.raw is not None:
                return Listing(manifest=described.raw)
            hashed = [(file, self._hash_of(file), stamp_of(file)) for file in described.whole]
            references = tuple(
                ArtifactRef(path=file.name, sha256=sha256, size_bytes=stamp[1])
                for file, sha256, stamp in hashed
                if sha256 is not None and stamp is not None
            )
            return Listing(references) if len(references) == len(hashed) else Listing()
        return None

    async def find(self, digest: str, sha256: str) -> ShownFile | None:
        """The model's file with this content, if it can be read here."""
        for path in await self._paths(digest):
            described = await self._describe(path)
            for shown in () if described is None else self._files(described, digest, sha256):
                if await asyncio.to_thread(has_size, shown.path, shown.size_bytes):
                    return shown
        return None

    def _files(self, described: _Described, digest: str, sha256: str) -> list[ShownFile]:
        if described.manifest is not None:
            return [
                ShownFile(described.directory / artifact.path, artifact.artifact_bytes, uses)
                for artifact, uses in uses_of(described.manifest, digest)
                if artifact.sha256 == sha256
            ]
        whole = (FileUse(digest, 0, 2**53),)
        stamps = [(file, stamp_of(file)) for file in described.whole if self._hash_of(file) == sha256]
        return [ShownFile(file, stamp[1], whole) for file, stamp in stamps if stamp is not None]

    def _hash_of(self, file: Path) -> str | None:
        return self._store.name_of(file) or self._hashes.get(file)

    async def _paths(self, digest: str) -> list[Path]:
        own = self._local().get(digest)
        fetched = await asyncio.to_thread(self._assembly.path, digest)
        return [path for path in (own, fetched) if path is not None]

    async def _describe(self, path: Path) -> _Described | None:
        known = self._described.get(path)
        if known is not None and known.stamp is not None and known.stamp == stamp_of(_telling(path)):
            return known
        try:
            fresh = await asyncio.to_thread(_describe, path)
        except ModelError:
            self._described.pop(path, None)
            return None
        while len(self._described) >= MAX_DESCRIPTIONS:
            del self._described[next(iter(self._described))]
        self._described[path] = fresh
        return fresh


def _telling(path: Path) -> Path:
    """The file whose change means that the model changed."""
    return path / MANIFEST_NAME if path.is_dir() else path


def _describe(path: Path) -> _Described:
    files = locate(path)
    stamp = stamp_of(_telling(path))
    if isinstance(files, PackageFiles):
        raw, manifest = manifest_at(files.directory)
        return _Described(stamp, files.directory, raw, manifest)
    whole = model_files(path)
    if len(whole) > MAX_FILES or not all(is_plain_name(file.name) for file in whole):
        raise ModelError(f"{path}: its files cannot be named to a peer")
    return _Described(stamp, path.parent, whole=whole)
