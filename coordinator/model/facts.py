"""Typed access to what a model's metadata says about its architecture; every refusal names the key.

Keys are given without the architecture: ``facts.integer("block_count")`` reads ``llama.block_count``.
"""

from collections.abc import Mapping

from coordinator.model.gguf_header import MetadataValue, Skipped
from protocol.errors import ModelError

MAX_VALUE = 1 << 24
"""Heads, widths, windows, state sizes: far above any model, low enough that no product leaves 2^53 bytes unnoticed."""
MAX_BYTES = 1 << 53


class ArchitectureFacts:
    """The metadata of one model. ``where`` names the file in errors."""

    def __init__(self, metadata: Mapping[str, MetadataValue], where: str) -> None:
        self.where = where
        self._metadata = metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise ModelError(f"{where}: general.architecture is missing; the file does not say what model it is")
        if not architecture.isprintable() or len(architecture) > 64:
            raise ModelError(f"{where}: general.architecture is {architecture!r:.80}, which names no model")
        self.architecture = architecture

    def key(self, suffix: str) -> str:
        """The full metadata key."""
        return f"{self.architecture}.{suffix}"

    def has(self, suffix: str) -> bool:
        """Whether the key is present at all."""
        return self.key(suffix) in self._metadata

    def text(self, key: str) -> str:
        """A string by its full key; empty when absent or not a string."""
        value = self._metadata.get(key)
        return value if isinstance(value, str) else ""

    def integer(self, suffix: str, default: int = 0, *, least: int = 0, most: int = MAX_VALUE) -> int:
        """A whole number within its bounds, or ``default`` when the key is absent."""
        value = self._metadata.get(self.key(suffix))
        return default if value is None else self._checked(suffix, value, least, most)

    def required(self, suffix: str, *, least: int = 1, most: int = MAX_VALUE) -> int:
        """As ``integer``, but an absent key is an error: the model's memory cannot be computed without it."""
        if not self.has(suffix):
            raise ModelError(f"{self.where}: {self.key(suffix)} is missing; memory cannot be computed without it")
        return self.integer(suffix, least=least, most=most)

    def per_layer(self, suffix: str, layer_count: int) -> tuple[int, ...] | None:
        """One number per layer from a number or an array of exactly ``layer_count``; ``None`` when absent."""
        value = self._metadata.get(self.key(suffix))
        if value is None:
            return None
        if not isinstance(value, tuple):
            return (self._checked(suffix, value, 0, MAX_VALUE),) * layer_count
        if len(value) != layer_count:
            raise ModelError(f"{self.where}: {self.key(suffix)} has {len(value)} entries for {layer_count} layers")
        return tuple(
            self._checked(suffix, int(item) if isinstance(item, bool) else item, 0, MAX_VALUE) for item in value
        )

    def is_array(self, suffix: str) -> bool:
        """Whether the key holds an array."""
        return isinstance(self._metadata.get(self.key(suffix)), tuple | Skipped)

    def _checked(self, suffix: str, value: MetadataValue, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.where}: {self.key(suffix)} is not a whole number")
        if not least <= value <= most:
            raise ModelError(f"{self.where}: {self.key(suffix)} is {value}, outside {least} to {most}")
        return value
