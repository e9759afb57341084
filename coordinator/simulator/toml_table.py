"""Strict reading of a TOML text: every key is asked for by name and range, and what nobody asked for is an error.

Theory of operation. ``tomllib`` gives values but no positions, so ``Source`` indexes the text when it must name a line: each header and each
``key =`` line is parsed by ``tomllib`` itself into its dotted path and remembered with its line number. A ``Table`` hands
out values one key at a time and remembers which were asked for; ``finish`` refuses the rest. Numbers are exact
(``Decimal``), finite, and bounded, so that unit conversion happens once, at the caller, without rounding surprises.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any, NoReturn

from protocol.errors import ConfigurationError

MAX_NUMBER = 2**53
"""Beyond this a JSON reader elsewhere would silently round: refused everywhere."""
MAX_TEXT_BYTES = 4 * 1_048_576
"""A scenario larger than this is refused before it is parsed."""

Path = tuple[str | int, ...]

_HEADER = re.compile(r"^\s*(\[\[.*\]\]|\[.*\])\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_\-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_\-]+|"[^"]*"|'[^']*'))*)\s*=""")
_AT_LINE = re.compile(r"\(at line (\d+)")
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (str, "a string"),
    (int, "a number"),
    (Decimal, "a number"),
    (list, "a list"),
    (dict, "a table"),
)
_NEAR = 0.65
"""Similarity from which on an unknown key is taken for a known one misspelt."""


class ScenarioError(ConfigurationError):
    """A scenario, profile or run file is wrong. Names the file, the key and the line; nothing was planned."""

    def __init__(self, source: str, line: int, key: str, message: str) -> None:
        key = visible(key)
        where = f"{source}:{line}" if line else source
        super().__init__(visible(f"{where}: {key}: {message}" if key else f"{where}: {message}"))
        self.source = source
        self.line = line
        self.key = key


def visible(text: str) -> str:
    """``text`` with every character that a terminal would obey instead of show written as its escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _kind(value: Any) -> str:
    """What TOML calls a value of this type."""
    return next((word for kind, word in _KINDS if isinstance(value, kind)), "a date or time")


def _only_path(fragment: str) -> Path | None:
    """The dotted path that a one-line TOML document defines; ``None`` when the line is not one by itself."""
    try:
        node: Any = tomllib.loads(fragment)
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(node, dict | list):
        if isinstance(node, list):
            node = node[0]
            continue
        if not node:
            break
        (key,) = node
        path.append(key)
        node = node[key]
    return tuple(path)


class Source:
    """A named TOML text and where each of its keys stands."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._lines = text.splitlines()

    @cached_property
    def _where(self) -> dict[Path, int]:
        """Built when the first mistake is found: a correct file never pays for it."""
        where: dict[Path, int] = {}
        arrays: dict[Path, int] = {}
        prefix: Path = ()
        for number, line in enumerate(self._lines, start=1):
            header = _HEADER.match(line)
            if header is not None and (path := _only_path(header.group(1))) is not None:
                if header.group(1).startswith("[["):
                    arrays[path] = arrays.get(path, -1) + 1
                    where.setdefault(path, number)
                    path = (*path, arrays[path])
                prefix = path
                where.setdefault(prefix, number)
            elif (match := _KEY.match(line)) and (path := _only_path(match.group(1) + " = 0")) is not None:
                where.setdefault((*prefix, *path), number)
        return where

    def line(self, path: Path) -> int:
        """The line of ``path``, of its nearest enclosing table when it has no line of its own, 0 when unknown."""
        for length in range(len(path), 0, -1):
            found = self._where.get(path[:length])
            if found is not None:
                return found + self._rows_down(found, path[length:])
        return 0

    def _rows_down(self, start: int, rest: Path) -> int:
        """Lines below an array's key at which its ``rest[0]``-th inline table opens."""
        if not rest or not isinstance(rest[0], int):
            return 0
        seen = -1
        for offset, line in enumerate(self._lines[start - 1 :]):
            seen += line.count("{")
            if seen >= rest[0]:
                return offset
        return 0

    def error(self, path: Path, message: str) -> ScenarioError:
        """The error to raise for ``path``; the key is shown as it would be written."""
        return ScenarioError(self.name, self.line(path), dotted(path), message)


def dotted(path: Path) -> str:
    """``("links", "a -> b", "rtt_ms")`` → ``links."a -> b".rtt_ms``."""
    parts: list[str] = []
    for part in path:
        if isinstance(part, int):
            parts[-1:] = [f"{parts[-1] if parts else ''}[{part}]"]
        else:
            parts.append(part if re.fullmatch(r"[A-Za-z0-9_\-]+", part) else f'"{part}"')
    return ".".join(parts)


