"""Two and three real transports on loopback: who may talk, over what, and what happens when they double, clone or die."""

import asyncio
import socket

import pytest

from config.settings import ListenSettings, QuicSettings
from protocol.admission import AdmissionBook, make_admission, mesh_id_of
from protocol.errors import AddressError
from protocol.messages import Gossip, GossipPush, Ping
from protocol.quic.endpoint import QuicTransport
from protocol.quic.identity import Identity
from protocol.quic.interface import (
    AdmissionsLearned,
    DialFailed,
    IdentityConflict,
    MessageReceived,
    PeerConnected,
    PeerDisconnected,
    PeerMoved,
    Rejected,
)
from protocol.rows import SignedRow
from tests.integration.transport_mesh import Node, eventually, identities, mesh, run, running

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@LOOPS
def test_two_admitted_nodes_exchange_hellos_and_messages_on_both_lanes(loop):
    async def main():
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha, beta):
            beta.transport.dial(alpha.address)
            met = await beta.until(PeerConnected)
            assert (met.peer, met.hello.name) == (alpha.id, "alpha")
            await alpha.until(PeerConnected, lambda event: event.peer == beta.id)
            assert alpha.transport.connected[beta.id].datagrams
            assert alpha.transport.send(beta.id, Ping(seq=1), "datagram")
            assert beta.transport.send(alpha.id, Ping(seq=2), "stream")
            got = await beta.until(MessageReceived)
            assert (got.peer, got.message, got.lane) == (alpha.id, Ping(seq=1), "datagram")
            assert (await alpha.until(MessageReceived)).lane == "stream"
        assert beta.seen(PeerDisconnected)[0].reason == "closed"

    run(main(), loop=loop)


def test_what_does_not_fit_a_datagram_takes_the_stream_and_wedges_nothing():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha, beta):
            await alpha.meet(beta)
            big = GossipPush(gossip=Gossip(rows=(SignedRow(payload=bytes(5_000), signature=bytes(64)),)))
            assert alpha.transport.send(beta.id, big, "datagram")
            assert (await beta.until(MessageReceived)).lane == "stream"
            assert alpha.transport.send(beta.id, Ping(seq=9), "datagram")
            assert (await beta.until(MessageReceived, lambda e: e.message == Ping(seq=9))).lane == "datagram"

    run(main())


def test_a_stranger_with_a_valid_key_is_refused_and_learns_no_byte_of_the_mesh():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        stranger = Identity.generate()
        own = mesh_id_of("other", stranger.public_key)
        self_made = [
            make_admission(own, stranger.public_key, signer_public_key=stranger.public_key, sign=stranger.sign)
        ]
        # The stranger believes alpha is admitted in *its* mesh, so it greets first.
        believing = AdmissionBook(own, self_made)
        believing.admit(alpha.identity.public_key, signer_public_key=stranger.public_key, sign=stranger.sign)
        mallory = Node(stranger, "mallory", believing)
        async with running(alpha, mallory):
            mallory.transport.dial(alpha.address)
            failed = await mallory.until(DialFailed)
            refused = await alpha.until(Rejected)
            assert refused.reason == "wrong_mesh"
            assert failed.reason == "unadmitted"
            assert alpha.transport.counters.rejected["wrong_mesh"] == 1
            assert mallory.seen(PeerConnected) == []
            assert not alpha.transport.connected
        del beta

    run(main())


def test_a_node_admitted_elsewhere_meanwhile_shows_the_proof_in_its_hello_and_is_let_in():
    async def main():
        (founder, newcomer), books = identities(2)
        alone = AdmissionBook(books[0].mesh_id, books[0].statements[:1])
        alpha, beta = Node(founder, "alpha", alone), Node(newcomer, "beta", books[1])
        assert beta.id not in alone
        async with running(alpha, beta):
            await beta.meet(alpha)
            learned = await alpha.until(AdmissionsLearned)
            assert beta.id in {statement.node_id for statement in learned.admissions}
            assert beta.id in alone

    run(main())


def test_a_dialler_that_expects_somebody_else_does_not_greet():
    async def main():
        alpha, beta, gamma = mesh("alpha", "beta", "gamma")
        async with running(alpha, beta):
            beta.transport.dial(alpha.address, gamma.id)
            assert (await beta.until(DialFailed)).reason == "wrong_identity"
            await alpha.until(Rejected)
            assert not alpha.transport.connected

    run(main())


