"""Properties of the membership core for whatever a peer may send."""

from itertools import permutations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from config.settings import LinkSettings, MembershipSettings
from protocol.codec import MAX_DATAGRAM_BYTES, decode, encode, encode_row
from protocol.ids import NodeId
from protocol.membership import Membership, Send
from protocol.membership.dissemination import GossipQueue, encoded_bytes, gather
from protocol.membership.suspicion import suspicion_us
from protocol.messages import (
    Ack,
    DigestRequest,
    Gossip,
    GossipPush,
    MembershipMessage,
    Ping,
    PingRequest,
    RowRequest,
    RowVersion,
)
from protocol.rows import Accusation, Admission, Refutation, SignedRow
from tests.simulation.membership_mesh import identity, row_of, verify

NUMBERS = st.integers(0, 2**53)
SMALL = st.integers(0, 6)
PEERS = st.integers(0, 5).map(lambda number: identity(number).node_id)
NAMES = st.one_of(PEERS, st.text("abc0123456789._-", min_size=1, max_size=64))
SIGNATURES = st.binary(min_size=64, max_size=64)


@st.composite
def rows(draw: st.DrawFn) -> SignedRow:
    """Genuine rows of known and unknown nodes, and garbage."""
    if draw(st.integers(0, 9)) == 0:
        return SignedRow(payload=draw(st.binary(max_size=300)), signature=draw(SIGNATURES))
    who = identity(draw(st.integers(0, 7)))
    row = row_of(who, "x", ("10.0.0.1:1",)).model_copy(
        update={
            "boot_counter": draw(st.integers(0, 3)),
            "seq": draw(SMALL),
            "instance": draw(st.sampled_from("ab")) * 32,
            "incarnation": draw(SMALL),
            "status": draw(st.sampled_from(["running", "draining", "leaving", "left"])),
        }
    )
    payload = encode_row(row)
    genuine = draw(st.integers(0, 9)) > 0
    return SignedRow(payload=payload, signature=who.sign(payload) if genuine else draw(SIGNATURES))


VERSIONS = st.builds(RowVersion, node_id=NAMES, boot_counter=SMALL, seq=st.one_of(SMALL, NUMBERS), dead=st.booleans())
ACCUSATIONS = st.builds(
    Accusation,
    node_id=NAMES,
    boot_counter=SMALL,
    incarnation=st.one_of(SMALL, NUMBERS),
    verdict=st.sampled_from(["suspect", "dead"]),
    accuser=NAMES,
)
REFUTATIONS = st.builds(
    Refutation,
    node_id=NAMES,
    boot_counter=SMALL,
    incarnation=st.one_of(SMALL, NUMBERS),
    seq=NUMBERS,
    signature=SIGNATURES,
)
ADMISSIONS = st.builds(
    Admission,
    mesh_id=st.just("m"),
    node_id=NAMES,
    public_key=st.binary(min_size=32, max_size=32),
    version=SMALL,
    revoked=st.booleans(),
    signer=NAMES,
    signer_public_key=st.binary(min_size=32, max_size=32),
    signature=SIGNATURES,
)
GOSSIP = st.builds(
    Gossip,
    rows=st.lists(rows(), max_size=4).map(tuple),
    accusations=st.lists(ACCUSATIONS, max_size=6).map(tuple),
    admissions=st.lists(ADMISSIONS, max_size=3).map(tuple),
    refutations=st.lists(REFUTATIONS, max_size=4).map(tuple),
    versions=st.lists(VERSIONS, max_size=6).map(tuple),
)
MESSAGES: st.SearchStrategy[MembershipMessage] = st.one_of(
    st.builds(Ping, seq=NUMBERS, gossip=GOSSIP),
    st.builds(Ack, seq=NUMBERS, target=st.one_of(st.just(""), NAMES), health=NUMBERS, gossip=GOSSIP),
    st.builds(PingRequest, seq=NUMBERS, target=NAMES),
    st.builds(GossipPush, gossip=GOSSIP),
    st.builds(
        DigestRequest,
        rows=st.lists(VERSIONS, max_size=20).map(tuple),
        admissions=st.lists(VERSIONS, max_size=5).map(tuple),
        reply=st.booleans(),
    ),
    st.builds(RowRequest, rows=st.lists(NAMES, max_size=20).map(tuple)),
)


