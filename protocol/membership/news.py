"""Whether a newer row of a node tells a reader anything that it would decide differently for.

Most rows only refresh: a higher number, older ages, a link's minimum a few microseconds lower. Nodes that plan look at the
whole membership when there is news, and every few seconds in any case; so what is left out here is only seen later.
"""

from typing import Any

from protocol.rows import LinkFact, NodeRow
from protocol.wire import Wire

_NOISE = frozenset({"seq", "links", "coordinate"})
_FIELDS = tuple(name for name in NodeRow.model_fields if name not in _NOISE)


def is_news(old: NodeRow, new: NodeRow) -> bool:
    """Differs in more than numbering, ages and the noise of links. About 30 µs for a row with 31 links."""
    if any(_ageless(getattr(old, name)) != _ageless(getattr(new, name)) for name in _FIELDS):
        return True
    return len(old.links) != len(new.links) or any(
        _standing(a) != _standing(b) for a, b in zip(old.links, new.links, strict=True)
    )


def _standing(link: LinkFact) -> tuple[object, ...]:
    return link.target, link.samples > 1, link.degraded, link.send_bytes_per_s, link.receive_bytes_per_s


def _ageless(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_ageless(item) for item in value]
    if isinstance(value, Wire):
        return [_ageless(item) for name, item in value if not name.endswith("age_us")]
    return value
