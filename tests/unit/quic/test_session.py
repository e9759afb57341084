"""One session without a network: who may say what, and when it ends."""

import pytest

from config.settings import QuicSettings
from protocol.admission import AdmissionBook, make_admission
from protocol.codec import decode, encode
from protocol.messages import Gossip, GossipPush, Hello, JoinAccepted, JoinRefused, JoinRequest, Ping
from protocol.quic.identity import Identity
from protocol.quic.interface import (
    REASONS,
    DialFailed,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    Rejected,
)
from protocol.quic.session import LINGER_US, Session, State
from protocol.quic.table import UNVOUCHED_US, PeerTable
from tests.integration.transport_mesh import identities


class Wire:
    """A carrier that keeps what it was given."""

    def __init__(self, now, *, path="quic"):
        self.path = path
        self.address = "192.0.2.7:7946"
        self.interface, self.late_us = "", 0
        self.datagrams = True
        self.frames, self.packets, self.shut_with = [], [], []
        self.held = 0
        self.trusted = False
        self.begun_us = None
        self.sent_us = self.heard_us = now()
        self.unanswered_since_us = None
        self._now = now

    def write(self, raw):
        self.frames.append(raw)

    def write_datagram(self, raw):
        self.packets.append(raw)
        return True

    def outstanding_bytes(self):
        return self.held

    def pending_since_us(self):
        return self.begun_us

    def trust(self):
        self.trusted = True

    def keep_alive(self):
        pass

    def shape(self, link):
        pass

    def shut(self, reason):
        self.shut_with.append(reason)


class Desk:
    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def redeem(self, key, request):
        self.asked.append((key, request))
        return self.answer


class World:
    def __init__(self, *, desk=None, settings=None, known=2):
        (self.own, self.peer, self.third), books = identities(3)
        statements = books[0].statements
        self.full = books[0]
        names = {self.own.node_id, *[p.node_id for p in (self.peer, self.third)[: known - 1]]}
        self.book = AdmissionBook(books[0].mesh_id, [s for s in statements if s.node_id in names])
        self.time_us = 1_000_000
        self.events = []
        self.settings = settings or QuicSettings()
        self.table = PeerTable(
            node_id=self.own.node_id,
            book=self.book,
            hello=self.hello("own", "0" * 32),
            settings=self.settings,
            events=self.events.append,
            clock_us=lambda: self.time_us,
            desk=desk,
            on_open=lambda _: None,
            on_dial_failed=lambda session, reason: self.events.append(DialFailed(session.target, reason)),
        )

    def hello(self, name, instance="1" * 32, **changes):
        fields = {"mesh_id": self.book.mesh_id, "instance": instance, "boot_counter": 1, "name": name, "version": "1"}
        return Hello(**(fields | changes))

    def session(self, *, dialled=False, expect=None, key=None, path="quic"):
        wire = Wire(lambda: self.time_us, path=path)
        session = Session(self.table, wire, dialled=dialled, target="there:1" if dialled else "", expect=expect)
        self.table.add(session)
        session.established(self.peer.public_key if key is None else key)
        return session, wire

    def open(self, **options):
        session, wire = self.session(**options)
        session.frame(encode(self.hello("peer")), "stream")
        assert session.state is State.OPEN
        return session, wire

    def kinds(self):
        return [type(event) for event in self.events]


def test_the_accepting_side_says_nothing_until_it_has_judged_the_greeting():
    world = World()
    session, wire = world.session()
    assert wire.frames == []
    assert not wire.trusted
    session.frame(encode(world.hello("peer")), "stream")
    assert len(wire.frames) == 1
    assert wire.trusted
    assert world.kinds() == [PeerConnected]


def test_the_dialler_greets_only_whom_it_knows():
    world = World(known=1)
    session, wire = world.session(dialled=True)
    assert session.state is State.CLOSED
    assert wire.frames == []
    assert wire.shut_with == ["refused"]
    assert world.events == [DialFailed("there:1", "unadmitted")]


def test_a_connection_without_a_certificate_is_closed_before_it_can_speak():
    world = World()
    wire = Wire(lambda: world.time_us)
    session = Session(world.table, wire, dialled=False)
    session.established(None)
    session.frame(encode(world.hello("peer")), "stream")
    assert (wire.frames, wire.shut_with) == ([], ["refused"])
    assert world.events == [Rejected("no_certificate", wire.address)]