def parse_toml(name: str, text: str) -> "Table":
    """The root table of ``text``.

    Raises:
        ScenarioError: not TOML, or larger than ``MAX_TEXT_BYTES``.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise ScenarioError(name, 0, "", f"larger than {MAX_TEXT_BYTES} bytes")
    try:
        values = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        at = _AT_LINE.search(str(error))
        raise ScenarioError(name, int(at.group(1)) if at else 0, "", f"not valid TOML: {error}") from error
    except RecursionError as error:
        raise ScenarioError(name, 0, "", "not readable: lists or tables are nested too deeply") from error
    except ValueError as error:
        raise ScenarioError(name, 0, "", "not readable: a number has thousands of digits") from error
    return Table(Source(name, text), (), values)


def _fault(value: Any, low: Decimal | int, high: Decimal | int, *, whole: bool) -> str | None:
    """Why ``value`` is not a number within ``[low, high]``; ``None`` when it is one."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return f"needs a number, got {_kind(value)}"
    number, said = Decimal(value), str(value)[:40]
    if not number.is_finite():
        return f"needs a finite number, got {said}"
    if not low <= number <= high:
        return f"is {said}, allowed is {low} to {high}"
    if whole and number != number.to_integral_value():
        return f"needs a whole number, got {said}"
    return None


class Table:
    """One table of the file. Getters return ``None`` for an absent key and raise ``ScenarioError`` for a wrong one."""

    def __init__(self, source: Source, path: Path, values: Mapping[str, Any]) -> None:
        self.source = source
        self.path = path
        self._values = values
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def fail(self, key: str | None, message: str) -> NoReturn:
        """Raise for ``key`` of this table, or for the table itself."""
        raise self.source.error(self.path if key is None else (*self.path, key), message)

    def peek(self, key: str) -> Any:
        """The raw value, without counting it as asked for."""
        return self._values.get(key)

    def take(self, key: str) -> Any:
        """The raw value; its reader checks it."""
        self._asked.add(key)
        return self._values.get(key)

    def _checked(
        self, where: Path, value: Any, low: Decimal | int, high: Decimal | int, *, whole: bool = False
    ) -> Decimal:
        message = _fault(value, low, high, whole=whole)
        if message is not None:
            raise self.source.error((*self.path, *where), message)
        return Decimal(value)

    def number(self, key: str, *, low: Decimal | int = 0, high: Decimal | int = MAX_NUMBER) -> Decimal | None:
        """A finite number within ``[low, high]``."""
        value = self.take(key)
        return None if value is None else self._checked((key,), value, low, high)

    def whole(self, key: str, *, low: int = 0, high: int = MAX_NUMBER) -> int | None:
        """A whole number within ``[low, high]``."""
        value = self.take(key)
        return None if value is None else int(self._checked((key,), value, low, high, whole=True))

    def numbers(self, key: str, count: int, *, high: int = MAX_NUMBER, whole: bool = True) -> list[Decimal] | None:
        """One number for all or a list with exactly ``count`` entries; always returned as ``count`` entries."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list):
            return [self._checked((key,), value, 0, high, whole=whole)] * count
        if len(value) != count:
            self.fail(key, f"has {len(value)} entries, the model has {count} layers")
        return [self._checked((key, index), entry, 0, high, whole=whole) for index, entry in enumerate(value)]

    def text(self, key: str) -> str | None:
        """A string without control characters, line breaks and tabs apart."""
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            self.fail(key, f"needs a string, got {_kind(value)}")
        if value and not (shown := re.sub(r"[\r\n\t]", "", value)).isprintable():
            self.fail(key, f"has characters that cannot be shown: {visible(shown)[:80]}")
        return value

    def flag(self, key: str) -> bool | None:
        """``true`` or ``false``."""
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            self.fail(key, f"needs true or false, got {_kind(value)}")
        return value

    def choice(self, key: str, allowed: Sequence[str]) -> str | None:
        """One of ``allowed``."""
        value = self.text(key)
        if value is not None and value not in allowed:
            self.fail(key, f'is "{value}", allowed is {", ".join(allowed)}')
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self.fail(key, "needs a list of strings")
        return list(value)

    def entries(self, key: str) -> list[Any]:
        """A list of anything; the caller checks the entries."""
        value = self.take(key)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fail(key, f"needs a list, got {_kind(value)}")
        return value

    def table(self, key: str) -> "Table | None":
        """A sub-table."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, f"needs a table, got {_kind(value)}")
        return Table(self.source, (*self.path, key), value)

    def tables(self, key: str, *, limit: int) -> list["Table"]:
        """An array of tables, at most ``limit``."""
        value = self.entries(key)
        if len(value) > limit:
            self.fail(key, f"has {len(value)} entries, allowed are {limit}")
        for index, entry in enumerate(value):
            if not isinstance(entry, dict):
                raise self.source.error((*self.path, key, index), "needs a table")
        return [Table(self.source, (*self.path, key, index), entry) for index, entry in enumerate(value)]

    def finish(self) -> None:
        """Refuse the first key, in the order of the file, that nobody asked for."""
        for key in self._values:
            if key not in self._asked:
                import difflib

                known = sorted(self._asked)
                near = difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
                advice = f'did you mean "{near[0]}"?' if near else f"known here: {', '.join(known)}"
                self.fail(key, f"unknown key; {advice}" if known else "unknown key")
