"""Failures that people reported of the way between nodes, replayed against the real cores."""

import itertools

import pytest

from config.settings import LinkSettings
from protocol.links import is_settled
from protocol.rows import LinkFact
from tests.simulation.membership_mesh import HOUR, SECOND, Mesh


def published(mesh: Mesh, observer: int, owner: int, target: int) -> LinkFact:
    """What ``observer`` reads in the row of ``owner`` about its link to ``target``."""
    row = mesh.ports[observer].core.members()[mesh.ids[owner]].row
    return next(fact for fact in row.links if fact.target == mesh.ids[target])


def cut(mesh: Mesh, one: int, *, blocked: bool) -> None:
    rest = [node_id for node_id in mesh.ids if node_id != mesh.ids[one]]
    mesh.network.partition([mesh.ids[one]], rest, blocked=blocked)
    mesh.network.partition(rest, [mesh.ids[one]], blocked=blocked)


def test_an_endpoint_that_hangs_connecting_for_15_hours_is_not_advertised_and_is_dialled_all_the_time() -> None:
    """Handshakes vanish without an answer and the shell never says how a dial ended."""
    mesh = Mesh(2, 21).start_all()
    mesh.run(10)
    cut(mesh, 1, blocked=True)
    wedged_us = mesh.network.now_us
    mesh.run(15 * HOUR // SECOND)
    for observer, subject in ((0, 1), (1, 0)):
        assert mesh.state(observer, subject) == "dead"
        seen = [change for change in mesh.changes if change.observer == mesh.ids[observer] and change.at_us > wedged_us]
        assert [change.change.new for change in seen] == ["suspect", "dead"], "nothing made it look alive again"
    for port in mesh.ports.values():
        times = [at_us for at_us, _ in port.dials if at_us > wedged_us]
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 64 * SECOND
        assert times[-1] >= mesh.network.now_us - 64 * SECOND
    cut(mesh, 1, blocked=False)
    assert mesh.run_until(mesh.agreed, 64) is not None


def test_idle_wifi_that_answers_in_77_ms_is_worth_what_it_carries_under_load() -> None:
    mesh = Mesh(2, 22)
    mesh.network.default.delay_us, mesh.network.default.jitter_us = 38_500, 3_000
    mesh.start_all()
    mesh.run(30)
    idle = published(mesh, 1, 0, 1)
    assert idle.min_rtt_us is not None
    assert idle.min_rtt_us >= 70_000
    for source, target in ((0, 1), (1, 0)):
        shape = mesh.network.shape(mesh.ids[source], mesh.ids[target])
        shape.delay_us, shape.jitter_us = 1_500, 500
    mesh.run(8)
    for port, peer in ((mesh.ports[0], mesh.ids[1]), (mesh.ports[1], mesh.ids[0])):
        port.core.on_transfer(peer, "send", 100_000_000, 8 * SECOND, "link", port.now_us)
    for source, target in ((0, 1), (1, 0)):
        shape = mesh.network.shape(mesh.ids[source], mesh.ids[target])
        shape.delay_us, shape.jitter_us = 38_500, 3_000
    mesh.run(300)
    loaded = published(mesh, 1, 0, 1)
    assert loaded.min_rtt_us is not None
    assert loaded.min_rtt_us <= 5_000
    assert loaded.send_bytes_per_s == 12_500_000
    assert is_settled(loaded, LinkSettings())
    assert not loaded.degraded, "a radio that sleeps again is no fall-back to another path"
    assert "link_degraded" not in mesh.ports[1].core.members()[mesh.ids[0]].row.degraded


def test_an_rtt_of_0_ms_reaches_no_row() -> None:
    """A host whose clock stands still, or a peer that answers what was never asked, measures nothing."""
    mesh = Mesh(2, 23)
    mesh.network.default.delay_us = mesh.network.default.jitter_us = 0
    mesh.start_all()
    mesh.run(60)
    assert mesh.agreed()
    for observer, owner in ((0, 1), (1, 0)):
        links = mesh.ports[observer].core.members()[mesh.ids[owner]].row.links
        assert [fact.min_rtt_us for fact in links if fact.min_rtt_us is not None] == []
    assert mesh.ports[0].rejected["rtt"] > 10
    assert not mesh.deaths(), "a node whose round trips are refused is alive all the same"


@pytest.mark.parametrize("nodes", [24])
def test_estimates_of_a_mesh_too_large_for_all_pairs_are_never_called_settled(nodes: int) -> None:
    from config.settings import MembershipSettings

    settings = MembershipSettings(max_connections=8, probe_everyone_up_to=4)
    mesh = Mesh(nodes, 24, settings=settings, seeds=3)
    mesh.start_all()
    mesh.run(60)
    core = mesh.ports[0].core
    told = {(node_id, fact.target): fact for node_id, member in core.members().items() for fact in member.row.links}
    pairs = set(itertools.permutations(mesh.ids, 2))
    assert len(told) < len(pairs) // 2, "most pairs are not measured"
    for fact in told.values():
        assert fact.samples >= 1
        assert not (fact.estimated and is_settled(fact, LinkSettings()))
    for source, target in pairs - told.keys():
        estimate = core.estimate_rtt_us(source, target)
        assert estimate is not None
        as_fact = LinkFact(target=target, min_rtt_us=estimate, samples=9, first_age_us=60 * SECOND, estimated=True)
        assert not is_settled(as_fact, LinkSettings())
