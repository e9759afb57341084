"""What a link is worth."""

from random import Random

import pytest

from config.settings import LinkSettings
from protocol.ids import NodeId
from protocol.links import is_settled
from protocol.links.bandwidth import BandwidthEstimate, merge_bytes_per_s
from protocol.links.book import LinkBook
from protocol.links.facts import change_of, fact_of, frames_bytes_per_s
from protocol.links.link import Link, host_of
from protocol.links.rtt import RttWindow
from protocol.links.vivaldi import VivaldiNode, estimate_us
from protocol.rows import LinkFact

SECOND = 1_000_000
MIB = 1_048_576
PEER = NodeId("peer")


def ping_for(link: Link, seconds: int, rtt_us: int, start_us: int) -> int:
    """One sample a second with a little jitter; the time afterwards."""
    for second in range(seconds):
        now_us = start_us + second * SECOND
        link.on_rtt(rtt_us + second % 7 * rtt_us // 50, now_us)
        link.refresh(now_us)
    return start_us + seconds * SECOND


def test_the_minimum_counts_with_samples_and_ages() -> None:
    window = RttWindow()
    assert window.view() is None
    for at_us, rtt_us in ((10, 900), (20, 400), (30, 700)):
        assert window.add(rtt_us, at_us)
    view = window.view()
    assert view is not None
    assert (view.min_rtt_us, view.samples, view.first_us, view.last_us) == (400, 3, 10, 30)


def test_the_fact_tells_the_jitter_of_consecutive_samples() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "", 0)
    for second in range(200):
        link.on_rtt(1_000 if second % 2 else 1_400, second * SECOND)
    fact = fact_of(PEER, link.view(200 * SECOND), 200 * SECOND)
    assert fact is not None
    assert fact.jitter_us is not None
    assert 380 <= fact.jitter_us <= 400


@pytest.mark.parametrize("bogus", [0, -5])
def test_a_round_trip_of_no_time_is_refused(bogus: int) -> None:
    link = Link(LinkSettings())
    assert not link.on_rtt(bogus, 100)
    assert link.view(100).rtt is None


def test_a_link_settles_after_two_samples_over_five_seconds_and_unsettles_after_thirty_of_silence() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "", 0)
    link.on_rtt(500, 0)
    link.on_rtt(500, 4 * SECOND)
    assert not link.settled(4 * SECOND)
    link.on_rtt(500, 5 * SECOND)
    assert link.settled(5 * SECOND)
    assert link.settled(35 * SECOND)
    assert not link.settled(36 * SECOND)


def test_another_port_is_the_same_path_and_another_host_or_interface_starts_afresh() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1000", "eth0", 0)
    ping_for(link, 10, 500, 0)
    assert not link.on_path("10.0.0.1:2000", "eth0", 10 * SECOND)
    assert link.settled(10 * SECOND)
    assert link.on_path("10.0.0.1:2000", "wlan0", 11 * SECOND)
    assert link.view(11 * SECOND).rtt is None
    assert link.on_path("10.0.0.9:2000", "wlan0", 12 * SECOND)
    assert link.view(12 * SECOND).path_changes == 2


def test_falling_back_from_cable_to_wifi_is_called_degraded_and_names_both_paths() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "eth0", 0)
    now_us = ping_for(link, 60, 100, 0)
    link.on_path("192.168.1.5:1", "wlan0", now_us)
    now_us = ping_for(link, 20, 18_000, now_us)
    view = link.view(now_us)
    assert view.degraded
    assert view.path is not None
    assert view.best_path is not None
    assert (view.path.interface, view.best_path.interface, view.best_rtt_us) == ("wlan0", "eth0", 100)
    link.on_path("10.0.0.1:1", "eth0", now_us)
    now_us = ping_for(link, 20, 100, now_us)
    assert not link.view(now_us).degraded


def test_a_silent_fall_back_under_the_same_address_is_noticed_within_two_minutes_and_renews_the_minimum() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "", 0)
    now_us = ping_for(link, 120, 100, 0)
    now_us = ping_for(link, 120, 18_000, now_us)
    view = link.view(now_us)
    assert view.degraded
    assert view.rtt is not None
    assert view.rtt.min_rtt_us == 18_000
    assert view.path_changes == 1