@pytest.mark.parametrize(
    "message", [Ping(seq=1), JoinRefused(reason="busy"), JoinAccepted(mesh_id="m", admissions=(), seeds=())]
)
def test_a_stranger_that_does_anything_but_join_is_refused_without_an_answer(message):
    world = World(known=1)
    session, wire = world.session()
    session.frame(encode(message), "stream")
    assert (session.state, wire.frames, wire.shut_with) == (State.CLOSED, [], ["refused"])
    assert world.table.counters.rejected["unadmitted"] == 1


def test_a_stranger_hears_the_same_word_whatever_the_reason():
    told = set()
    for spoil in (Ping(seq=1), World(known=1).hello("x", mesh_id="other.mesh")):
        world = World(known=1)
        session, wire = world.session()
        session.frame(encode(spoil), "stream")
        told.update(wire.shut_with)
    assert told == {"refused"}


def test_a_join_request_is_answered_once_and_the_connection_ends():
    refused = JoinRefused(reason="bad_proof")
    desk = Desk(refused)
    world = World(desk=desk, known=1)
    session, wire = world.session()
    request = JoinRequest(token_id="t", proof=bytes(32), name="n")
    session.frame(encode(request), "stream")
    session.frame(encode(request), "stream")
    assert desk.asked == [(world.peer.public_key, request)]
    assert wire.frames == [encode(refused)]
    assert world.table.counters.rejected["join_refused"] == 1
    world.time_us += LINGER_US
    world.table.sweep()
    assert session.state is State.CLOSED
    assert world.table.strangers == 0


def test_without_a_desk_nobody_can_join():
    world = World(known=1)
    _, wire = world.session()
    wire_session = next(iter(world.table._sessions))
    wire_session.frame(encode(JoinRequest(token_id="t", proof=bytes(32), name="n")), "stream")
    assert wire.frames == [encode(JoinRefused(reason="unknown_or_used_token"))]


def test_a_datagram_that_overtakes_the_greeting_is_dropped_and_does_no_harm():
    world = World()
    session, _ = world.session()
    session.frame(encode(Ping(seq=1)), "datagram")
    assert session.state is State.GREETING
    session.frame(encode(world.hello("peer")), "stream")
    assert session.state is State.OPEN


def test_the_senders_id_comes_from_the_handshake_whatever_the_payload_says():
    world = World(known=3)
    session, _ = world.session(key=world.peer.public_key)
    session.frame(encode(world.hello("third", admissions=world.full.chain(world.third.node_id))), "stream")
    session.frame(encode(Ping(seq=1)), "stream")
    got = next(event for event in world.events if isinstance(event, MessageReceived))
    assert got.peer == world.peer.node_id


def test_a_greeting_of_another_mesh_is_refused():
    world = World()
    session, wire = world.session()
    session.frame(encode(world.hello("peer", mesh_id="other.mesh")), "stream")
    assert wire.shut_with == ["wrong_mesh"]


def test_somebody_elses_proof_admits_nobody():
    world = World(known=1)
    session, _ = world.session()
    session.frame(encode(world.hello("peer", admissions=world.full.chain(world.third.node_id))), "stream")
    assert session.state is State.CLOSED
    assert world.peer.node_id not in world.book


def test_an_open_session_drops_a_malformed_message_and_goes_on_but_not_an_oversized_one():
    world = World()
    session, wire = world.open()
    session.frame(b"\xc1", "stream")
    assert session.state is State.OPEN
    assert world.table.counters.rejected["malformed"] == 1
    session.frame(bytes(1_048_577), "stream")
    assert wire.shut_with == ["oversized"]


def test_a_second_greeting_or_a_join_on_an_open_session_is_dropped():
    world = World()
    session, _ = world.open()
    session.frame(encode(world.hello("peer")), "stream")
    session.frame(encode(JoinRequest(token_id="t", proof=bytes(32), name="n")), "stream")
    assert world.table.counters.dropped["unexpected_message"] == 2
    assert world.kinds() == [PeerConnected]


def test_a_peer_over_its_rate_is_dropped_and_counted_until_time_passes():
    world = World(settings=QuicSettings(messages_per_second_per_peer=10))
    session, _ = world.open()
    for seq in range(30):
        session.frame(encode(Ping(seq=seq)), "datagram")
    received = world.kinds().count(MessageReceived)
    assert received == 19, "a burst of twice the rate, one of which was the greeting"
    assert world.table.counters.dropped["rate"] == 11
    world.time_us += 500_000
    for seq in range(10):
        session.frame(encode(Ping(seq=seq)), "datagram")
    assert world.kinds().count(MessageReceived) == received + 5


