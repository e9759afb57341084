"""What one connection keeps for as long as it lives: a mesh of 32 has 31 of them in every node."""

import gc
import tracemalloc

from protocol.quic.identity import Identity
from protocol.quic.mutual import _handshake, forget_handshake

PAIRS = 4
WEIGHT_BYTES = 48_000
"""37 000 were measured; 93 000 before the handshake's buffers and the sets of epochs went."""


def test_a_connection_that_is_open_keeps_nothing_of_its_handshakes_buffers() -> None:
    alice, bob = Identity.generate(), Identity.generate()
    _handshake(alice, bob, anonymous=False)  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = [_handshake(alice, bob, anonymous=False) for _ in range(PAIRS)]
        for pair in kept:
            for connection in pair:
                forget_handshake(connection)
        gc.collect()
        weight = (tracemalloc.get_traced_memory()[0] - before) / (2 * PAIRS)
    finally:
        tracemalloc.stop()
    assert weight < WEIGHT_BYTES


def test_a_connection_that_forgot_its_handshake_carries_streams_and_datagrams_both_ways() -> None:
    client, server = _handshake(Identity.generate(), Identity.generate(), anonymous=False)
    for connection in (client, server):
        forget_handshake(connection)
    client.send_stream_data(0, b"there")
    heard = []
    for now in (0.1, 0.2, 0.3):
        for source, target, name in ((client, server, "client"), (server, client, "peer")):
            for packet, _ in source.datagrams_to_send(now=now):
                target.receive_datagram(packet, (name, 1), now=now)
        while (event := server.next_event()) is not None:
            heard.append(getattr(event, "data", b""))
        if not client._streams[0].sender._buffer:
            server.send_datagram_frame(b"back")
    while (event := client.next_event()) is not None:
        heard.append(getattr(event, "data", b""))
    assert {b"there", b"back"} <= set(heard)