def bandwidths(link: Link, now_us: int) -> tuple[int | None, int | None]:
    view = link.view(now_us)
    return view.send and view.send.bytes_per_s, view.receive and view.receive.bytes_per_s


@pytest.mark.parametrize(("address", "interface"), [("10.0.0.1:1", "wlan0"), ("10.9.9.9:1", "eth0")])
def test_another_path_is_not_planned_with_the_bandwidth_of_the_one_before(address: str, interface: str) -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "eth0", 0)
    link.on_transfer("send", 125 * MIB, SECOND, "app", SECOND)
    link.on_transfer("receive", 125 * MIB, SECOND, "link", SECOND)
    link.on_path("10.0.0.1:2", "eth0", 2 * SECOND)
    assert bandwidths(link, 2 * SECOND) == (125 * MIB, 125 * MIB), "another port is no other path"
    link.on_path(address, interface, 3 * SECOND)
    assert bandwidths(link, 3 * SECOND) == (None, None)
    link.on_transfer("send", 100 * MIB, SECOND, "app", 3 * SECOND + SECOND // 2)
    assert bandwidths(link, 4 * SECOND) == (None, None), "half of it went by the old path"
    link.on_transfer("send", 5 * MIB, SECOND, "link", 4 * SECOND)
    link.on_transfer("receive", 6 * MIB, SECOND, "link", 4 * SECOND)
    assert bandwidths(link, 4 * SECOND) == (5 * MIB, 6 * MIB)


def test_a_silent_fall_back_forgets_the_bandwidth_of_the_faster_path_too() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "", 0)
    now_us = ping_for(link, 120, 100, 0)
    link.on_transfer("send", 125 * MIB, SECOND, "app", now_us)
    assert bandwidths(link, now_us) == (125 * MIB, None)
    now_us = ping_for(link, 120, 18_000, now_us)
    assert link.view(now_us).path_changes == 1
    assert bandwidths(link, now_us) == (None, None)
    link.on_transfer("send", 5 * MIB, SECOND, "link", now_us)
    assert bandwidths(link, now_us) == (5 * MIB, None)


def test_a_jittery_path_is_not_degraded_by_its_own_luckiest_sample() -> None:
    link, random = Link(LinkSettings()), Random(1)
    link.on_path("10.0.0.1:1", "", 0)
    for second in range(3_000):
        link.on_rtt(1_000 + random.randint(0, 60_000), second * SECOND)
        link.refresh(second * SECOND)
        assert not link.view(second * SECOND).degraded
    assert link.view(3_000 * SECOND).path_changes == 0


def test_idle_wifi_at_77_ms_keeps_the_minimum_it_showed_under_load_and_is_not_degraded() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "wlan0", 0)
    now_us = ping_for(link, 90, 77_000, 0)
    for _ in range(20):
        now_us = ping_for(link, 2, 3_000, now_us)
        link.on_transfer("send", 64 * MIB, 2 * SECOND, "link", now_us)
    now_us = ping_for(link, 200, 77_000, now_us)
    view = link.view(now_us)
    assert view.rtt is not None
    assert view.rtt.min_rtt_us == 3_000
    assert view.loaded_rtt_us == 3_000
    assert not view.degraded


def test_a_clock_gap_voids_what_was_measured_before() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "", 0)
    ping_for(link, 20, 500, 0)
    link.on_transfer("receive", 10 * MIB, SECOND, "link", 20 * SECOND)
    link.void()
    view = link.view(21 * SECOND)
    assert (view.rtt, view.receive, view.settled) == (None, None, False)


def test_a_stall_of_more_than_a_minute_leaves_nothing_to_judge_and_harms_nobody() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:80", "", 0)
    for second in range(10):
        link.on_rtt(500, second * SECOND)
    link.refresh(3_600 * SECOND)
    assert not link.settled(3_600 * SECOND)
    assert link.min_rtt_us() == 500


