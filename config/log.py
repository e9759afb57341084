"""structlog set-up: JSON lines for machines, colour for people, always on stderr, never a secret.

Events are constant names with fields (``log.info("peer_admitted", peer=short(id))``). What libraries say through the
standard library's ``logging`` goes through the same renderer, from ``warning`` on. Values come from peers as well, so
control characters never reach a terminal, and long values are cut.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO

# structlog's tracebacks import rich, pygments and attrs wherever they are installed: 5 MB that no line of the log needs,
# since tracebacks are plain here. Whoever draws tables imports rich when it does.
_without_rich = sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]
import structlog  # noqa: E402 - after the switch above

if _without_rich:
    del sys.modules["rich"]
from structlog.typing import EventDict, Processor, WrappedLogger  # noqa: E402 - after the switch above

from config.settings import LogSettings  # noqa: E402 - after the switch above

REDACTED = "[redacted]"
MAX_VALUE_CHARACTERS = 4_096
"""Longer text is cut: a log line is not a place for payloads."""

_SECRET_KEY = re.compile(
    r"(^|_)(token|secret|password|authorization|proof|private_key|cookie|credential)s?$", re.IGNORECASE
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]+")
_JOIN_TOKEN = re.compile(r"\bsm1_[A-Za-z0-9_=-]{16,}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def set_up_logging(
    settings: LogSettings, stream: TextIO | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Route structlog and ``logging`` to ``stream`` (default: stderr). May be called again, e.g. with a new level."""
    stream = sys.stderr if stream is None else stream
    environment = os.environ if environment is None else environment
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
        structlog.processors.StackInfoRenderer(),
    ]
    if wants_json(settings, stream, environment):
        rendering: list[Processor] = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str, sort_keys=False),
        ]
    else:
        colours = stream.isatty() and not environment.get("NO_COLOR")
        rendering = [
            printable,
            structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback),
        ]
    level = getattr(logging, settings.level.upper())
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    _adopt_libraries(shared, rendering, stream, max(level, logging.WARNING))


def wants_json(settings: LogSettings, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """``auto``: JSON under systemd's journal or whenever nobody looks at a terminal."""
    if settings.format != "auto":
        return settings.format == "json"
    return bool(environment.get("JOURNAL_STREAM")) or not stream.isatty()


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace secrets by key, and bearer and join tokens inside text; cut what is too long."""
    return {key: REDACTED if _SECRET_KEY.search(key) else _clean(value) for key, value in event.items()}


def printable(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Show control characters instead of sending them: a peer's name must not drive an operator's terminal."""
    return {key: _visible(value) if isinstance(value, str) else value for key, value in event.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: REDACTED if _SECRET_KEY.search(str(k)) else _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if not isinstance(value, str):
        return value
    text = _JOIN_TOKEN.sub(REDACTED, _BEARER.sub(rf"\1 {REDACTED}", value))
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}… ({len(text)} characters)"


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def _adopt_libraries(shared: list[Processor], rendering: list[Processor], stream: TextIO, level: int) -> None:
    """Everything that speaks through ``logging`` ends in the same lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
