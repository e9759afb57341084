"""JSON from files nobody vouches for: bounded size, bounded number of values, no duplicate keys, typed field access."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from protocol.errors import ModelError

MAX_INTEGER = 1 << 53


def parse_json_object(content: bytes, where: str, *, max_bytes: int, max_values: int) -> dict[str, Any]:
    """The document's top-level object. ``max_values`` bounds commas, braces and brackets, and with them the memory.

    Raises ``ModelError`` for anything that is not one UTF-8 JSON object within the bounds.
    """
    if len(content) > max_bytes:
        raise ModelError(f"{where}: {len(content)} bytes of JSON, more than the {max_bytes} that are accepted")
    if sum(content.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise ModelError(f"{where}: more than {max_values} JSON values; refused")
    try:
        document = json.loads(content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ModelError(f"{where}: not UTF-8 text") from None
    except RecursionError:
        raise ModelError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{where}: holds a JSON {type(document).__name__}, not an object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"key {name!r:.80} appears twice")
        result[name] = value
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


class JsonFields:
    """One JSON object of a document; ``path`` is its place in it, such as ``layers[3]``."""

    def __init__(self, value: Any, where: str, path: str = "") -> None:
        self.where = where
        self.path = path
        if not isinstance(value, dict):
            raise ModelError(f"{where}: {path} is not an object")
        self._value: dict[str, Any] = value

    def name(self, key: str) -> str:
        """The key's place in the document."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is present with a value other than null."""
        return self._value.get(key) is not None

    def raw(self, key: str) -> Any:
        """The value as it is; ``None`` when absent."""
        return self._value.get(key)

    def text(self, key: str) -> str:
        """A required, non-empty string."""
        value = self._value.get(key)
        if not isinstance(value, str) or not value:
            self.refuse(key, "a non-empty string")
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = MAX_INTEGER) -> int:
        """A whole number within its bounds; required unless a default is given."""
        value = self._value.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(key, f"a whole number from {least} to {most}")
        return value

    def child(self, key: str) -> "JsonFields":
        """A required object."""
        return JsonFields(self._value.get(key), self.where, self.name(key))

    def children(self, key: str) -> Iterator["JsonFields"]:
        """A required array of objects."""
        value = self._value.get(key)
        if not isinstance(value, list):
            self.refuse(key, "an array")
        for index, item in enumerate(value):
            yield JsonFields(item, self.where, f"{self.name(key)}[{index}]")

    def refuse(self, key: str, expected: str) -> NoReturn:
        """Raise ``ModelError`` naming the field and what it should hold."""
        value = self._value.get(key)
        state = "is missing" if key not in self._value else f"is {value!r:.60}"
        raise ModelError(f"{self.where}: {self.name(key)} {state}; expected {expected}")
