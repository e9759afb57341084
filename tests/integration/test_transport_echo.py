"""What an echo costs on the wire: that is what an idle mesh does all day."""

import asyncio
from collections import Counter

from aioquic.tls import Epoch

from protocol.messages import Ack, Ping
from protocol.quic.interface import MessageReceived, TransportEvent
from tests.integration.transport_mesh import Node, identities, run, running

ECHOES = 50


class Answering(Node):
    """Answers every ping on the spot, as the membership core does."""

    def _take(self, event: TransportEvent) -> None:
        super()._take(event)
        match event:
            case MessageReceived(peer, Ping(seq=seq), lane):
                self.transport.send(peer, Ack(seq=seq), lane)
            case _:
                pass


def acknowledgements_owed(node, other):
    """Whether what arrived from ``other`` waits for a packet of its own, by a timer: one more packet and one more wake."""
    session = node.transport.table.peers[other.id]
    return session.carrier._quic._spaces[Epoch.ONE_RTT].ack_at is not None


def test_an_echo_is_three_packets_and_counted_as_two_datagrams():
    async def main():
        made, books = identities(2)
        alpha, beta = Node(made[0], "alpha", books[0]), Answering(made[1], "beta", books[1])
        async with running(alpha, beta):
            await alpha.meet(beta)
            await asyncio.sleep(0.3)  # what the handshake leaves to be said
            before = [
                (node.transport.counters.packets["send"], dict(node.transport.counters.lanes)) for node in (alpha, beta)
            ]
            owed = []
            for seq in range(ECHOES):
                alpha.transport.send(beta.id, Ping(seq=seq), "datagram")
                await alpha.until(MessageReceived, lambda event, seq=seq: event.message == Ack(seq=seq))
                # Both ends have said all they have to say: the answer took the acknowledgement with it, and the
                # answer's own went out at once. Delayed ones may merge with the next ping, so that counting misses them.
                owed.append((acknowledgements_owed(alpha, beta), acknowledgements_owed(beta, alpha)))
                await asyncio.sleep(0.005)
            packets = sum(
                node.transport.counters.packets["send"] - sent
                for node, (sent, _) in zip((alpha, beta), before, strict=True)
            )
            # All but what a stalled machine's probes for lost packets leave behind. Without the promptness: under 10.
            assert owed.count((False, False)) >= ECHOES - 5, Counter(owed)
            # Three each; a lost one may be sent again on a busy machine. Four each would be 200.
            assert 3 * ECHOES <= packets <= 3 * ECHOES + 10
            for node, (_, lanes) in zip((alpha, beta), before, strict=True):
                now = node.transport.counters.lanes
                assert now["send", "datagram"] - lanes.get(("send", "datagram"), 0) == ECHOES
                assert now["receive", "datagram"] - lanes.get(("receive", "datagram"), 0) == ECHOES
                assert now["send", "stream"] == lanes.get(("send", "stream"), 0)

    run(main(), loop="uvloop")
