"""The ``[[events]]`` of a scenario: what happens to nodes and links while requests run."""

from dataclasses import dataclass

from coordinator.simulator.scenario_links import link_ends
from coordinator.simulator.toml_table import Table
from coordinator.simulator.units import BYTES_PER_MIB, US_PER_MS, US_PER_S, ceil_us, floor_rate, milli

KINDS = ("link", "node_down", "node_up", "straggler", "cold_start")


@dataclass(frozen=True, slots=True)
class LinkChange:
    """From ``at_us`` the link has these values; ``None`` keeps what it had."""

    at_us: int
    source: str
    target: str
    rtt_us: int | None
    large_frame_bytes_per_s: int | None


@dataclass(frozen=True, slots=True)
class NodeDown:
    """The node stops serving; tokens in flight are lost and their requests start over."""

    at_us: int
    node_id: str


@dataclass(frozen=True, slots=True)
class NodeUp:
    """The node may be planned with again; it has kept its files, not its cache."""

    at_us: int
    node_id: str


@dataclass(frozen=True, slots=True)
class Straggler:
    """The node computes ``factor_milli``/1000 times as long from ``at_us``; 1000 ends it."""

    at_us: int
    node_id: str
    factor_milli: int


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The node's engine restarts: it serves nothing until it has loaded again (``load_us``; ``None`` = by its bytes)."""

    at_us: int
    node_id: str
    load_us: int | None


ScenarioEvent = LinkChange | NodeDown | NodeUp | Straggler | ColdStart


def read_events(tables: list[Table], known: frozenset[str]) -> tuple[ScenarioEvent, ...]:
    """The events in time order; equal times keep the order of the file."""
    events = [_read_event(table, known) for table in tables]
    return tuple(sorted(events, key=lambda event: event.at_us))


def _read_event(table: Table, known: frozenset[str]) -> ScenarioEvent:
    kind = table.choice("kind", KINDS)
    if kind is None:
        table.fail("kind", f"is required: one of {', '.join(KINDS)}")
    at = table.number("at_s", high=10**7)
    if at is None:
        table.fail("at_s", "is required: seconds after the start")
    target = table.text("target")
    if target is None:
        table.fail("target", 'is required: a node id, or "a -> b" for a link')
    at_us = ceil_us(at, US_PER_S)
    event: ScenarioEvent
    if kind == "link":
        event = _link_change(table, at_us, target, known)
    else:
        if target not in known:
            table.fail("target", f'"{target}" is not a node of this scenario (known: {", ".join(sorted(known))})')
        event = _node_event(table, kind, at_us, target)
    table.finish()
    return event


def _link_change(table: Table, at_us: int, target: str, known: frozenset[str]) -> LinkChange:
    source, end = link_ends(table, "target", target, known)
    rtt = table.number("rtt_ms", high=10**7)
    rate = table.number("large_frame_mib_per_s", high=2**33)
    if rtt is None and rate is None:
        table.fail(None, "a link event changes rtt_ms or large_frame_mib_per_s")
    if rate is not None and rate == 0:
        table.fail("large_frame_mib_per_s", "is 0; a link that carries nothing is a node_down")
    return LinkChange(
        at_us,
        source,
        end,
        None if rtt is None else ceil_us(rtt, US_PER_MS),
        None if rate is None else floor_rate(rate, BYTES_PER_MIB),
    )


def _node_event(table: Table, kind: str, at_us: int, node_id: str) -> ScenarioEvent:
    if kind == "node_down":
        return NodeDown(at_us, node_id)
    if kind == "node_up":
        return NodeUp(at_us, node_id)
    if kind == "straggler":
        factor = table.number("factor", high=1_000)
        if factor is None or factor == 0:
            table.fail("factor", "is required: how many times as long the node computes, above 0")
        return Straggler(at_us, node_id, milli(factor))
    load = table.number("load_s", high=10**7)
    return ColdStart(at_us, node_id, None if load is None else ceil_us(load, US_PER_S))
