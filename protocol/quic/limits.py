"""Rates and counts that keep strangers and noisy peers cheap. Pure: times are arguments."""

import ipaddress
from collections import OrderedDict

KNOWN_HOSTS_MAX = 4_096
PEERS_FACTOR = 4
"""llama.cpp opens a connection for nearly every tensor while it loads, 130 to 190 in three seconds for a small model, and gives
up at the first that is refused. With 200 a second one process's handshakes are bounded by its core first."""
STRANGE_HOSTS_MAX = 1_024
"""Strange hosts whose rate is remembered; whoever has more addresses than that meets the rate of all strangers."""


class TokenBucket:
    """``rate`` per second on average, ``burst`` at once. Integers: micro-tokens."""

    def __init__(self, rate: int, burst: int) -> None:
        assert rate > 0
        assert burst > 0
        self._rate = rate
        self._cap = burst * 1_000_000
        self._level = self._cap
        self._at_us: int | None = None

    def take(self, now_us: int) -> bool:
        """Take one, if there is one. A clock that goes back adds nothing."""
        if self._at_us is not None and now_us > self._at_us:
            self._level = min(self._cap, self._level + (now_us - self._at_us) * self._rate)
        self._at_us = now_us if self._at_us is None else max(now_us, self._at_us)
        if self._level < 1_000_000:
            return False
        self._level -= 1_000_000
        return True


class HandshakeGate:
    """How many handshakes may begin. Hosts that were peers before have their own rate, ``PEERS_FACTOR`` times the strangers'.

    A handshake costs about 6 ms of CPU, so a stranger who floods costs at most ``rate/2`` × 6 ms per second. One strange
    host (or IPv6 network) gets a sixteenth of the rate, so that it cannot fill the places for strangers alone.
    """

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._peers = TokenBucket(rate * PEERS_FACTOR, rate * PEERS_FACTOR)
        self._strangers = TokenBucket(max(1, rate // 2), max(1, rate // 2))
        self._hosts: OrderedDict[str, TokenBucket] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    def knows(self, host: str) -> bool:
        """Whether ``host`` was a peer's."""
        return host in self._known

    def admit(self, host: str, now_us: int) -> bool:
        """Whether a handshake from ``host`` may begin now."""
        if host in self._known:
            return self._peers.take(now_us)
        return self._host(host).take(now_us) and self._strangers.take(now_us)

    def remember(self, host: str) -> None:
        """``host`` proved to be a peer's. The oldest is forgotten beyond ``KNOWN_HOSTS_MAX``."""
        self._known[host] = None
        self._known.move_to_end(host)
        while len(self._known) > KNOWN_HOSTS_MAX:
            self._known.popitem(last=False)

    def _host(self, host: str) -> TokenBucket:
        network = network_of(host)
        bucket = self._hosts.setdefault(network, TokenBucket(max(1, self._rate // 16), max(2, self._rate // 8)))
        self._hosts.move_to_end(network)
        while len(self._hosts) > STRANGE_HOSTS_MAX:
            self._hosts.popitem(last=False)
        return bucket


def network_of(host: str) -> str:
    """Whom an address stands for: itself, or for IPv6 its /64, of which one machine has all addresses."""
    if ":" not in host or "." in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host
