"""The small parts of the membership core, each on its own."""

import pytest

from config.settings import MembershipSettings
from protocol.errors import WireError
from protocol.ids import NodeId
from protocol.membership.dissemination import NOTHING, GossipQueue, encoded_bytes, transmissions
from protocol.membership.own import same_news
from protocol.membership.signing import label_of, open_row
from protocol.membership.suspicion import suspicion_us
from protocol.membership.table import NodeTable, Tombstone
from protocol.membership.timers import Timers
from protocol.messages import RowVersion
from protocol.rows import Accusation, DeviceFact, NodeRow, SignedRow, StageFact
from tests.simulation.membership_mesh import Identity, identity, row_of, verify

SECOND = 1_000_000


def signed(who: Identity, boot_counter: int, seq: int, **fields: object) -> tuple[SignedRow, NodeRow]:
    from protocol.codec import encode_row

    row = row_of(who, "x", ()).model_copy(update={"boot_counter": boot_counter, "seq": seq, **fields})
    payload = encode_row(row)
    return SignedRow(payload=payload, signature=who.sign(payload)), row


def test_timers_fire_in_order_and_a_moved_one_fires_once() -> None:
    timers = Timers()
    timers.set("a", "", 30)
    timers.set("b", "", 10)
    timers.set("a", "", 20)
    timers.set("c", "", 5)
    timers.cancel("c")
    assert timers.next() == 10
    assert [timers.pop_due(100) for _ in range(3)] == [("b", ""), ("a", ""), None]
    assert timers.next() is None


def test_a_timer_that_is_moved_a_million_times_does_not_grow() -> None:
    timers = Timers()
    for at_us in range(20_000):
        timers.set("a", "", at_us)
    assert len(timers._heap) < 200
    timers.advance("a", "", 5)
    assert timers.deadline("a") == 19_994


@pytest.mark.parametrize(
    ("nodes", "accusers", "seconds"),
    [(2, 1, 4.8), (3, 2, 4.8), (4, 3, 4.0), (8, 3, 4.0), (8, 1, 24.0), (100, 3, 6.0), (1000, 3, 8.0), (1000, 1, 48.0)],
)
def test_suspicion_grows_with_the_mesh_and_shrinks_with_confirmations(
    nodes: int, accusers: int, seconds: float
) -> None:
    assert suspicion_us(MembershipSettings(), nodes, accusers) == pytest.approx(seconds * SECOND, abs=10_000)


def test_one_confirmation_of_two_saves_most_of_the_wait() -> None:
    settings = MembershipSettings()
    waits = [suspicion_us(settings, 10, accusers) for accusers in (1, 2, 3, 9)]
    assert waits == sorted(waits, reverse=True)
    assert 10 * SECOND < waits[1] < 13 * SECOND
    assert waits[2] == waits[3]


@pytest.mark.parametrize(("nodes", "times"), [(1, 4), (3, 4), (9, 4), (10, 8), (64, 8), (1000, 16)])
def test_a_fact_is_told_four_times_the_logarithm_of_the_mesh(nodes: int, times: int) -> None:
    assert transmissions(nodes) == times


def version(number: int) -> RowVersion:
    return RowVersion(node_id=f"node-{number}", boot_counter=1, seq=number)


def test_every_fact_is_told_its_number_of_times_and_then_dropped() -> None:
    queue, told = GossipQueue(8), 0
    queue.add("row", "a", version(1))
    for turn in range(100):
        told += len(queue.take(NodeId(f"peer-{turn % 5}"), 5, 5).versions)
    assert told == transmissions(5)
    assert len(queue) == 0


def test_a_peer_is_not_told_twice_before_everybody_was_told_once() -> None:
    queue = GossipQueue(8)
    queue.add("row", "a", version(1), told_by=NodeId("p0"))
    assert queue.take(NodeId("p0"), 9, 3) is NOTHING
    assert queue.take(NodeId("p1"), 9, 3) != NOTHING
    assert queue.take(NodeId("p1"), 9, 3) is NOTHING
    assert queue.take(NodeId("p2"), 9, 3) != NOTHING
    assert queue.take(NodeId("p1"), 9, 3) != NOTHING


def test_a_peer_that_told_a_fact_is_not_told_it_and_counts_as_told() -> None:
    queue = GossipQueue(8)
    queue.add("row", "a", version(1))
    peers = [NodeId(f"peer-{number}") for number in range(transmissions(9))]
    queue.heard("row", "a", peers[0], 9, 8)
    queue.heard("row", "a", peers[0], 9, 8)
    queue.heard("row", "unknown", peers[0], 9, 8)
    assert queue.take(peers[0], 9, 8) is NOTHING
    for peer in peers[1:]:
        assert queue.take(peer, 9, 8) != NOTHING
    assert len(queue) == 0


