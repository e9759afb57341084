"""Failures that people reported of meshes in the field, replayed against the real cores."""

import itertools

import pytest

from config.settings import LinkSettings, MembershipSettings
from protocol.links import is_settled
from protocol.membership.effects import Dial
from tests.simulation.membership_mesh import MINUTE, SECOND, Mesh, identity
from tests.simulation.membership_watcher import Watcher


def revived(mesh: Mesh, number: int, since_us: int) -> list[str]:
    """Who saw the node alive (again) after that time."""
    return [
        change.observer
        for change in mesh.changes
        if change.at_us > since_us and change.change.node_id == mesh.ids[number] and change.change.new == "alive"
    ]


def leave(mesh: Mesh, number: int) -> int:
    port = mesh.ports[number]
    port.carry_out(port.core.leave(port.now_us))
    mesh.run(0.5)
    mesh.exit(number)
    return mesh.network.now_us


def test_a_node_that_left_does_not_reappear_from_a_machine_that_slept_45_minutes() -> None:
    mesh = Mesh(3, 1).start_all()
    mesh.run(10)
    mesh.network.suspend(mesh.ids[1], 45 * MINUTE)
    mesh.run(1)
    left_us = leave(mesh, 2)
    assert mesh.state(0, 2) == "left"
    mesh.run(45 * 60 + 60)
    assert mesh.state(0, 1) == "alive"
    assert mesh.state(1, 2) in {"left", "dead"}
    assert revived(mesh, 2, left_us) == []


def test_a_node_that_left_comes_back_when_it_is_started_again() -> None:
    mesh = Mesh(3, 2).start_all()
    mesh.run(10)
    leave(mesh, 2)
    mesh.run(5)
    mesh.start(2)
    assert mesh.run_until(mesh.agreed, 10) is not None
    assert all(not port.core.members()[mesh.ids[2]].flaps for port in mesh.ports.values() if port.number != 2)


@pytest.mark.parametrize("nodes", [2, 3, 6])
def test_a_briefly_lost_peer_is_back_within_30_seconds_of_healing(nodes: int) -> None:
    mesh = Mesh(nodes, nodes).start_all()
    mesh.run(10)
    lost, rest = mesh.ids[:1], mesh.ids[1:]
    for sources, targets in ((lost, rest), (rest, lost)):
        mesh.network.partition(sources, targets)
    mesh.run(120)
    assert all(mesh.state(number, 0) == "dead" for number in mesh.numbers[1:])
    for sources, targets in ((lost, rest), (rest, lost)):
        mesh.network.partition(sources, targets, blocked=False)
    seconds = mesh.run_until(mesh.agreed, 30)
    assert seconds is not None
    assert len(mesh.ports[1].core.members()[mesh.ids[0]].flaps) == 1


def test_a_relay_only_node_neither_dies_nor_reports_others_dead() -> None:
    mesh = Mesh(5, 3)
    alone, others = mesh.ids[:1], mesh.ids[2:]
    mesh.network.partition(alone, others)
    mesh.network.partition(others, alone)
    mesh.seeds = (mesh.address(1),)
    mesh.start_all()
    mesh.run(180)
    assert mesh.agreed()
    assert mesh.deaths() == []


def test_a_relay_only_node_comes_back_after_its_restart() -> None:
    mesh = Mesh(4, 3)
    alone, others = mesh.ids[:1], mesh.ids[2:]
    mesh.network.partition(alone, others)
    mesh.network.partition(others, alone)
    mesh.seeds = (mesh.address(1),)
    mesh.start_all()
    mesh.run(20)
    mesh.crash(0)
    mesh.run(30)
    mesh.start(0)
    assert mesh.run_until(mesh.agreed, 40) is not None


@pytest.mark.parametrize("deaf", [True, False])
def test_a_half_cut_node_gets_no_healthy_node_removed_and_starts_no_storm(deaf: bool) -> None:
    mesh = Mesh(6, 4).start_all()
    mesh.run(20)
    before = sum(traffic.datagrams + traffic.stream_messages for traffic in mesh.network.traffic.values()) / 20
    cut, rest = mesh.ids[:1], mesh.ids[1:]
    mesh.network.partition(rest, cut) if deaf else mesh.network.partition(cut, rest)
    start_us = mesh.network.now_us
    counted = sum(traffic.datagrams + traffic.stream_messages for traffic in mesh.network.traffic.values())
    mesh.run(60)
    after = sum(traffic.datagrams + traffic.stream_messages for traffic in mesh.network.traffic.values()) - counted
    removed = {(change.observer, change.change.node_id) for change in mesh.deaths(start_us)}
    assert {pair for pair in removed if cut[0] not in pair} == set()
    assert after / 60 < 2 * before
    mesh.network.partition(mesh.ids, mesh.ids, blocked=False)
    assert mesh.run_until(mesh.agreed, 30) is not None


