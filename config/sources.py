"""Where a value can come from: a TOML file, the environment, flags. Reads; does not judge values.

A source yields ``Leaf`` values: section, key, raw value, and an origin that a person can go to (``file:line``, the name
of a variable, the name of a flag). Text from the environment is read as TOML where the knob is not text itself, so
``STAGEMESH_LISTEN__ADVERTISE='["a:1", "b:2"]'`` works; ``a:1,b:2`` works too.
"""

import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from config.errors import fault
from config.settings import Settings

PREFIX = "STAGEMESH_"
MAX_FILE_BYTES = 1_048_576
"""A configuration is written by a person; a larger file is something else."""

_TABLE = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\"'-]+)\s*\]")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+(?:\s*\.\s*[A-Za-z0-9_\"'-]+)*)\s*=")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value as it was given. ``key`` is empty when a whole section has the wrong shape."""

    section: str
    key: str
    value: Any
    origin: str


def section_fields(section: str) -> dict[str, FieldInfo] | None:
    """The knobs of a section by name, or ``None`` when there is no such section."""
    field = Settings.model_fields.get(section)
    if field is None or field.annotation is None:
        return None
    fields: dict[str, FieldInfo] = field.annotation.model_fields
    return fields


def read_file(path: Path) -> str:
    """The text of a configuration file; every way in which it is not one is a one-line error."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise fault(f"{path}: is a directory; name the TOML file in it")
        if not stat.S_ISREG(mode):
            raise fault(f"{path}: is not a regular file; name a TOML file")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise fault(f"{path}: no such file; create it, or name another one with --config") from None
    except PermissionError:
        raise fault(f"{path}: may not be read by this user; give it read permission") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise fault(f"{path}: cannot be read ({reason}); name a readable TOML file with --config") from None
    if len(raw) > MAX_FILE_BYTES:
        raise fault(f"{path}: is larger than {MAX_FILE_BYTES} bytes, which no configuration is; name a TOML file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise fault(f"{path}: is not text in UTF-8 (byte {error.start}); name a TOML file") from None


def file_leaves(path: Path) -> Iterator[Leaf]:
    """The values of a TOML file with the line of each, as far as the line can be found."""
    text = read_file(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise fault(f"{path}: is not valid TOML: {str(error)[:200]}; mend that line") from None
    except RecursionError:
        raise fault(f"{path}: is nested too deeply to be a configuration; write [section] tables") from None
    lines = _line_numbers(text)
    for section, table in document.items():
        if not isinstance(table, dict):
            yield Leaf(section, "", table, _place(path, lines.get((section, ""))))
            continue
        if not table and section_fields(section) is None:
            yield Leaf(section, "", table, _place(path, lines.get((section, ""))))
        for key, value in table.items():
            line = lines.get((section, key)) or lines.get((section, ""))
            yield Leaf(section, key, value, _place(path, line))


def environment_leaves(environment: Mapping[str, str]) -> Iterator[Leaf]:
    """``STAGEMESH_SECTION__KEY`` variables. An empty one counts as not set; one without ``__`` is not ours."""
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith(PREFIX) or "__" not in variable or not text:
            continue
        section, _, key = variable.removeprefix(PREFIX).lower().partition("__")
        yield Leaf(section, key, parse_text(section, key, text), variable)


def override_leaves(overrides: Mapping[str, object]) -> Iterator[Leaf]:
    """Flags as ``{"section.key": value}``; text is read like the environment's, other values are taken as they are."""
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        parsed = parse_text(section, key, value) if isinstance(value, str) else value
        yield Leaf(section, key, parsed, f"--{key.replace('_', '-')}")


def parse_text(section: str, key: str, text: str) -> Any:
    """Text as the value that the knob expects; text that cannot be read stays text, and is refused later by type."""
    field = (section_fields(section) or {}).get(key)
    if field is None or _wants_text(field.annotation):
        return text
    if "\n" not in text:
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            pass
    if get_origin(field.annotation) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _wants_text(annotation: Any) -> bool:
    return annotation is str or (bool(get_args(annotation)) and all(isinstance(a, str) for a in get_args(annotation)))


def _place(path: Path, line: int | None) -> str:
    return f"{path}:{line}" if line else str(path)


def _line_numbers(text: str) -> dict[tuple[str, str], int]:
    """``(section, key) → line`` by a plain scan.

    Text inside multi-line values may look like a key and shadow one; a line number is only a hint to a person.
    """
    found: dict[tuple[str, str], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(line):
            table = _parts(header.group(1))
            found.setdefault((table[0], table[1] if len(table) > 1 else ""), number)
        elif assignment := _ASSIGNMENT.match(line):
            path = (*table, *_parts(assignment.group(1)), "")
            found.setdefault((path[0], path[1]), number)
    return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
