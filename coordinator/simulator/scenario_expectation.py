"""The ``[expect]`` table: what the file's author expects of the planner, so that a scenario checks itself."""

from dataclasses import dataclass, field

from coordinator.simulator.toml_table import Table
from coordinator.simulator.units import US_PER_MS, ceil_us


@dataclass(frozen=True, slots=True)
class Expectation:
    """Every field that is not ``None`` or empty must hold of the plan."""

    refusal: str | None = None
    placement: str | None = None
    order: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    stage_count: int | None = None
    target_met: bool | None = None
    target_unknown: bool = False
    tpot_us_min: int | None = None
    tpot_us_max: int | None = None
    layers: dict[str, int] = field(default_factory=dict)
    layers_at_most: dict[str, int] = field(default_factory=dict)
    context_length: int | None = None
    diagnostics: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def read_expectation(table: Table | None, known: frozenset[str]) -> Expectation:
    """Nothing is expected without the table."""
    if table is None:
        return Expectation()
    low, high = table.number("tpot_ms_min", high=10**9), table.number("tpot_ms_max", high=10**9)
    expectation = Expectation(
        refusal=table.text("refusal"),
        placement=table.choice("placement", ("performance_aware", "capacity_only", "locked")),
        order=_nodes(table, "order", known),
        unused=_nodes(table, "unused", known),
        stage_count=table.whole("stage_count", high=1_024),
        target_met=table.flag("target_met"),
        target_unknown=table.flag("target_unknown") or False,
        tpot_us_min=None if low is None else ceil_us(low, US_PER_MS),
        tpot_us_max=None if high is None else ceil_us(high, US_PER_MS),
        layers=_counts(table, "layers", known),
        layers_at_most=_counts(table, "layers_at_most", known),
        context_length=table.whole("context_length", high=2**31),
        diagnostics=tuple(table.texts("diagnostics") or ()),
        flags=tuple(table.texts("flags") or ()),
    )
    table.finish()
    return expectation


def _nodes(table: Table, key: str, known: frozenset[str]) -> tuple[str, ...]:
    ids = tuple(table.texts(key) or ())
    for node_id in ids:
        if node_id not in known:
            table.fail(key, f'"{node_id}" is not a node of this scenario')
    return ids


def _counts(table: Table, key: str, known: frozenset[str]) -> dict[str, int]:
    row = table.table(key)
    counts: dict[str, int] = {}
    for node_id in row or ():
        assert row is not None
        if node_id not in known:
            row.fail(node_id, "is not a node of this scenario")
        counts[node_id] = row.whole(node_id, high=2**24) or 0
    return counts