def test_when_both_dial_one_connection_stays_and_it_is_the_one_of_the_smaller_id():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        smaller, larger = sorted((alpha, beta), key=lambda node: node.id)
        async with running(alpha, beta):
            alpha.transport.dial(beta.address)
            beta.transport.dial(alpha.address)
            await eventually(
                lambda: (
                    len(alpha.transport.table._sessions) == 1 == len(beta.transport.table._sessions)
                    and bool(alpha.transport.connected and beta.transport.connected)
                )
            )
            assert smaller.transport.connected[larger.id].dialled
            assert not larger.transport.connected[smaller.id].dialled
            assert len(alpha.seen(PeerConnected)) == len(beta.seen(PeerConnected)) == 1
            assert alpha.seen(PeerDisconnected) == beta.seen(PeerDisconnected) == []
            assert alpha.seen(DialFailed) == beta.seen(DialFailed) == []
            assert alpha.transport.send(beta.id, Ping(seq=5), "stream")
            await beta.until(MessageReceived)

    run(main())


def test_a_restarted_node_replaces_what_is_left_of_its_killed_process_at_once():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        again = Node(beta.identity, "beta", beta.book, instance="2" * 32, boot_counter=2)
        async with running(alpha):
            async with running(beta):
                await beta.meet(alpha)
                beta.transport.table.close_all = lambda _reason: None  # killed: says no goodbye
            assert beta.id in alpha.transport.connected
            async with running(again):
                again.transport.dial(alpha.address)
                await alpha.until(PeerDisconnected, lambda event: event.reason == "replaced", patience_s=2)
                await alpha.until(PeerConnected, lambda event: event.hello.boot_counter == 2, patience_s=2)
                assert alpha.transport.connected[beta.id].hello.instance == "2" * 32

    run(main())


@pytest.mark.parametrize("boot_counter", [1, 2, 3])
def test_a_clone_of_a_living_node_is_refused_and_both_ends_say_so(boot_counter):
    async def main():
        alpha, beta = mesh("alpha", "beta", boot_counter=2)
        clone = Node(beta.identity, "beta", beta.book, instance="f" * 32, boot_counter=boot_counter)
        async with running(alpha, beta, clone):
            await beta.meet(alpha)
            clone.transport.dial(alpha.address)
            assert (await clone.until(DialFailed)).reason == "identity_conflict"
            conflict = await alpha.until(IdentityConflict)
            assert conflict.peer == beta.id
            assert set(conflict.instances) == {beta.transport.table.hello.instance, "f" * 32}
            told = await clone.until(IdentityConflict)
            assert (told.peer, told.turned_away) == (clone.id, True)
            assert alpha.transport.connected[beta.id].hello.instance == beta.transport.table.hello.instance
            assert alpha.seen(PeerDisconnected) == [], "the original does not notice"

    run(main())


def test_a_clone_that_dials_the_original_is_told_apart_from_a_node_that_dials_itself():
    async def main():
        alpha, _ = mesh("alpha", "beta")
        clone = Node(alpha.identity, "alpha", alpha.book, instance="e" * 32)
        async with running(alpha, clone):
            alpha.transport.dial(alpha.address)
            assert (await alpha.until(DialFailed)).reason == "self"
            assert alpha.seen(IdentityConflict) == []
            clone.transport.dial(alpha.address)
            assert (await alpha.until(IdentityConflict)).peer == alpha.id
            assert (await clone.until(DialFailed)).reason == "identity_conflict"

    run(main())


def test_a_revoked_peer_is_cut_off_while_connected_and_cannot_come_back():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha, beta):
            await beta.meet(alpha)
            alpha.book.revoke(beta.id, signer_public_key=alpha.identity.public_key, sign=alpha.identity.sign)
            await alpha.until(PeerDisconnected, lambda event: event.reason == "revoked", patience_s=2)
            assert (await beta.until(PeerDisconnected)).reason == "revoked"
            beta.transport.dial(alpha.address)
            assert (await beta.until(DialFailed)).reason == "revoked"
            assert not alpha.transport.connected

    run(main())


def test_a_dial_to_a_closed_port_ends_at_the_connect_timeout_not_at_the_idle_timeout():
    async def main():
        (alpha,) = mesh("alpha", settings=QuicSettings(connect_timeout_us=300_000))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        async with running(alpha):
            alpha.transport.dial(f"127.0.0.1:{port}")
            assert (await alpha.until(DialFailed, patience_s=1.5)).reason == "timeout"

    run(main())


def test_a_port_in_use_is_one_clear_line():
    async def main():
        for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
            with socket.socket(socket.AF_INET, kind) as taken:
                taken.bind(("127.0.0.1", 0))
                if kind == socket.SOCK_STREAM:
                    taken.listen()
                (alpha,) = mesh("alpha", port=taken.getsockname()[1])
                with pytest.raises(AddressError, match=f"port {taken.getsockname()[1]}: Address already in use"):
                    await alpha.transport.run()

    run(main())


@LOOPS
@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6_and_dual_stack_sockets_reach_each_other(host, loop):
    async def main():
        alpha, beta = mesh("alpha", "beta", host=host)
        async with running(alpha, beta):
            beta.transport.dial(alpha.address)
            await beta.until(PeerConnected)
            if host == "::":
                assert beta.transport.connected[alpha.id].address == f"[::1]:{alpha.transport.port}"

    run(main(), loop=loop)