@pytest.mark.parametrize(("size", "duration_us"), [(MIB // 2 - 1, SECOND), (MIB, 99_999)])
def test_small_or_short_transfers_say_nothing_about_bandwidth(size: int, duration_us: int) -> None:
    estimate = BandwidthEstimate(LinkSettings())
    assert not estimate.add(size, duration_us, "link", 0)
    assert estimate.view(0) is None


def test_a_lower_bound_never_lowers_and_a_measurement_replaces_it() -> None:
    estimate = BandwidthEstimate(LinkSettings())
    estimate.add(10 * MIB, SECOND, "app", 0)
    estimate.add(5 * MIB, SECOND, "cpu", 1)
    view = estimate.view(1)
    assert view is not None
    assert (view.bytes_per_s, view.limited_by) == (10 * MIB, "app")
    estimate.add(40 * MIB, SECOND, "link", 2)
    view = estimate.view(2)
    assert view is not None
    assert (view.bytes_per_s, view.limited_by) == (40 * MIB, "link")
    estimate.add(20 * MIB, SECOND, "link", 3)
    view = estimate.view(3)
    assert view is not None
    assert view.bytes_per_s == 35 * MIB
    estimate.add(MIB, SECOND, "window", 4)
    assert estimate.view(4) == view


def test_bandwidth_expires_after_half_an_hour() -> None:
    estimate = BandwidthEstimate(LinkSettings())
    estimate.add(10 * MIB, SECOND, "link", 0)
    assert estimate.view(1_800 * SECOND) is not None
    assert estimate.view(1_801 * SECOND) is None


def test_two_views_of_one_direction_merge_to_the_smaller_known_one() -> None:
    assert merge_bytes_per_s() is None
    assert merge_bytes_per_s((5, "app")) == 5
    assert merge_bytes_per_s((7, "link"), (5, "link")) == 5
    assert merge_bytes_per_s((7, "app"), (5, "cpu")) == 5


def test_a_lower_bound_of_one_end_refutes_no_measurement_of_the_other() -> None:
    assert merge_bytes_per_s((7, "link"), (5, "app")) == 7
    assert merge_bytes_per_s((7, "window"), (5, "link")) == 5
    assert merge_bytes_per_s((7, "link"), (5, None)) == 5


@pytest.mark.parametrize(("receiver_limit", "merged"), [("link", 5 * MIB), ("app", 7 * MIB)])
def test_what_limited_each_direction_travels_in_the_facts_of_both_ends(receiver_limit: str, merged: int) -> None:
    sender, receiver = Link(LinkSettings()), Link(LinkSettings())
    sender.on_transfer("send", 7 * MIB, SECOND, "link", 0)
    receiver.on_transfer("receive", 5 * MIB, SECOND, receiver_limit, 0)  # type: ignore[arg-type]
    receiver.on_transfer("send", 9 * MIB, SECOND, "link", 0)
    told, heard = fact_of(PEER, sender.view(1), 1), fact_of(NodeId("other"), receiver.view(1), 1)
    assert told is not None
    assert heard is not None
    assert frames_bytes_per_s(told, heard) == merged
    assert frames_bytes_per_s(heard, told) == 9 * MIB


def test_the_fact_alone_answers_whether_a_link_is_settled() -> None:
    link, settings = Link(LinkSettings()), LinkSettings()
    link.on_path("10.0.0.1:1", "", 0)
    for now_us in (0, 2 * SECOND, 6 * SECOND):
        link.on_rtt(500, now_us)
        fact = fact_of(PEER, link.view(now_us), now_us)
        assert fact is not None
        assert is_settled(fact, settings) == link.settled(now_us)
    silent = fact_of(PEER, link.view(60 * SECOND), 60 * SECOND)
    assert silent is not None
    assert not is_settled(silent, settings)
    estimate = LinkFact(target="x", min_rtt_us=5, samples=99, first_age_us=9 * SECOND, estimated=True)
    assert not is_settled(estimate, settings)


def test_noise_is_not_material_and_settling_is() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "", 0)
    link.on_rtt(1_000, 0)
    unsettled = link.mark(0)
    assert change_of(None, unsettled) == "none"
    link.on_rtt(1_000, 6 * SECOND)
    settled = link.mark(6 * SECOND)
    assert change_of(None, settled) == "material"
    assert change_of(unsettled, settled) == "material"
    link.on_rtt(850, 7 * SECOND)
    assert change_of(settled, link.mark(7 * SECOND)) == "none"
    link.on_rtt(499, 8 * SECOND)
    assert change_of(settled, link.mark(8 * SECOND)) == "material"


def test_an_rtt_that_falls_a_little_can_wait_and_one_told_twice_too_large_cannot() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:1", "", 0)
    for second in (0, 6):
        link.on_rtt(3_000, second * SECOND)
    told = link.mark(6 * SECOND)
    link.on_rtt(2_500, 7 * SECOND)
    assert change_of(told, link.mark(7 * SECOND)) == "none"
    link.on_rtt(2_300, 7 * SECOND)
    assert change_of(told, link.mark(7 * SECOND)) == "drift"
    link.on_rtt(1_500, 8 * SECOND)
    assert change_of(told, link.mark(8 * SECOND)) == "material"


def test_a_link_that_is_only_sampled_makes_no_rows_by_settling_and_unsettling() -> None:
    link = Link(LinkSettings())
    link.on_path("10.0.0.1:80", "", 0)
    link.on_rtt(900, 0)
    unsettled = link.mark(SECOND)
    link.on_rtt(900, 64 * SECOND)
    settled = link.mark(64 * SECOND)
    assert change_of(None, settled, sampled=True) == "none"
    for published, present in ((unsettled, settled), (settled, link.mark(100 * SECOND))):
        assert change_of(published, present) == "material"
        assert change_of(published, present, sampled=True) == "none"
    link.on_rtt(200, 128 * SECOND)
    assert change_of(settled, link.mark(128 * SECOND), sampled=True) == "material", "far from what was told"


def test_the_book_says_when_a_row_is_due_and_publishes_by_node_id() -> None:
    book = LinkBook(LinkSettings(), is_shaped=lambda peer: peer == "b")
    for peer in ("b", "a"):
        book.link(NodeId(peer)).on_path("10.0.0.1:1", "", 0)
        book.link(NodeId(peer)).on_rtt(500, 0)
        book.link(NodeId(peer)).on_rtt(500, 6 * SECOND)
    assert book.refresh(6 * SECOND) == "material"
    facts = book.publish(6 * SECOND)
    assert [(fact.target, fact.shaped) for fact in facts] == [("a", False), ("b", True)]
    assert book.refresh(7 * SECOND) == "none"
    assert book.refresh(40 * SECOND) == "material", "silence unsettles, which is news"


@pytest.mark.parametrize(
    ("address", "host"), [("10.0.0.1:80", "10.0.0.1"), ("[fe80::1]:80", "fe80::1"), ("nowhere", "nowhere")]
)
def test_the_host_of_an_address_has_neither_port_nor_brackets(address: str, host: str) -> None:
    assert host_of(address) == host


def test_coordinates_estimate_pairs_that_nobody_measured() -> None:
    random = Random(7)
    places = [(random.uniform(0, 60_000), random.uniform(0, 60_000)) for _ in range(40)]

    def truth(a: int, b: int) -> int:
        (ax, ay), (bx, by) = places[a], places[b]
        return round(((ax - bx) ** 2 + (ay - by) ** 2) ** 0.5) + 2_000

    nodes = [VivaldiNode(Random(k)) for k in range(40)]
    for _ in range(400):
        for a, node in enumerate(nodes):
            b = random.choice([(a + step) % 40 for step in (1, 3, 7, 12, 20)])
            node.observe(truth(a, b), nodes[b].coordinate())
    errors = sorted(
        abs(estimate_us(nodes[a].coordinate(), nodes[b].coordinate()) - truth(a, b)) / truth(a, b)
        for a in range(40)
        for b in range(40)
        if a != b
    )
    assert errors[len(errors) // 2] < 0.2