def test_blocked_datagrams_show_as_a_label_and_not_as_a_join_and_fail_cycle() -> None:
    mesh = Mesh(3, 5)
    for number in (0, 1):
        mesh.network.shape(mesh.ids[number], mesh.ids[2]).datagrams_blocked = True
        mesh.network.shape(mesh.ids[2], mesh.ids[number]).datagrams_blocked = True
    mesh.start_all()
    mesh.run(180)
    assert [change.change.reason for change in mesh.changes] == ["joined"] * 6
    row = mesh.ports[0].core.members()[mesh.ids[2]].row
    assert "datagrams_blocked" in row.degraded
    assert [is_settled(fact, LinkSettings()) for fact in row.links] == [True, True]
    for number in (0, 1):
        mesh.network.shape(mesh.ids[number], mesh.ids[2]).datagrams_blocked = False
        mesh.network.shape(mesh.ids[2], mesh.ids[number]).datagrams_blocked = False
    mesh.run(60)
    assert "datagrams_blocked" not in mesh.ports[0].core.members()[mesh.ids[2]].row.degraded


def test_a_lonely_node_tries_its_seed_for_ever_and_never_less_than_once_a_minute() -> None:
    mesh = Mesh(2, 6)
    port = mesh.start(1)
    mesh.run(15 * 3600)
    times = [at_us for at_us, _ in port.dials]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) <= 64 * SECOND
    assert len(set(gaps)) > len(gaps) // 2, "dials are not jittered"
    mesh.start(0)
    assert mesh.run_until(mesh.agreed, 64) is not None


