"""TOML file < environment < flags → ``Settings``. The only way in which a configuration comes into the program.

Every value keeps its origin, so that a refusal can say where the wrong value stands and ``stagemesh config show
--origin`` where the right one came from. The first mistake is told in full, further ones are counted.
"""

import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from config.errors import ConfigurationError, fault
from config.paths import cache_dir, default_config_files, state_dir
from config.settings import Settings
from config.sources import Leaf, environment_leaves, file_leaves, override_leaves, section_fields

__all__ = ["Loaded", "cache_dir", "calibration_text", "load", "load_settings", "origin", "state_dir"]

NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings with the origin of every value that is not a default: ``{"api.port": "stagemesh.toml:7"}``."""

    settings: Settings
    file: Path | None
    origins: Mapping[str, str] = field(default_factory=dict)


def load(
    config: Path | None = None,
    overrides: Mapping[str, object] = NOTHING,
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """Read all sources and judge them. ``config=None`` looks at the default places, where absence is fine.

    ``overrides`` are flags, ``{"section.key": value}``; ``None`` means "flag not given". Raises ``ConfigurationError``.
    """
    environment = os.environ if environment is None else environment
    file = config if config is not None else _first_existing(default_config_files(environment))
    leaves = list(file_leaves(file)) if file is not None else []
    leaves += environment_leaves(environment)
    leaves += override_leaves({name: value for name, value in overrides.items() if value is not None})
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    mistakes = [mistake for leaf in leaves if (mistake := _misplaced(leaf))]
    if mistakes:
        raise _told(mistakes)
    for leaf in leaves:
        if leaf.key:
            values.setdefault(leaf.section, {})[leaf.key] = _shaped(leaf)
            origins[f"{leaf.section}.{leaf.key}"] = leaf.origin
    try:
        settings = Settings.model_validate(values, strict=True)
    except ValidationError as error:
        raise _told([_refused(detail, origins) for detail in error.errors(include_url=False)]) from None
    return Loaded(settings, file, MappingProxyType(origins))


def load_settings(
    config: Path | None = None,
    overrides: Mapping[str, object] = NOTHING,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """``load(…).settings`` for callers that do not ask where a value came from."""
    return load(config, overrides, environment).settings


def origin(loaded: Loaded) -> dict[str, str]:
    """Every knob and where its value came from; ``default`` when nobody set it."""
    return {
        f"{section}.{key}": loaded.origins.get(f"{section}.{key}", "default")
        for section in Settings.model_fields
        for key in section_fields(section) or {}
    }


def calibration_text(name: str) -> str:
    """The TOML text of a built-in engine profile, or of a file (``….toml``). ``ConfigurationError`` names what exists."""
    if name.endswith(".toml"):
        try:
            return Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise fault(
                f"calibration profile {name} cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None
    folder = Path(__file__).parent / "calibrations"
    known = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    if name not in known:
        raise fault(f"calibration profile {name!r} does not exist{_meant(name, known)}; there are: {', '.join(known)}")
    return (folder / f"{name}.toml").read_text(encoding="utf-8")


def _first_existing(candidates: tuple[Path, ...]) -> Path | None:
    for candidate in candidates:
        try:
            if candidate.exists():
                return candidate
        except OSError:  # a parent that may not be searched: for this user there is no such file
            continue
    return None


def _told(mistakes: list[str]) -> ConfigurationError:
    more = len(mistakes) - 1
    return fault(mistakes[0] + (f" (and {more} more)" if more else ""))


def _misplaced(leaf: Leaf) -> str | None:
    """What is wrong with the name of a value, if anything."""
    fields = section_fields(leaf.section)
    if fields is None:
        known = list(Settings.model_fields)
        return f"{leaf.origin}: unknown section {leaf.section!r}{_meant(leaf.section, known)}; remove or rename it"
    if not leaf.key:
        return f"{leaf.origin}: {leaf.section} must be a table; write [{leaf.section}] with keys below it"
    if leaf.key in fields:
        return None
    elsewhere = [section for section in Settings.model_fields if leaf.key in (section_fields(section) or {})]
    hint = f", did you mean {elsewhere[0]}.{leaf.key}?" if elsewhere else _meant(leaf.key, list(fields))
    return f"{leaf.origin}: unknown key {leaf.section}.{leaf.key}{hint}; remove or rename it"


def _meant(word: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def _shaped(leaf: Leaf) -> Any:
    """The value as strict validation wants it: arrays are tuples, nothing else is coerced."""
    annotation = (section_fields(leaf.section) or {})[leaf.key].annotation
    if get_origin(annotation) is tuple and isinstance(leaf.value, list):
        return tuple(leaf.value)
    return leaf.value


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "tuple_type": "a list of texts",
    "too_long": "shorter",
}


def _refused(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """One refused value as a sentence: place, key, value, rule."""
    section, key = (str(part) for part in (*detail["loc"], "", "")[:2])
    name = f"{section}.{key}" if key else section
    place = origins.get(name, "configuration")
    given = _shown(detail["input"])
    context = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than_equal":
            rule = f"it must be at least {context['ge']}"
        case "greater_than":
            rule = f"it must be more than {context['gt']}"
        case "less_than_equal":
            rule = f"it must be at most {context['le']}"
        case "literal_error":
            rule = f"it must be one of {_choices(section, key)}"
        case "string_too_long":
            rule = f"it must have at most {context['max_length']} characters"
        case "value_error":
            rule = str(context["error"])
        case kind:
            rule = f"it must be {_KINDS[kind]}" if kind in _KINDS else detail["msg"]
    return f"{place}: {name} is {given}: {rule}; change or remove it"


def _choices(section: str, key: str) -> str:
    annotation = (section_fields(section) or {})[key].annotation
    literal = next((a for a in (annotation, *get_args(annotation)) if get_origin(a) is typing.Literal), None)
    return ", ".join(str(choice) for choice in get_args(literal))


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
