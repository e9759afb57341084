"""The ``[links]`` table: directed edges named exactly ``a -> b``."""

from coordinator.planner.problem import Edge
from coordinator.simulator.toml_table import Table
from coordinator.simulator.units import BYTES_PER_MIB, US_PER_MS, US_PER_S, ceil_us, floor_rate

MAX_LINKS = 65_536


def link_ends(table: Table, key: str, name: str, known: frozenset[str]) -> tuple[str, str]:
    """The two ends of a link named exactly ``a -> b``; ``key`` is the key to blame."""
    parts = name.split(" ")
    if len(parts) != 3 or parts[1] != "->" or not parts[0] or not parts[2]:
        table.fail(key, f'"{name}" is not a link; write exactly "a -> b" with two node ids')
    for end in (parts[0], parts[2]):
        if end not in known:
            table.fail(key, f'"{end}" is not a node of this scenario (known: {", ".join(sorted(known)) or "none"})')
    if parts[0] == parts[2]:
        table.fail(key, "a link needs two different nodes")
    return parts[0], parts[2]


def read_links(table: Table | None, known: frozenset[str]) -> tuple[Edge, ...]:
    """Every edge of the table, in the order of the file; none without one."""
    edges: list[Edge] = []
    for name in table or ():
        assert table is not None
        source, target = link_ends(table, name, name, known)
        row = table.table(name)
        assert row is not None
        if len(edges) == MAX_LINKS:
            table.fail(name, f"more than {MAX_LINKS} links")
        edges.append(_read_link(row, source, target))
    return tuple(edges)


def _read_link(row: Table, source: str, target: str) -> Edge:
    rtt = row.number("rtt_ms", high=10**7)
    rate = row.number("large_frame_mib_per_s", high=2**33)
    if rate is not None and rate == 0:
        row.fail("large_frame_mib_per_s", "is 0; leave it out when it is not known")
    first, last = row.number("rtt_first_age_s", high=10**9), row.number("rtt_last_age_s", high=10**9)
    supported = row.flag("direct_prediction_return_supported")
    edge = Edge(
        source=source,
        target=target,
        rtt_us=None if rtt is None else ceil_us(rtt, US_PER_MS),
        rtt_samples=row.whole("rtt_samples", high=10**12),
        rtt_first_age_us=None if first is None else ceil_us(first, US_PER_S),
        rtt_last_age_us=None if last is None else ceil_us(last, US_PER_S),
        large_frame_bytes_per_s=None if rate is None else floor_rate(rate, BYTES_PER_MIB),
        direct_prediction_return_supported=True if supported is None else supported,
    )
    row.finish()
    return edge
