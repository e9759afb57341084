"""One connection's thread against a peer that does what no peer should."""

import contextlib
import socket
import threading
import time

import pytest

from protocol.quic.tls import LaneContexts
from stage_agent.tunnel.pump import Pump, Terms
from stage_agent.tunnel.wire import CHUNK_BYTES, END, KEEPALIVE
from tests.integration.transport_mesh import identities

TERMS = Terms(keepalive_s=0.2, idle_s=0.8, link=None, observe=lambda *_: None)


@contextlib.contextmanager
def connection(terms=TERMS, early=b""):
    """The engine's end, the peer's end, and the running pump between them with what its thread returned."""
    made, books = identities(2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = [socket.create_connection(listening.getsockname()) for _ in range(2)]
        accepted = [listening.accept()[0] for _ in range(2)]
    wrapped = {}
    shaking = threading.Thread(
        target=lambda: wrapped.update(
            server=LaneContexts(made[0], books[0]).server().wrap_socket(accepted[0], server_side=True)
        )
    )
    shaking.start()
    peer = LaneContexts(made[1], books[1]).client().wrap_socket(dialled[0])
    shaking.join()
    local, channel, engine = accepted[1], wrapped["server"], dialled[1]
    for side in (local, channel):
        side.setblocking(False)
    for side in (peer, engine):
        side.settimeout(5)
    pump = Pump(local, channel, early, terms)
    said = []
    thread = threading.Thread(target=lambda: said.append(pump.run()), name="the pump")
    thread.start()
    try:
        yield engine, peer, pump, lambda: (thread.join(5), *said)[1]
    finally:
        pump.stop()
        thread.join(5)
        for side in (local, channel, peer, engine):
            side.close()


def chunk(content):
    return len(content).to_bytes(4, "big") + content


def fill(side, content):
    """Send until nothing is taken any more."""
    side.settimeout(0.3)
    with contextlib.suppress(TimeoutError):
        while True:
            side.sendall(content)


def exactly(source, size):
    content = b""
    while len(content) < size:
        part = source.recv(size - len(content))
        assert part, content
        content += part
    return content


def test_chunks_arrive_however_their_bytes_are_cut():
    with connection() as (engine, peer, pump, ended):
        sent = chunk(b"one") + KEEPALIVE + chunk(bytes(100_000)) + chunk(b"two") + END
        for start in range(64):
            peer.sendall(sent[start : start + 1])
        peer.sendall(sent[64:])
        assert exactly(engine, 100_006) == b"one" + bytes(100_000) + b"two"
        assert engine.recv(1) == b""
        engine.shutdown(socket.SHUT_WR)
        assert exactly(peer, 4) == END
        assert ended() is None
        assert pump.received_bytes == 100_006


def test_what_came_before_the_thread_comes_first():
    with connection(early=chunk(b"early") + chunk(b"split")[:6]) as (engine, peer, _, _):
        peer.sendall(chunk(b"split")[6:])
        assert exactly(engine, 10) == b"earlysplit"


@pytest.mark.parametrize(
    ("does", "fault"),
    [
        (lambda peer: peer.sendall((CHUNK_BYTES + 1).to_bytes(4, "big")), "protocol"),
        (lambda peer: peer.close(), "reset"),
        (lambda peer: peer.sendall(chunk(b"half")[:6]), "timeout"),
        (lambda peer: socket.socket.sendall(peer, b"\x17\x03\x03\x00\x10" + bytes(16)), "reset"),
        (lambda _peer: None, "timeout"),
    ],
    ids=["oversized", "closed", "half a chunk", "not TLS", "silent"],
)
def test_a_peer_s_fault_ends_the_connection_with_its_reason(does, fault):
    with connection() as (_, peer, _, ended):
        does(peer)
        assert ended() == fault


def test_signs_of_life_keep_a_silent_connection_and_are_sent_as_well():
    with connection() as (_, peer, _, ended):
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            peer.sendall(KEEPALIVE)
            assert exactly(peer, 4) == KEEPALIVE
        peer.close()
        assert ended() == "reset"


def test_stop_ends_it_at_once_also_while_the_engine_takes_nothing():
    with connection() as (_, peer, pump, ended):
        fill(peer, chunk(bytes(CHUNK_BYTES)))
        began = time.monotonic()
        pump.stop()
        assert ended() == "stopped"
        assert time.monotonic() - began < 1


def test_an_engine_that_breaks_off_is_a_fault_and_not_an_end():
    with connection() as (engine, _, _, ended):
        engine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        engine.close()
        assert ended() == "reset"


def test_a_waiting_connection_costs_no_cpu():
    with connection(Terms(0.2, 60.0, None, lambda *_: None)) as (engine, peer, _, _):
        fill(peer, chunk(bytes(CHUNK_BYTES)))  # both ways full: the engine reads nothing, and neither does the peer
        fill(engine, bytes(CHUNK_BYTES))
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.05
        assert any(thread.name == "the pump" for thread in threading.enumerate()), "it waits, it has not ended"