def test_nothing_leaves_over_the_outstanding_bound():
    world = World(settings=QuicSettings(outstanding_bytes_per_peer=65_536))
    session, wire = world.open()
    wire.held = 65_530
    assert not session.send(Ping(seq=1), "stream")
    assert session.send(Ping(seq=1), "datagram"), "datagrams are bounded by their own queue"
    wire.held = 0
    assert session.send(Ping(seq=1), "stream")


def test_without_datagrams_the_stream_is_used():
    world = World()
    session, wire = world.open()
    wire.datagrams = False
    assert session.send(Ping(seq=1), "datagram")
    assert wire.packets == []
    assert wire.frames[-1] == encode(Ping(seq=1))


@pytest.mark.parametrize(("prepare", "reason"), [("handshake", "timeout"), ("greeting", "hello_timeout")])
def test_every_stage_before_open_has_a_deadline(prepare, reason):
    world = World()
    wire = Wire(lambda: world.time_us)
    session = Session(world.table, wire, dialled=False)
    world.table.add(session)
    if prepare == "greeting":
        session.established(world.peer.public_key)
    world.time_us += world.settings.connect_timeout_us - 1
    world.table.sweep()
    assert session.state is not State.CLOSED
    world.time_us += 1
    world.table.sweep()
    assert session.state is State.CLOSED
    assert world.events == [Rejected(reason, wire.address)]


def test_a_frame_that_never_ends_closes_the_session():
    world = World()
    session, wire = world.open()
    wire.begun_us = world.time_us
    world.time_us += world.settings.read_timeout_us
    world.table.sweep()
    assert session.state is State.OPEN
    world.time_us += 1
    world.table.sweep()
    assert wire.shut_with == ["read_timeout"]
    assert world.events[-1] == PeerDisconnected(world.peer.node_id, "read_timeout")


def test_a_session_ends_once_however_often_it_is_told():
    world = World()
    session, wire = world.open()
    session.end("closed")
    session.closed("peer_closed")
    session.broken("malformed")
    assert wire.shut_with == ["closed"]
    assert world.kinds() == [PeerConnected, PeerDisconnected]
    assert not session.send(Ping(seq=1), "stream")


def test_when_the_better_connection_ends_a_lingering_one_takes_over_without_a_flap():
    world = World()
    first, _ = world.open(path="quic")
    second, _ = world.open(path="tls")
    assert world.table.peers[world.peer.node_id] is second
    second.closed("peer_closed")
    assert world.table.peers[world.peer.node_id] is first
    world.time_us += 10 * LINGER_US
    world.table.sweep()
    assert first.state is State.OPEN
    assert PeerDisconnected not in world.kinds()


def test_a_lingering_connection_ends_by_itself_without_a_word():
    world = World()
    first, _ = world.open(path="tls")
    second, _ = world.open(path="quic")
    world.time_us += LINGER_US
    world.table.sweep()
    assert (first.state, second.state) == (State.CLOSED, State.OPEN)
    assert PeerDisconnected not in world.kinds()


def test_a_silent_connection_gives_way_to_a_new_one_whoever_dialled():
    world = World()
    first, _ = world.open(dialled=False)
    world.time_us += 3_000_000
    second, wire = world.open(dialled=True)
    assert wire.shut_with == []
    assert world.table.peers[world.peer.node_id] is second
    del first


def test_counters_take_known_reasons_only():
    world = World()
    with pytest.raises(AssertionError):
        world.table.counters.reject("whatever the peer said")
    assert all(reason.replace("_", "").isalpha() for reason in REASONS)
    assert Identity.generate().node_id not in REASONS


def revoke(world, who):
    world.book.revoke(who.node_id, signer_public_key=world.own.public_key, sign=world.own.sign)


def shown_to(wire, base):
    """What a book that slept knows after it has read the last frame of ``wire``."""
    last = decode(wire.frames[-1])
    assert isinstance(last, GossipPush)
    base.merge_all(last.gossip.admissions)
    return base


def test_a_peer_revoked_while_connected_is_cut_off_at_once_and_shown_why():
    world = World()
    session, wire = world.open()
    revoke(world, world.peer)
    session.frame(encode(Ping(seq=1)), "stream")
    assert (session.state, wire.shut_with) == (State.CLOSED, ["revoked"])
    assert MessageReceived not in world.kinds()
    assert shown_to(wire, AdmissionBook(world.book.mesh_id, world.full.statements)).is_revoked(world.peer.node_id)


