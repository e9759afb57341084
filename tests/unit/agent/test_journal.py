"""What the journal counts, as a scrape sees it."""

from collections import Counter
from types import SimpleNamespace

import pytest

from protocol.quic.interface import TransportCounters
from stage_agent.journal import Journal

PEER = "b" * 32


@pytest.mark.parametrize(
    ("family", "label"),
    [
        ("gossip_rejected", "malformed"),
        ("gossip_rejected", "unadmitted"),
        ("stale_frames", "stale_epoch"),
        ("stale_frames", "not_serving"),
        ("stale_frames", "ballot_refused"),
        ("tunnel_errors", "reset"),
        ("tunnel_errors", "timeout"),
    ],
)
def test_a_counter_is_there_at_zero_before_the_first_event(family, label):
    assert getattr(Journal().counters(TransportCounters()), family)[label] == 0


def test_a_frame_that_was_accepted_is_no_refusal():
    assert "accept" not in Journal().counters(TransportCounters()).stale_frames


def test_a_counted_event_is_added_to_the_zero_and_to_what_the_transport_refused():
    journal = Journal()
    journal.rejected["malformed"] += 2
    journal.stale_frames["stale_epoch"] += 1
    seen = journal.counters(TransportCounters(rejected=Counter(malformed=1)))
    assert (seen.gossip_rejected["malformed"], seen.stale_frames["stale_epoch"]) == (3, 1)


def test_what_the_transport_dropped_without_ending_a_connection_is_seen_too():
    journal = Journal()
    journal.rejected["malformed"] += 2
    seen = journal.counters(
        TransportCounters(rejected=Counter(malformed=1), dropped=Counter(malformed=4, shaped_loss=9))
    )
    assert (seen.gossip_rejected["malformed"], seen.gossip_rejected["shaped_loss"]) == (7, 9)


def test_tunnel_bytes_are_shown_while_they_flow_and_stay_when_the_connection_has_ended():
    journal = Journal()
    carried = SimpleNamespace(sent_bytes=5, received_bytes=7)
    journal.tunnels.begin(PEER, carried)
    carried.sent_bytes = 6
    seen = journal.counters(TransportCounters())
    assert seen.tunnel_bytes == {(PEER, "send"): 6, (PEER, "receive"): 7}
    assert seen.tunnels_open == 1
    journal.tunnels.end(carried, "reset")
    seen = journal.counters(TransportCounters())
    assert seen.tunnel_bytes == {(PEER, "send"): 6, (PEER, "receive"): 7}
    assert (seen.tunnels_open, seen.tunnel_errors["reset"]) == (0, 1)