def test_after_an_outage_the_nodes_do_not_all_dial_at_the_same_moment() -> None:
    mesh = Mesh(16, 7).start_all()
    mesh.run(20)
    outage_us = mesh.network.now_us
    for source in mesh.ids:
        for peer in list(mesh.network.hosts[source].links):
            mesh.network.close(source, peer)
    mesh.run(6)
    firsts = {}
    for port in mesh.ports.values():
        for at_us, dial in port.dials:
            if at_us >= outage_us:
                firsts.setdefault((port.number, dial.peer), at_us - outage_us)
    buckets = [0] * 12
    for after_us in firsts.values():
        buckets[after_us // 500_000] += 1
    assert max(buckets) <= 0.3 * sum(buckets), buckets
    assert mesh.run_until(mesh.agreed, 10) is not None
    assert mesh.deaths() == []


def test_a_dial_that_never_ends_is_given_up_and_repeated() -> None:
    mesh = Mesh(3, 8).start_all()
    mesh.run(10)
    mesh.crash(2)
    mesh.run(15 * 60)
    port = mesh.ports[0]
    times = [at_us for at_us, dial in port.dials if dial.peer == mesh.ids[2]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) > 15
    assert max(gaps) <= 64 * SECOND


def test_a_laptop_that_slept_an_hour_is_back_at_once_with_fresh_measurements() -> None:
    mesh = Mesh(3, 9)
    mesh.network.after_event = Watcher(mesh)
    mesh.start_all()
    mesh.run(20)
    mesh.network.suspend(mesh.ids[2], 60 * MINUTE)
    mesh.run(60 * 60)
    assert mesh.state(0, 2) == "dead"
    seconds = mesh.run_until(mesh.agreed, 30)
    assert seconds is not None
    assert seconds < 15
    mesh.run(10)
    for fact in mesh.ports[2].core.link_facts(mesh.ports[2].now_us):
        assert fact.first_age_us < 30 * SECOND
    deaths_seen_by_the_laptop = [c for c in mesh.deaths() if c.observer == mesh.ids[2]]
    assert deaths_seen_by_the_laptop == []


def test_a_node_that_stalls_every_minute_becomes_plannable_ever_more_rarely() -> None:
    mesh = Mesh(4, 10).start_all()
    mesh.run(20)
    for _ in range(20):
        mesh.network.stall(mesh.ids[3], mesh.network.random.randint(6, 10) * SECOND)
        mesh.run(60)
    for observer in range(3):
        seen = [
            change
            for change in mesh.changes
            if change.observer == mesh.ids[observer] and change.change.node_id == mesh.ids[3]
        ]
        deaths = [change.at_us for change in seen if change.change.new == "dead"]
        assert len(deaths) <= 20, "more than one death per stall"
        member = mesh.ports[observer].core.members()[mesh.ids[3]]
        assert member.state == "alive"
        assert len(member.flaps) == min(16, len(deaths))
        assert replans(seen) <= 4
    others = [change for change in mesh.deaths() if change.change.node_id != mesh.ids[3]]
    assert others == [], "the staller or its victims accused a healthy node"


def replans(seen: list) -> int:
    """Losses of a node that had been plannable: alive for 8 s × 2^flaps, at most 10 min (PROTOCOL)."""
    flaps, alive_since_us, losses = 0, None, 0
    for change in seen:
        if change.change.new == "alive" and change.change.old != "suspect":
            flaps += change.change.old == "dead"
            alive_since_us = change.at_us
        elif change.change.new == "dead" and alive_since_us is not None:
            dwell_us = min(600 * SECOND, 8 * SECOND << min(flaps, 10))
            losses += change.at_us - alive_since_us >= dwell_us
            alive_since_us = None
    return losses


def test_a_crash_is_known_to_everybody_and_a_restart_too() -> None:
    mesh = Mesh(5, 11).start_all()
    mesh.run(10)
    mesh.crash(4)
    assert mesh.run_until(mesh.agreed, 8) is not None
    mesh.start(4)
    assert mesh.run_until(mesh.agreed, 5) is not None


def test_three_nodes_know_each_other_within_a_second_and_publish_settled_links_within_ten() -> None:
    mesh = Mesh(3, 12).start_all()
    assert mesh.run_until(mesh.agreed, 1.5) is not None

    def settled() -> bool:
        for port in mesh.ports.values():
            for member in port.core.members().values():
                if sum(is_settled(fact, LinkSettings()) for fact in member.row.links) < 2:
                    return False
        return True

    seconds = mesh.run_until(settled, 20)
    assert seconds is not None
    assert seconds < 9


def test_an_idle_mesh_publishes_little_although_its_rtt_is_noisy() -> None:
    mesh = Mesh(4, 13)
    mesh.network.default.jitter_us = 30_000
    mesh.start_all()
    mesh.run(60)
    before = {number: port.core.own_row.seq for number, port in mesh.ports.items()}
    mesh.run(600)
    for number, port in mesh.ports.items():
        assert port.core.own_row.seq - before[number] <= 14, "noise makes rows"


def test_replayed_rows_of_the_departed_are_counted_and_change_nothing() -> None:
    mesh = Mesh(4, 14, settings=MembershipSettings(tombstone_dead_us=60 * SECOND)).start_all()
    mesh.run(10)
    old = mesh.ports[0].core._ground.table.get(mesh.ids[3]).signed
    mesh.run(5)
    mesh.ports[3].publish(status="draining")
    mesh.run(2)
    latest = mesh.ports[0].core._ground.table.get(mesh.ids[3]).signed
    mesh.crash(3)
    mesh.run(10)
    from protocol.messages import Gossip, GossipPush

    for wait in (0, 30, 60, 600):
        mesh.run(wait)
        for number in (1, 2):
            port = mesh.ports[number]
            push = GossipPush(gossip=Gossip(rows=(old, latest)))
            port.carry_out(port.core.on_message(mesh.ids[0], push, port.now_us, lane="stream"))
            assert mesh.state(number, 3) in {"dead", None}
    mesh.start(3)
    assert mesh.run_until(mesh.agreed, 40) is not None


def test_both_halves_of_a_split_mesh_go_on_and_come_together_again() -> None:
    mesh = Mesh(6, 15).start_all()
    mesh.run(10)
    halves = mesh.ids[:3], mesh.ids[3:]
    mesh.network.partition(*halves)
    mesh.network.partition(*halves[::-1])
    mesh.run(40)
    assert mesh.alive_set(0) == set(halves[0])
    assert mesh.alive_set(5) == set(halves[1])
    mesh.network.partition(*halves, blocked=False)
    mesh.network.partition(*halves[::-1], blocked=False)
    assert mesh.run_until(mesh.agreed, 30) is not None


def test_two_nodes_that_hold_each_other_dead_over_a_standing_connection_make_it_up() -> None:
    mesh = Mesh(2, 17).start_all()
    mesh.run(10)
    mesh.network.partition(mesh.ids, mesh.ids)
    mesh.run(20)
    assert (mesh.state(0, 1), mesh.state(1, 0)) == ("dead", "dead")
    assert mesh.ids[1] in mesh.network.hosts[mesh.ids[0]].links
    mesh.network.partition(mesh.ids, mesh.ids, blocked=False)
    seconds = mesh.run_until(mesh.agreed, 30)
    assert seconds is not None
    assert seconds < 10


def test_the_cable_is_tried_when_the_mesh_runs_over_slow_wifi() -> None:
    mesh = Mesh(2, 16)
    mesh.network.default.delay_us = 9_000
    mesh.start_all()
    mesh.run(1)
    cable = "192.168.9.2:7946"
    port = mesh.ports[1]
    row = port.core.own_row
    port.carry_out(port.core.publish(row.model_copy(update={"addresses": (*row.addresses, cable)}), port.now_us))
    mesh.run(30)
    explored = [dial for _, dial in mesh.ports[0].dials if dial.purpose == "explore"]
    assert explored == [Dial(identity(1).node_id, cable, "explore")]
