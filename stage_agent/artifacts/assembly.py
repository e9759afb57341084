"""A stage's view of the store: ``<root>/models/<model digest>`` with links under the names that engines expect.

Blobs may be evicted under a link; then the file is missing, which every reader of a layer package already understands,
and the next load fetches it again.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from coordinator.model.layer_package import MANIFEST_NAME
from protocol.ballots import ArtifactRef
from stage_agent.artifacts.partial_file import disk_failure
from stage_agent.artifacts.stage_files import Listing, has_size, manifest_at
from stage_agent.artifacts.store import ArtifactStore

MODELS_DIRECTORY = "models"
MAX_MODELS = 256
_DIGEST = re.compile(r"^[0-9a-f]{64}$")
_FIRST = ".first-file"


class Assembly:
    """Directories of links, by model digest. Methods block."""

    def __init__(self, root: Path, store: ArtifactStore) -> None:
        self._root = root / MODELS_DIRECTORY
        self._store = store

    def models(self) -> dict[str, Path]:
        """Every model of which something was fetched, and where an engine would read it."""
        found: dict[str, Path] = {}
        with contextlib.suppress(OSError):
            for directory in sorted(self._root.iterdir())[:MAX_MODELS]:
                path = self.path(directory.name) if _DIGEST.match(directory.name) else None
                if path is not None:
                    found[directory.name] = path
        return found

    def path(self, digest: str) -> Path | None:
        """Where an engine would read the model; its files may be incomplete. ``None`` when nothing was assembled."""
        directory = self._root / digest
        if (directory / MANIFEST_NAME).is_file():
            return directory
        with contextlib.suppress(OSError):
            return directory / (directory / _FIRST).readlink()
        return None

    def assemble(self, digest: str, listing: Listing, files: Iterable[ArtifactRef], beside: Path | None) -> Path:
        """Link ``files`` from the store, or from the operator's own incomplete package ``beside``. Raises ``ArtifactError``.

        Links to other files of the model stay.
        """
        directory = self._root / digest
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in files:
                link = directory / file.path
                link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _link(link, self._source(file, beside))
            if listing.manifest is None:
                _link(directory / _FIRST, Path(listing.files[0].path))
                return directory / listing.files[0].path
            fresh = directory / f".{MANIFEST_NAME}.{os.getpid()}"
            fresh.write_bytes(listing.manifest)
            fresh.replace(directory / MANIFEST_NAME)
        except OSError as error:
            raise disk_failure(directory, error) from None
        return directory

    def forget(self, digest: str) -> None:
        """Delete the directory's entry points: the model is not read from here any more."""
        directory = self._root / digest
        for name in (MANIFEST_NAME, _FIRST):
            with contextlib.suppress(OSError):
                (directory / name).unlink()

    def manifest(self, digest: str) -> bytes | None:
        """The manifest of a layer package that was fetched in part before. Raises ``ModelError`` for a damaged one."""
        directory = self._root / digest
        return manifest_at(directory)[0] if (directory / MANIFEST_NAME).is_file() else None

    def _source(self, file: ArtifactRef, beside: Path | None) -> Path:
        own = beside / file.path if beside is not None else None
        if own is not None and has_size(own, file.size_bytes) and self._store.name_of(own) is None:
            return own.absolute()
        return self._store.link_target(file.sha256)


def _link(link: Path, target: Path) -> None:
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