def test_an_ipv4_peer_is_reached_from_a_dual_stack_socket_and_shown_as_ipv4():
    async def main():
        (one, two), books = identities(2)
        alpha, beta = Node(one, "alpha", books[0], host="127.0.0.1"), Node(two, "beta", books[1], host="::")
        async with running(alpha, beta):
            beta.transport.dial(alpha.address)
            assert (await beta.until(PeerConnected)).address == alpha.address
            assert (await alpha.until(PeerConnected)).address == f"127.0.0.1:{beta.transport.port}"
            beta.transport.close(alpha.id, "closed")
            alpha.transport.dial(f"[::1]:{beta.transport.port}")
            assert (await alpha.until(DialFailed)).reason == "address"

    run(main())


def test_a_quiet_connection_is_kept_alive_by_the_dialler_and_starts_nothing_else():
    async def main():
        patient = QuicSettings(keepalive_us=2_200_000, idle_timeout_us=3_600_000)
        alpha, beta = mesh("alpha", "beta", settings=patient)
        async with running(alpha, beta):
            await beta.meet(alpha)
            await asyncio.sleep(5)
            assert alpha.seen(PeerDisconnected) == beta.seen(PeerDisconnected) == []
            assert beta.transport.counters.handshakes["started"] == 1, "silence before a keepalive is not a dead path"

    run(main())


def test_a_message_is_refused_and_counted_when_too_much_is_outstanding():
    async def main():
        alpha, beta = mesh("alpha", "beta", settings=QuicSettings(outstanding_bytes_per_peer=65_536))
        push = GossipPush(gossip=Gossip(rows=(SignedRow(payload=bytes(30_000), signature=bytes(64)),)))
        async with running(alpha, beta):
            await alpha.meet(beta)
            assert [alpha.transport.send(beta.id, push, "stream") for _ in range(4)] == [True, True, False, False]
            assert alpha.transport.counters.dropped["outstanding_bound"] == 2
            await eventually(lambda: len(beta.seen(MessageReceived)) == 2)
            await eventually(lambda: alpha.transport.send(beta.id, push, "stream"))

    run(main())


def test_a_peer_behind_a_nat_that_rebinds_keeps_its_session_and_its_new_address_is_reported():
    async def main():
        alpha, beta = mesh("alpha", "beta")
        async with running(alpha, beta):
            nat = await Nat.between(alpha.address)
            beta.transport.dial(nat.address)
            await alpha.until(PeerConnected)
            await beta.until(PeerConnected)
            await nat.rebind()
            assert beta.transport.send(alpha.id, Ping(seq=1), "datagram")
            await alpha.until(MessageReceived)
            moved = await alpha.until(PeerMoved)
            assert moved.address == nat.outside
            assert alpha.transport.send(beta.id, Ping(seq=2), "datagram")
            await beta.until(MessageReceived)
            assert alpha.seen(PeerDisconnected) == []
            nat.close()

    run(main())


def test_nothing_is_dialled_before_the_socket_is_bound():
    async def main():
        (alpha,) = mesh("alpha")
        alpha.transport.dial("127.0.0.1:1")
        assert alpha.events == [DialFailed("127.0.0.1:1", "address")]

    run(main())


def test_the_transport_is_what_its_interface_says():
    from protocol.quic.interface import Transport

    promised = {name for name in vars(Transport) if not name.startswith("_")} | set(Transport.__annotations__)
    assert promised >= {"dial", "send", "close", "connected", "counters", "run"}
    assert ListenSettings().port == 7946
    assert all(hasattr(QuicTransport, name) for name in promised - {"counters"})


class Nat(asyncio.DatagramProtocol):
    """A UDP relay with one client; ``rebind`` changes the port that the far side sees."""

    def __init__(self, target):
        self._target, self._client, self._outside = target, None, None

    @classmethod
    async def between(cls, target):
        host, port = target.rsplit(":", 1)
        nat = cls((host, int(port)))
        nat._inside, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: nat, local_addr=("127.0.0.1", 0)
        )
        await nat.rebind()
        return nat

    @property
    def address(self):
        return "{}:{}".format(*self._inside.get_extra_info("sockname"))

    @property
    def outside(self):
        return "{}:{}".format(*self._outside.get_extra_info("sockname"))

    async def rebind(self):
        if self._outside is not None:
            self._outside.close()
        self._outside, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Back(self), local_addr=("127.0.0.1", 0)
        )

    def connection_made(self, transport):
        pass

    def datagram_received(self, data, addr):
        self._client = addr
        self._outside.sendto(data, self._target)

    def back(self, data):
        if self._client:
            self._inside.sendto(data, self._client)

    def close(self):
        self._inside.close()
        self._outside.close()


class _Back(asyncio.DatagramProtocol):
    def __init__(self, nat):
        self._nat = nat

    def datagram_received(self, data, _addr):
        self._nat.back(data)
