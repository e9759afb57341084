"""A network on virtual time for cores that return effects: seeded, deterministic, generic over the core.

A *host* is a machine: an address, a clock that may sleep, and the port object (``SimPort``) that feeds one core. The
network connects hosts, carries messages on two lanes and breaks things on request:

* ``datagram``: delay, jitter (hence reordering), loss, duplication, per *directed* pair.
* ``stream``: reliable and in order per direction while the connection lives; a lost segment costs retransmissions with
  doubling time-outs, as in QUIC or TCP. A blackholed direction holds stream data back until it heals or the connection dies.
* connections: a dial needs both directions; they die by close, by crash of a host (noticed by nobody: UDP) and by idle
  time-out when one direction stays dead.
* hosts: crash, restart, suspend/resume (the monotonic clock stands still and a clock gap is reported), stall (the loop
  hangs, everything arrives afterwards), clock jumps (``now_us`` leaps ahead although the host ran on).

Every delivery and every effect goes into a running hash: two runs of a seed must agree on it. ``happened`` counts what
the faults really did to messages and hosts, so that a mix of faults can prove what it contained.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from tests.simulation.network_parts import Connection, Host, Shape, SimPort, Traffic

IDLE_US = 45_000_000
CONNECT_US = 3_000_000
SEGMENT_BYTES = 1_150
STREAM_PTO_US = 50_000
SLOW_US = 10_000
"""A message that takes longer than this counts as delayed."""


class SimNetwork:
    """Hosts, their connections, and one queue of events in virtual microseconds."""

    def __init__(self, seed: int, size_of: Callable[[Any], int] = lambda _: 0) -> None:
        self.random = Random(seed)
        self.now_us = 1_000_000
        self.default = Shape()
        self.hosts: dict[str, Host] = {}
        self.traffic: dict[str, Traffic] = {}
        self.events = 0
        self.happened: Counter[str] = Counter()
        self.after_event: Callable[[str], None] | None = None
        self._by_address: dict[str, str] = {}
        self._shapes: dict[tuple[str, str], Shape] = {}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._serial = 0
        self.size_of = size_of
        self._hash = hashlib.blake2b(digest_size=16)

    # -- building ---------------------------------------------------------------------------------------------------

    def add_host(self, name: str, address: str) -> Host:
        """A machine without a process yet."""
        host = self.hosts[name] = Host(name, address)
        self.traffic[name] = Traffic()
        self._by_address[address] = name
        return host

    def start(self, name: str, port: SimPort) -> None:
        """A process on the machine; give it a look at its first deadline with ``arm``."""
        host = self.hosts[name]
        host.port, host.up = port, True
        host.life += 1
        host.suspended, host.frozen_until_us, host.frozen_since_us = False, 0, 0
        self.happened["restart"] += host.life > 1
        self.arm(name)

    def shape(self, source: str, target: str) -> Shape:
        """The shape of a directed pair, for changing."""
        key = (source, target)
        if key not in self._shapes:
            default = self.default
            self._shapes[key] = Shape(
                default.delay_us,
                default.jitter_us,
                default.loss_milli,
                default.duplicate_milli,
                default.blocked,
                default.datagrams_blocked,
            )
        return self._shapes[key]

    def at(self, at_us: int, action: Callable[[], None]) -> None:
        """Do something at a virtual time."""
        self._order += 1
        heapq.heappush(self._queue, (max(at_us, self.now_us), self._order, action))

    # -- faults -----------------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        """Power off: no goodbye, nobody is told."""
        self.happened["crash"] += 1
        self._end(name)

    def _end(self, name: str) -> None:
        host = self.hosts[name]
        host.up = False
        host.port = None
        host.life += 1
        for peer in list(host.links):
            connection = host.links.pop(peer)
            connection.known_to.discard(name)

    def exit(self, name: str) -> None:
        """The process ends properly: its connections are closed and the peers notice."""
        for peer in list(self.hosts[name].links):
            self.close(name, peer)
        self.happened["goodbye"] += 1
        self._end(name)

    def stall(self, name: str, for_us: int) -> None:
        """The loop hangs; timers and messages wait and then come all at once."""
        host = self.hosts[name]
        if host.frozen_until_us <= self.now_us:
            host.frozen_since_us = self.now_us
        host.frozen_until_us = max(host.frozen_until_us, self.now_us + for_us)
        self.at(host.frozen_until_us, lambda: self.arm(name))

    def suspend(self, name: str, for_us: int) -> None:
        """Lid closed: monotonic time stands still, packets are lost, a clock gap is reported at resume."""
        host = self.hosts[name]
        if host.suspended or not host.up:
            return
        life, host.suspended = host.life, True

        def resume() -> None:
            if host.life == life and host.port is not None:
                host.suspended = False
                host.asleep_us += for_us
                self.happened["suspend"] += 1
                host.port.on_clock_gap(for_us, self.local(name))
                self.arm(name)

        self.at(self.now_us + for_us, resume)

    def jump(self, name: str, by_us: int) -> None:
        """The host's monotonic clock leaps ahead although the host ran on (a hypervisor steps a guest's clock)."""
        host = self.hosts[name]
        if host.port is not None and not host.suspended:
            host.asleep_us -= by_us
            self.happened["clock jump"] += 1
            self.arm(name)

    def is_away(self, name: str) -> bool:
        """Sleeps or stalls: nothing reaches its process now."""
        host = self.hosts[name]
        return host.suspended or host.frozen_until_us > self.now_us

    def partition(self, sources: list[str], targets: list[str], *, blocked: bool = True) -> None:
        """Cut (or heal) every directed pair from ``sources`` to ``targets``."""
        for source in sources:
            for target in targets:
                if source != target:
                    self.shape(source, target).blocked = blocked

    # -- what ports call --------------------------------------------------------------------------------------------

    def local(self, name: str) -> int:
        """The host's monotonic clock."""
        return self.now_us - self.hosts[name].asleep_us

    def dial(self, source: str, address: str) -> None:
        """Handshake: needs both directions and a live listener; nothing happens otherwise."""
        target = self._by_address.get(address)
        if target is None or target == source or self.hosts[source].links.get(target) is not None:
            return
        there, back = self.shape(source, target), self.shape(target, source)
        life = self.hosts[source].life
        tries = self._stream_delay(there, 3_000) + self._stream_delay(back, 3_000)
        if tries < CONNECT_US:
            self.at(self.now_us + tries, lambda: self._connect(source, target, life))

    def send(self, source: str, peer: str, message: Any, lane: str) -> None:
        """One message over the connection, if there is one."""
        host = self.hosts[source]
        connection = host.links.get(peer)
        size = self.size_of(message)
        traffic = self.traffic[source]
        if lane == "datagram":
            traffic.datagrams += 1
            traffic.datagram_bytes += size
        else:
            traffic.stream_messages += 1
            traffic.stream_bytes += size
        if connection is None:
            return
        shape = self._shapes.get((source, peer), self.default)
        if lane == "datagram":
            if shape.blocked or shape.datagrams_blocked:
                self._held_back(source, peer, shape)
                return
            if self._chance(shape.loss_milli):
                self.happened["loss"] += 1
                return
            copies = 2 if self._chance(shape.duplicate_milli) else 1
            self.happened["duplication"] += copies - 1
            serial = traffic.datagrams
            for _ in range(copies):
                delay = shape.delay_us + (self.random.randint(0, shape.jitter_us) if shape.jitter_us else 0)
                self.happened["delay"] += delay > SLOW_US
                self.at(self.now_us + delay, lambda: self._arrive(connection, source, peer, message, lane, serial))
        else:
            self._send_stream(connection, source, peer, message, size)

    def close(self, source: str, peer: str) -> None:
        """Close: here at once, there after a packet's time or, if that is lost, at the idle time-out."""
        connection = self.hosts[source].links.pop(peer, None)
        if connection is None:
            return
        connection.known_to.discard(source)
        port = self.hosts[source].port
        if port is not None:
            port.on_disconnected(peer, self.local(source))
            self.arm(source)
        shape = self.shape(source, peer)
        lost = shape.blocked or self._chance(shape.loss_milli)
        delay = IDLE_US if lost else shape.delay_us
        self.at(self.now_us + delay, lambda: self._lose(connection, peer, source))

    def arm(self, name: str) -> None:
        """Look at the port's deadline again."""
        host = self.hosts[name]
        if host.port is None or host.suspended:
            return
        deadline = host.port.next_deadline()
        if deadline is None:
            return
        at_us = max(deadline + host.asleep_us, host.frozen_until_us, self.now_us)
        if host.timer_at_us > self.now_us and host.timer_at_us <= at_us:
            return
        host.timer_at_us = at_us
        self.at(at_us, lambda: self._tick(name, at_us))

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, until_us: int) -> None:
        """Process events up to a virtual time."""
        while self._queue and self._queue[0][0] <= until_us:
            self.now_us, _, action = heapq.heappop(self._queue)
            action()
        self.now_us = max(self.now_us, until_us)

    def run_for(self, for_us: int) -> None:
        """Process events for a virtual duration."""
        self.run(self.now_us + for_us)

    def note(self, text: str) -> None:
        """Add to the event hash."""
        self._hash.update(f"{self.now_us} {text}\n".encode())

    @property
    def digest(self) -> str:
        """Hash of everything that happened."""
        return self._hash.hexdigest()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _tick(self, name: str, at_us: int) -> None:
        host = self.hosts[name]
        if host.port is None or host.suspended or host.timer_at_us != at_us:
            return
        if host.frozen_until_us > self.now_us:
            host.timer_at_us = -1
            return
        host.timer_at_us = -1
        deadline = host.port.next_deadline()
        if deadline is not None and deadline <= self.local(name):
            host.port.on_timer(self.local(name))
            self._done(name)
        self.arm(name)

    def _done(self, name: str) -> None:
        self.events += 1
        if self.after_event is not None:
            self.after_event(name)

    def _connect(self, source: str, target: str, life: int) -> None:
        dialler, listener = self.hosts[source], self.hosts[target]
        if dialler.life != life or dialler.port is None or listener.port is None or dialler.links.get(target):
            return
        if dialler.suspended or listener.suspended:
            return
        stale = listener.links.pop(source, None)
        self._serial += 1
        connection = Connection(self._serial, (source, target), self.now_us, {source, target})
        connection.arrived_us = {source: self.now_us, target: self.now_us}
        dialler.links[target] = connection
        listener.links[source] = connection
        if stale is not None:
            listener.port.on_disconnected(source, self.local(target))
        self.note(f"connect {source} {target}")
        dialler.port.on_connected(target, listener.address, self.local(source))
        self._done(source)
        self.arm(source)
        if listener.port is not None:
            listener.port.on_connected(source, dialler.address, self.local(target))
            self._done(target)
            self.arm(target)
        self.at(self.now_us + IDLE_US, lambda: self._watch(connection))

    def _watch(self, connection: Connection) -> None:
        """Idle time-out of either end (keepalives are what the transport sends on a healthy path)."""
        if not connection.known_to:
            return
        for end, peer in (connection.ends, connection.ends[::-1]):
            healthy = not self.shape(peer, end).blocked and self.hosts[peer].links.get(end) is connection
            healthy = healthy and self.hosts[peer].up and not self.hosts[peer].suspended
            if healthy:
                connection.arrived_us[end] = self.now_us
            elif self.now_us - connection.arrived_us[end] >= IDLE_US:
                self._lose(connection, end, peer)
        self.at(self.now_us + IDLE_US // 3, lambda: self._watch(connection))

    def _lose(self, connection: Connection, end: str, peer: str) -> None:
        host = self.hosts[end]
        if host.suspended:
            self.at(self.now_us + 1_000_000, lambda: self._lose(connection, end, peer))
            return
        connection.known_to.discard(end)
        if host.links.get(peer) is connection:
            del host.links[peer]
            if host.port is not None:
                self.note(f"lost {end} {peer}")
                host.port.on_disconnected(peer, self.local(end))
                self._done(end)
                self.arm(end)

    def _send_stream(self, connection: Connection, source: str, peer: str, message: Any, size: int) -> None:
        shape = self._shapes.get((source, peer), self.default)
        if shape.blocked:
            self._held_back(source, peer, shape)
            # The transport keeps retransmitting: try again while the connection lives.
            if connection.serial and peer in self.hosts[source].links:
                self.at(
                    self.now_us + 1_000_000,
                    lambda: (
                        self._send_stream(connection, source, peer, message, size)
                        if self.hosts[source].links.get(peer) is connection
                        else None
                    ),
                )
            return
        delay_us, life = self._stream_delay(shape, size), self.hosts[source].life
        retransmitted = delay_us > shape.delay_us + shape.jitter_us
        self.happened["loss"] += retransmitted
        self.happened["delay"] += delay_us > SLOW_US
        at_us = max(self.now_us + delay_us, connection.free_at_us.get(source, 0))
        connection.free_at_us[source] = at_us

        def deliver() -> None:
            # Nobody retransmits for a host that crashed meanwhile.
            if not retransmitted or self.hosts[source].life == life:
                self._arrive(connection, source, peer, message, "stream")

        self.at(at_us, deliver)

    def _stream_delay(self, shape: Shape, size: int) -> int:
        if shape.blocked:
            return 10 * CONNECT_US
        delay = shape.delay_us + (self.random.randint(0, shape.jitter_us) if shape.jitter_us else 0)
        if shape.loss_milli:
            for _ in range(1 + size // SEGMENT_BYTES):
                timeout = 2 * shape.delay_us + STREAM_PTO_US
                while self._chance(shape.loss_milli):
                    delay += timeout
                    timeout *= 2
        return delay

    def _held_back(self, source: str, peer: str, shape: Shape) -> None:
        reverse = self._shapes.get((peer, source), self.default)
        self.happened["asymmetric partition" if shape.blocked and not reverse.blocked else "partition"] += 1

    def _arrive(
        self, connection: Connection, source: str, peer: str, message: Any, lane: str, serial: int | None = None
    ) -> None:
        host = self.hosts[peer]
        if host.port is None or host.links.get(source) is not connection:
            return
        if host.suspended:
            return
        if host.frozen_until_us > self.now_us:
            self.happened["stall"] += 1
            self.at(host.frozen_until_us, lambda: self._arrive(connection, source, peer, message, lane, serial))
            return
        connection.arrived_us[peer] = self.now_us
        if serial is not None:
            self.happened["reordering"] += serial < connection.latest.get(source, 0)
            connection.latest[source] = max(serial, connection.latest.get(source, 0))
        self.note(f"{lane} {source} {peer} {message.type if hasattr(message, 'type') else message!r}")
        host.port.on_message(source, message, lane, self.local(peer))
        self._done(peer)
        self.arm(peer)

    def _chance(self, milli: int) -> bool:
        return milli > 0 and self.random.randrange(1000) < milli
