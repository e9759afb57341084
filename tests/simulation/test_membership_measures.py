"""The measured promises of the membership core, on a scale that a test run can afford. The bench measures the rest."""

import pytest

from tests.simulation.membership_measures import cost, detection, false_deaths, settled_mesh, spread_s


@pytest.mark.parametrize(("nodes", "p50_s"), [(2, 5.5), (3, 5.5), (5, 5.5), (8, 5.7)])
def test_a_crash_is_detected_as_fast_as_by_memberlist(nodes: int, p50_s: float) -> None:
    measured = detection(nodes, trials=10 if nodes < 5 else 4)
    assert measured.p50_s <= p50_s
    assert measured.worst_s <= p50_s + 2.5


@pytest.mark.parametrize("loss_milli", [50, 100])
def test_three_nodes_on_a_lossy_network_declare_nobody_dead(loss_milli: int) -> None:
    assert false_deaths(3, 0.5, loss_milli) == 0


def test_a_change_reaches_forty_nodes_in_seconds_at_a_bounded_cost() -> None:
    mesh, agreed_s = settled_mesh(40, join_s=4, settle_s=4, seeds=3)
    assert agreed_s is not None
    assert agreed_s <= 2
    measured = cost(mesh, 2)
    assert measured.datagrams <= 80
    assert mesh.deaths() == []
    seconds = spread_s(mesh)
    assert seconds is not None
    assert seconds <= 3


def test_above_sixty_four_nodes_connections_stay_bounded_and_everybody_is_known() -> None:
    from config.settings import MembershipSettings
    from tests.simulation.membership_mesh import Mesh

    settings = MembershipSettings(max_connections=8, probe_everyone_up_to=4)
    mesh = Mesh(24, 5, codec=True, settings=settings, seeds=3)
    mesh.start_all()
    assert mesh.run_until(mesh.agreed, 30, step=1) is not None
    mesh.run(20)
    for port in mesh.ports.values():
        assert 2 <= len(port.core._ground.connections) <= 10
    mesh.crash(23)
    assert mesh.run_until(mesh.agreed, 40, step=1) is not None
    mesh.start(23)
    assert mesh.run_until(mesh.agreed, 60, step=1) is not None
    estimates = [
        mesh.ports[0].core.estimate_rtt_us(mesh.ids[a], mesh.ids[b]) for a in range(1, 8) for b in range(1, 8) if a < b
    ]
    assert all(estimate is not None and 100 <= estimate <= 20_000 for estimate in estimates)