def test_accusations_go_before_rows_and_new_facts_before_old() -> None:
    queue = GossipQueue(2)
    for number in range(5):
        queue.add("row", str(number), version(number))
    accusation = Accusation(node_id="x", boot_counter=1, incarnation=0, verdict="suspect", accuser="y")
    queue.add("accusation", "x", accusation)
    gossip = queue.take(NodeId("p"), 9, 3)
    assert gossip.accusations == (accusation,)
    assert [line.seq for line in gossip.versions] == [4]


def test_a_newer_fact_about_the_same_subject_replaces_the_older() -> None:
    queue = GossipQueue(8)
    queue.add("row", "a", version(1))
    queue.add("row", "a", version(2))
    assert [line.seq for line in queue.take(NodeId("p"), 9, 3).versions] == [2]


def test_a_full_queue_forgets_the_fact_told_most() -> None:
    queue = GossipQueue(8)
    queue.add("row", "told", version(0))
    queue.take(NodeId("p"), 9, 3)
    for number in range(8_192):
        queue.add("row", str(number), version(number))
    assert len(queue) == 8_192
    assert ("row", "told") not in queue._queue


def test_what_does_not_fit_the_datagram_waits() -> None:
    queue = GossipQueue(8)
    big, _ = signed(identity(1), 1, 1, name="n" * 64, degraded=("d" * 64,) * 8)
    assert encoded_bytes(big) > 600
    queue.add("row", "a", big)
    queue.add("row", "b", big.model_copy(update={"signature": bytes(64)}))
    assert len(queue.take(NodeId("p"), 9, 3).rows) == 1


def test_a_row_that_its_owner_did_not_sign_is_refused() -> None:
    row, _ = signed(identity(1), 1, 1)
    assert open_row(row, verify).seq == 1
    with pytest.raises(WireError, match="signature"):
        open_row(row.model_copy(update={"signature": bytes(64)}), verify)
    stolen, _ = signed(identity(1), 1, 1, node_id=identity(2).node_id)
    with pytest.raises(WireError, match="public key"):
        open_row(stolen, verify)


def test_a_row_with_two_labels_is_refused() -> None:
    import msgpack

    who = identity(1)
    _row, plain = signed(who, 1, 1)
    fields = plain.model_dump(exclude_defaults=True)
    pairs = [*fields.items(), ("seq", 99)]
    payload = bytes([0xDE]) + len(pairs).to_bytes(2, "big")
    for key, value in pairs:
        payload += msgpack.packb(key) + msgpack.packb(value)
    forged = SignedRow(payload=payload, signature=who.sign(payload))
    assert label_of(forged).version == (1, 1)
    with pytest.raises(WireError, match="two labels"):
        open_row(forged, verify)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x81", b"\x80", b"\x93abc", b"\xdf\xff\xff\xff\xff", b"\x91" * 2000]
)
def test_bytes_that_are_no_row_are_malformed_and_nothing_else(payload: bytes) -> None:
    with pytest.raises(WireError):
        label_of(SignedRow(payload=payload, signature=bytes(64)))


def test_a_forgotten_node_leaves_a_floor_and_floors_are_bounded() -> None:
    table = NodeTable(4, (Tombstone(NodeId("old"), 3, 7),))
    assert table.floor("old") == (3, 7)
    for number in range(6):
        who = identity(number)
        row, plain = signed(who, 1, number)
        entry = table.add(row, plain, 0)
        table.set_state(entry, "dead", 1)
        table.forget(entry.node_id)
        table.validate()
    assert table.floor("old") is None
    assert len(table.tombstones()) == 4
    assert Tombstone(identity(5).node_id, 1, 5) in table.tombstones()


def test_ages_and_small_steps_of_timings_are_no_news_and_states_are() -> None:
    stage = StageFact(slot="s", state="serving", decode_us_per_layer=1_000, decode_samples=50, decode_age_us=5)
    device = DeviceFact(name="cpu", kind="cpu", memory_bytes=1, measured_age_us=1)
    row = row_of(identity(1), "x", ("a:1",), stages=(stage,), devices=(device,))

    def changed(**fields: object) -> NodeRow:
        return row.model_copy(update=fields)

    older = device.model_copy(update={"measured_age_us": 9})
    assert same_news(row, changed(devices=(older,)))
    nearly = stage.model_copy(update={"decode_us_per_layer": 1_050, "decode_samples": 60, "decode_age_us": 1})
    assert same_news(row, changed(stages=(nearly,)))
    assert not same_news(row, changed(stages=(stage.model_copy(update={"decode_us_per_layer": 1_200}),)))
    assert not same_news(row, changed(stages=(stage.model_copy(update={"state": "ready"}),)))
    assert not same_news(row, changed(status="draining"))
    assert not same_news(row, changed(addresses=("b:1",)))
