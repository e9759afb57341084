"""What an echo costs on the wire: that is what an idle mesh does all day."""

import asyncio

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
            for seq in range(ECHOES):
                alpha.transport.send(beta.id, Ping(seq=seq), "datagram")
                await alpha.until(MessageReceived, lambda event, seq=seq: event.message == Ack(seq=seq))
                await asyncio.sleep(0.005)
            packets = sum(
                node.transport.counters.packets["send"] - sent
                for node, (sent, _) in zip((alpha, beta), before, strict=True)
            )
            # Three each; a lost one may be sent again on a busy machine. Four each would be 200.
            assert 3 * ECHOES <= packets <= 3 * ECHOES + 10
            for node, (_, lanes) in zip((alpha, beta), before, strict=True):
                now = node.transport.counters.lanes
                assert now["send", "datagram"] - lanes.get(("send", "datagram"), 0) == ECHOES
                assert now["receive", "datagram"] - lanes.get(("receive", "datagram"), 0) == ECHOES
                assert now["send", "stream"] == lanes.get(("send", "stream"), 0)

    run(main(), loop="uvloop")
