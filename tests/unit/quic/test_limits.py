"""Rates: bursts, refill, and half of the handshakes for hosts that are known."""

from protocol.quic.limits import KNOWN_HOSTS_MAX, HandshakeGate, TokenBucket


def test_a_bucket_gives_its_burst_and_then_its_rate():
    bucket = TokenBucket(rate=10, burst=5)
    assert [bucket.take(0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert not bucket.take(99_999)
    assert bucket.take(100_000)
    assert not bucket.take(100_000)
    assert [bucket.take(10_000_000) for _ in range(7)] == [True] * 5 + [False] * 2


def test_a_clock_that_goes_back_gives_nothing():
    bucket = TokenBucket(rate=10, burst=1)
    assert bucket.take(5_000_000)
    assert not bucket.take(1_000_000)
    assert not bucket.take(5_000_000)
    assert bucket.take(5_100_000)


def test_a_flood_of_strangers_leaves_half_of_the_handshakes_to_known_hosts():
    gate = HandshakeGate(50)
    gate.remember("10.0.0.1")
    assert sum(gate.admit(f"192.0.2.{number % 250}", 0) for number in range(1_000)) == 25
    assert sum(gate.admit("10.0.0.1", 0) for _ in range(100)) == 25


def test_known_hosts_are_bounded_and_the_oldest_goes_first():
    gate = HandshakeGate(1)
    for number in range(KNOWN_HOSTS_MAX + 1):
        gate.remember(str(number))
    assert len(gate._known) == KNOWN_HOSTS_MAX
    assert "0" not in gate._known