def core_of(number: int, now_us: int, members: int = 6) -> Membership:
    who = identity(number)
    admitted = {identity(other).node_id for other in range(members)}
    core = Membership(
        node_id=who.node_id,
        public_key=who.public_key,
        sign=who.sign,
        verify=verify,
        settings=MembershipSettings(),
        link_settings=LinkSettings(),
        random=Random(number),
        boot_counter=1,
        instance=f"{number:032x}",
        is_admitted=admitted.__contains__,
        now_us=now_us,
    )
    core.publish(row_of(who, f"n{number}", (f"10.0.0.{number + 1}:1",)), now_us)
    return core


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), MESSAGES, st.integers(0, 3_000_000)), max_size=30), st.booleans())
def test_whatever_admitted_peers_send_the_core_stays_whole_and_its_datagrams_stay_small(
    script: list[tuple[int, MembershipMessage, int]], connect: bool
) -> None:
    now_us = 1_000_000
    core = core_of(0, now_us)
    versions: dict[NodeId, tuple[int, int]] = {}
    for number, message, wait_us in script:
        sender = identity(number).node_id
        effects = core.on_connected(sender, f"10.0.0.{number + 1}:1", now_us) if connect else []
        decoded = decode(encode(message))
        assert decoded == message
        effects += core.on_message(sender, message, now_us, lane="stream")
        end_us = now_us + wait_us
        while (due_us := core.next_deadline()) is not None and due_us <= end_us:
            now_us = max(now_us, due_us)
            effects += core.on_timer(now_us)
        now_us = end_us
        core.validate()
        for node_id, _, version in core.standings():
            assert version >= versions.get(node_id, (0, 0))
            versions[node_id] = version
        for effect in effects:
            if isinstance(effect, Send):
                raw = encode(effect.message)
                assert effect.lane == "stream" or len(raw) <= MAX_DATAGRAM_BYTES


@settings(max_examples=60, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4))
def test_rows_merge_to_the_same_table_in_any_order(given_rows: list[SignedRow]) -> None:
    """Rows of live nodes are last-writer-wins by version; burial depends on order by design and is left out."""
    plain = [signed for signed in given_rows if b"left" not in signed.payload and len(signed.payload) > 150]
    unique = {}
    for signed in plain:
        unique.setdefault(signed.payload[:120], signed)
    outcomes = set()
    for order in permutations(list(unique.values())[:4]):
        core = core_of(0, 1_000_000)
        sender = identity(5).node_id
        core.on_connected(sender, "10.0.0.6:1", 1_000_000)
        for signed in order:
            core.on_message(sender, GossipPush(gossip=Gossip(rows=(signed,))), 1_000_001, lane="stream")
        outcomes.add(tuple(sorted((node_id, version) for node_id, _, version in core.standings())))
    assert len(outcomes) <= 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(rows(), VERSIONS, ACCUSATIONS, REFUTATIONS, ADMISSIONS), min_size=1, max_size=6))
def test_the_size_that_is_budgeted_for_a_fact_is_never_below_its_size_on_the_wire(
    facts: list[SignedRow | RowVersion | Accusation | Refutation | Admission],
) -> None:
    empty = len(encode(GossipPush(gossip=Gossip())))
    full = len(encode(GossipPush(gossip=gather(facts))))
    fields = 5 * 20
    assert full - empty <= sum(encoded_bytes(fact) for fact in facts) + fields


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(NAMES, st.one_of(VERSIONS, ACCUSATIONS, REFUTATIONS)), max_size=40), st.integers(1, 64))
def test_what_the_queue_gives_fits_a_datagram_with_the_largest_carrier(
    facts: list[tuple[str, RowVersion | Accusation | Refutation]], connected: int
) -> None:
    queue = GossipQueue(8)
    for subject, fact in facts:
        queue.add(type(fact).__name__, subject, fact)
    for turn in range(20):
        gossip = queue.take(NodeId(str(turn)), 64, connected)
        ack = Ack(seq=2**52, target="t" * 32, health=7, gossip=gossip)
        assert len(encode(ack)) <= MAX_DATAGRAM_BYTES


@given(st.integers(2, 4_096), st.integers(1, 9))
def test_more_accusers_never_lengthen_a_suspicion(nodes: int, accusers: int) -> None:
    section = MembershipSettings()
    longer, shorter = suspicion_us(section, nodes, accusers), suspicion_us(section, nodes, accusers + 1)
    assert shorter <= longer <= section.suspicion_max_factor * suspicion_us(section, nodes, 99)