@pytest.mark.parametrize("dialled", [True, False])
def test_a_revoked_peer_that_slept_through_it_is_shown_why_and_gets_nothing_else(dialled):
    world = World()
    revoke(world, world.peer)
    session, wire = world.session(dialled=dialled)
    if not dialled:
        assert wire.frames == [], "a stream can be answered only after the dialler has opened it"
        session.frame(encode(world.hello("peer")), "stream")
    assert (session.state, wire.shut_with, len(wire.frames)) == (State.CLOSED, ["revoked"], 1)
    assert shown_to(wire, AdmissionBook(world.book.mesh_id, world.full.statements)).is_revoked(world.peer.node_id)


@pytest.mark.parametrize("dialled", [True, False])
def test_a_node_learns_its_own_revocation_from_whoever_turns_it_away(dialled):
    world = World()
    mesh = AdmissionBook(world.book.mesh_id, world.full.statements)
    founder, me = world.own, world.peer  # the founder's session, seen from the peer's side
    world.table.node_id = me.node_id
    mesh.revoke(me.node_id, signer_public_key=founder.public_key, sign=founder.sign)
    session, _ = world.session(dialled=dialled, key=founder.public_key)
    proof = GossipPush(gossip=Gossip(admissions=mesh.proof_against(me.node_id)))
    session.frame(encode(proof), "stream")
    assert world.book.is_revoked(me.node_id)
    assert session.state is State.CLOSED


def test_gossip_of_a_stranger_in_place_of_a_greeting_teaches_nothing():
    world = World(known=1)
    session, wire = world.session()
    session.frame(encode(GossipPush(gossip=Gossip(admissions=world.full.statements))), "stream")
    assert (session.state, wire.frames, wire.shut_with) == (State.CLOSED, [], ["refused"])
    assert len(world.book) == 1


def test_a_peer_that_lost_its_voucher_is_not_heard_and_has_ten_seconds_to_find_another():
    world = World(known=2)
    friend = Identity.generate()
    peer = world.peer
    by_peer = make_admission(world.book.mesh_id, friend.public_key, signer_public_key=peer.public_key, sign=peer.sign)
    world.book.merge(by_peer)
    session, wire = world.session(key=friend.public_key)
    session.frame(encode(world.hello("friend")), "stream")
    assert session.state is State.OPEN
    out = make_admission(
        world.book.mesh_id, peer.public_key, signer_public_key=world.own.public_key, sign=world.own.sign,
        version=2, revoked=True,
    )  # fmt: skip
    world.book.merge(out)
    for _ in range(3):
        world.time_us += UNVOUCHED_US // 3 - 1
        world.table.sweep()
        session.frame(encode(Ping(seq=1)), "stream")
    assert session.state is State.OPEN
    assert MessageReceived not in world.kinds()
    world.book.admit(friend.public_key, signer_public_key=world.own.public_key, sign=world.own.sign)
    world.table.sweep()
    session.frame(encode(Ping(seq=2)), "stream")
    assert MessageReceived in world.kinds()
    world.book.revoke(friend.node_id, signer_public_key=world.own.public_key, sign=world.own.sign)
    world.table.sweep()
    assert wire.shut_with == ["revoked"]


def test_a_peer_that_nobody_vouches_for_any_more_is_closed_in_the_end():
    world = World(known=2)
    _, wire = world.open()
    world.book._admitted.discard(world.peer.node_id)
    world.table.sweep()
    world.time_us += UNVOUCHED_US
    world.table.sweep()
    assert wire.shut_with == ["refused"]
    assert world.events[-1] == PeerDisconnected(world.peer.node_id, "unadmitted")


def test_an_old_key_is_shown_who_took_its_place():
    world = World()
    peer = world.peer
    base = make_admission(
        world.book.mesh_id, peer.public_key, signer_public_key=world.own.public_key, sign=world.own.sign,
        version=2, successor=peer.successor,
    )  # fmt: skip
    world.book.merge(base)
    heir = Identity(peer.next_keys[0])
    world.book.merge_all(
        world.book.succeed(peer.public_key, heir.public_key, sign=peer.sign, sign_new=heir.sign, successor="")
    )
    session, wire = world.session()
    session.frame(encode(world.hello("peer")), "stream")
    assert wire.shut_with == ["superseded"]
    asleep = AdmissionBook(world.book.mesh_id, [*world.full.statements, base])
    assert shown_to(wire, asleep).successor(peer.node_id) == heir.node_id
