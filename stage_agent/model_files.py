"""Finds the files of a model from one path, and reads them by range; every failure is one line that names the path.

A path may be a GGUF file (any shard of a split one), a layer package's directory or manifest, or a safetensors
checkpoint's directory, index, configuration or weight file. A directory with exactly one GGUF model is that model.
"""

import stat
from dataclasses import dataclass
from pathlib import Path

from coordinator.model.gguf_shards import shard_file_names
from coordinator.model.layer_package import MANIFEST_NAME
from protocol.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
MAX_DIRECTORY_ENTRIES = 10_000


class FileSource:
    """A file's bytes by range. The file is opened for each read: headers need few, and no descriptor is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path}: not a regular file")
            self._size = status.st_size
            with path.open("rb"):
                pass
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from None

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; raises ``ModelError`` when the file cannot give them."""
        parts = []
        left = length
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(offset)
                while left and (part := file.read(left)):
                    parts.append(part)
                    left -= len(part)
        except OSError as error:
            raise unreadable(self._path, error) from None
        if left:
            raise ModelError(f"{self._path}: truncated: it became shorter while it was read")
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """All shards, in order; one for a model in one file."""

    shards: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The file name without shard number and ending."""
        first = self.shards[0]
        return first.stem if shard_file_names(first.name) is None else first.name[: -len("-00001-of-00001.gguf")]


@dataclass(frozen=True, slots=True)
class PackageFiles:
    """The directory that holds ``model-package.json``."""

    directory: Path


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The directory that holds ``config.json`` and the safetensors files."""

    directory: Path


ModelFiles = GgufFiles | PackageFiles | CheckpointFiles


def locate(path: Path) -> ModelFiles:
    """What kind of model is at ``path``. Raises ``ModelError`` when there is none or it cannot be looked at."""
    try:
        if path.is_dir():
            return _locate_directory(path)
        path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if path.name == MANIFEST_NAME:
        return PackageFiles(path.parent)
    if path.suffix == ".safetensors" or path.name in {INDEX_NAME, CONFIG_NAME}:
        return CheckpointFiles(path.parent)
    return GgufFiles(_shards(path))


def read_all(path: Path, limit: int) -> bytes:
    """A small file's whole content; a larger one than ``limit`` bytes is a ``ModelError``."""
    source = FileSource(path)
    if source.size > limit:
        raise ModelError(f"{path}: {source.size} bytes, more than the {limit} that are accepted")
    return source.read(0, source.size)


def unreadable(path: Path, error: OSError | ValueError) -> ModelError:
    """The operating system's refusal as one line."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ModelError(f"{path}: no such file or directory")
    if isinstance(error, PermissionError):
        return ModelError(f"{path}: permission denied; make it readable for this user")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ModelError(f"{path}: cannot be read ({reason})")


def _locate_directory(path: Path) -> ModelFiles:
    names: set[str] = set()
    for entry in path.iterdir():
        names.add(entry.name)
        if len(names) > MAX_DIRECTORY_ENTRIES:
            raise ModelError(f"{path}: more than {MAX_DIRECTORY_ENTRIES} entries; name the model's file")
    if MANIFEST_NAME in names:
        return PackageFiles(path)
    if CONFIG_NAME in names and any(name == INDEX_NAME or name.endswith(".safetensors") for name in names):
        return CheckpointFiles(path)
    models = {_first_shard(name) for name in names if name.endswith(".gguf") and not name.startswith("mmproj")}
    if len(models) == 1:
        return GgufFiles(_shards(path / models.pop()))
    if models:
        raise ModelError(f"{path}: holds {len(models)} models; name one: {', '.join(sorted(models)[:5])}")
    raise ModelError(
        f"{path}: no model in this directory (a .gguf, {MANIFEST_NAME}, or safetensors with {CONFIG_NAME})"
    )


def _first_shard(name: str) -> str:
    return (shard_file_names(name) or (name,))[0]


def _shards(path: Path) -> tuple[Path, ...]:
    names = shard_file_names(path.name)
    if names is None:
        return (path,)
    files = tuple(path.with_name(name) for name in names)
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelError(f"{path}: shard {missing[0]} is missing ({len(missing)} of {len(files)} are)")
    return files
