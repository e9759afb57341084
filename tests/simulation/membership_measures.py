"""What is measured of the membership core in the simulated network; small in the tests, large in the bench.

In the meshes of ``settled_mesh`` every message goes through the codec, both ways, at a thousand nodes too. Rows are
encoded, signed and verified at every size, but from 64 nodes on equal bytes are opened once for the whole mesh and not
once per node. Where only verdicts are counted (``detection`` above 20 nodes, ``false_deaths``) messages are handed over as
the frozen objects that they are.
"""

import gc
import statistics
from dataclasses import dataclass

from protocol.ids import NodeId
from tests.simulation.membership_mesh import SECOND, Mesh

SHARED_ROWS_FROM = 64


@dataclass(frozen=True)
class Detection:
    """Seconds from a crash to the verdict, over all survivors of all trials."""

    p50_s: float
    worst_s: float
    first_p50_s: float


def crash_and_detect(mesh: Mesh, number: int) -> list[float]:
    """Crash one node of a settled mesh; seconds to the verdict of every survivor, in order."""
    survivors, seen = len(mesh.ports) - 1, len(mesh.changes)
    mesh.crash(number)
    crash_us = mesh.network.now_us

    def verdicts() -> list[float]:
        return [
            (change.at_us - crash_us) / SECOND
            for change in mesh.changes[seen:]
            if change.change.new == "dead" and change.change.node_id == mesh.ids[number]
        ]

    mesh.run_until(lambda: len(verdicts()) >= survivors, 60, step=0.5)
    times = sorted(verdicts())
    assert len(times) == survivors, f"{len(times)} of {survivors} noticed"
    return times


def crash_each_and_detect(mesh: Mesh, numbers: list[int], apart_s: float) -> list[list[float]]:
    """Crash several nodes of one mesh, one after the other; for each the seconds to the verdict of every survivor of all."""
    seen, crashed_us = len(mesh.changes), dict[NodeId, int]()
    for number in numbers:
        mesh.crash(number)
        crashed_us[mesh.ids[number]] = mesh.network.now_us
        mesh.run(apart_s)

    def verdicts() -> list[list[float]]:
        times: dict[NodeId, list[float]] = {node_id: [] for node_id in crashed_us}
        for change in mesh.changes[seen:]:
            if change.change.new == "dead" and change.observer not in crashed_us:
                times[change.change.node_id].append((change.at_us - crashed_us[change.change.node_id]) / SECOND)
        return [sorted(each) for each in times.values()]

    mesh.run_until(lambda: all(len(each) >= len(mesh.ports) for each in verdicts()), 60, step=0.5)
    times = verdicts()
    assert [len(each) for each in times] == [len(mesh.ports)] * len(numbers), "somebody did not notice, or twice"
    return times


def up_to_date_milli(mesh: Mesh) -> int:
    """Share of all pairs (observer, node) in which the observer holds the node's latest row."""
    latest = {port.name: (row.boot_counter, row.seq) for port in mesh.ports.values() if (row := port.core.own_row)}
    held = sum(
        version == latest.get(node_id) for port in mesh.ports.values() for node_id, _, version in port.core.standings()
    )
    return held * 1000 // (len(mesh.ports) * (len(mesh.ports) - 1))


def summary(trials: list[list[float]]) -> Detection:
    """Over all survivors of all trials, and over the first observer of each."""
    verdicts = [seconds for times in trials for seconds in times]
    return Detection(statistics.median(verdicts), max(verdicts), statistics.median(times[0] for times in trials))


def detection(nodes: int, trials: int, *, settle_s: float = 12.0, loss_milli: int = 0) -> Detection:
    """Crash one node of a settled mesh, at another phase of the probes in every trial."""
    seen: list[list[float]] = []
    for trial in range(trials):
        mesh = Mesh(
            nodes, 1_000 * nodes + trial, codec=nodes <= 20, shared_rows=nodes > 8, seeds=min(8, -(-nodes // 8))
        )
        mesh.network.default.loss_milli = loss_milli
        mesh.start_all()
        mesh.run(settle_s + trial / trials)
        seen.append(crash_and_detect(mesh, nodes - 1))
        assert not [change for change in mesh.deaths() if change.change.node_id != mesh.ids[nodes - 1]]
    return summary(seen)


def false_deaths(nodes: int, hours: float, loss_milli: int, seed: int = 1) -> int:
    """Verdicts ``dead`` in a mesh in which nobody dies."""
    mesh = Mesh(nodes, seed, codec=False)
    mesh.network.default.loss_milli = loss_milli
    mesh.start_all()
    mesh.run(hours * 3600)
    assert mesh.agreed()
    return len(mesh.deaths())


@dataclass(frozen=True)
class Cost:
    """Per node and second in an idle mesh; bytes are encoded envelopes without transport overhead."""

    datagrams: float
    datagram_bytes: float
    stream_messages: float
    stream_bytes: float


def settled_mesh(nodes: int, *, join_s: int, settle_s: int, seeds: int = 1) -> tuple[Mesh, float | None]:
    """A mesh whose nodes joined one after the other, and the seconds until all agreed after the last had started."""
    mesh = Mesh(nodes, nodes, shared_rows=nodes >= SHARED_ROWS_FROM, seeds=seeds)
    for number in mesh.numbers:
        at_us = mesh.network.now_us + number * join_s * SECOND // nodes
        mesh.network.at(at_us, lambda number=number: mesh.start(number))
    # A million table entries hold no cycles, and looking for them takes longer than the mesh.
    gc.disable()
    try:
        mesh.run(join_s)
        agreed_s = mesh.run_until(mesh.agreed, 300, step=0.5)
        assert mesh.deaths() == []
        mesh.changes.clear()
        mesh.run(settle_s)
    finally:
        gc.enable()
    return mesh, agreed_s


def cost(mesh: Mesh, seconds: int) -> Cost:
    """Traffic of the next seconds."""
    before = totals(mesh)
    mesh.run(seconds)
    share = len(mesh.ports) * seconds
    return Cost(*(round((new - old) / share, 1) for new, old in zip(totals(mesh), before, strict=True)))


def totals(mesh: Mesh) -> tuple[int, int, int, int]:
    """Counters of all hosts."""
    traffic = mesh.network.traffic.values()
    return (
        sum(each.datagrams for each in traffic),
        sum(each.datagram_bytes for each in traffic),
        sum(each.stream_messages for each in traffic),
        sum(each.stream_bytes for each in traffic),
    )


def spread_s(mesh: Mesh, share_milli: int = 950, limit_s: float = 60.0) -> float | None:
    """Seconds until that share of the mesh holds a new row of one node."""
    port = mesh.ports[len(mesh.ports) // 2]
    port.publish(status="draining")
    row = port.core.own_row
    assert row is not None

    def reached() -> bool:
        holders = 1
        for other in mesh.ports.values():
            entry = other.core._ground.table.get(port.name)
            holders += entry is not None and entry.row.seq >= row.seq
        return holders * 1000 >= share_milli * len(mesh.ports)

    return mesh.run_until(reached, limit_s, step=0.1)
