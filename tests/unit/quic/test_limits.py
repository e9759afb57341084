"""Rates: bursts, refill, and half of the handshakes for hosts that are known."""

from protocol.quic.limits import KNOWN_HOSTS_MAX, STRANGE_HOSTS_MAX, HandshakeGate, TokenBucket, network_of


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


def test_a_flood_of_strangers_costs_half_of_the_rate_and_peers_nothing():
    gate = HandshakeGate(50)
    gate.remember("10.0.0.1")
    assert sum(gate.admit(f"192.0.2.{number % 250}", 0) for number in range(1_000)) == 25
    assert sum(gate.admit("10.0.0.1", 0) for _ in range(1_000)) == 200


def test_an_engine_s_connections_for_every_tensor_are_not_refused_to_a_peer():
    gate = HandshakeGate(50)
    gate.remember("10.0.0.1")
    assert all(gate.admit("10.0.0.1", tensor * 1_000_000 // 120) for tensor in range(1_000))  # 80 layers, 120 a second


def test_known_hosts_are_bounded_and_the_oldest_goes_first():
    gate = HandshakeGate(1)
    for number in range(KNOWN_HOSTS_MAX + 1):
        gate.remember(str(number))
    assert len(gate._known) == KNOWN_HOSTS_MAX
    assert "0" not in gate._known


def test_one_strange_host_gets_a_small_share_and_leaves_room_for_other_newcomers():
    gate = HandshakeGate(50)
    assert sum(gate.admit("192.0.2.1", 0) for _ in range(100)) == 6
    assert sum(gate.admit("192.0.2.1", second * 1_000_000) for second in range(1, 11) for _ in range(20)) == 30
    assert gate.admit("192.0.2.2", 10_000_000)


def test_a_machine_with_a_whole_ipv6_network_is_one_host():
    gate = HandshakeGate(50)
    assert sum(gate.admit(f"2001:db8::{number:x}", 0) for number in range(100)) == 6
    assert gate.admit("2001:db8:0:1::1", 0)
    assert network_of("::ffff:192.0.2.1") == "::ffff:192.0.2.1"
    assert network_of("fe80::1%eth0") == "fe80::/64"
    assert network_of("not:an:address") == "not:an:address"


def test_strange_hosts_are_bounded():
    gate = HandshakeGate(50)
    for number in range(STRANGE_HOSTS_MAX + 10):
        gate.admit(f"10.0.{number // 250}.{number % 250}", 0)
    assert len(gate._hosts) == STRANGE_HOSTS_MAX
