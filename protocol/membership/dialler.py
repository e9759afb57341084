"""Rejoining: for ever, to seeds and to every member that is not connected, never all at the same moment.

Every target has its own back-off: the first dial after a uniform wait (up to ``rejoin_first_max`` after a loss, so that an
outage is not followed by everybody dialling at once), then exponential with jitter up to 20 s, or ``rejoin_max`` when many are lost. A dial is over
when the shell says so or when the next one is due; no state can stay "connecting". The dead are dialled too, that is how
they come back. Between two members the smaller id dials first and the other one gives it a few seconds.

In a mesh too large for a connection between every pair a node dials random members until it has half of
``max_connections``; the other half is for those who dial it.
"""

from dataclasses import dataclass, field

from protocol.ids import NodeId
from protocol.links.link import host_of
from protocol.membership.effects import CloseConnection, Dial
from protocol.membership.ground import Ground
from protocol.membership.table import Entry

CONNECT_US = 3_000_000
"""A dial is given this long before the back-off starts to count."""
EAGER_US = 200_000
PATIENCE_US = 3_000_000
STABLE_US = 10_000_000
"""A connection that lasted this long clears the back-off."""
TOPOLOGY_US = 2_000_000
EXPLORE_US = 300_000_000
EXPLORE_ABOVE_US = 1_000
"""A settled path slower than this makes a peer's other addresses worth a try."""
ADDRESSES_KEPT = 16
FEW_LOST_US = 20_000_000
PER_LOST_US = 1_000_000
"""On average no more than about two dials a second, however many members are lost."""


@dataclass(slots=True)
class _Target:
    failures: int = 0
    turn: int = 0
    last_address: str = ""
    explored: dict[str, int] = field(default_factory=dict)


class Dialler:
    """Timers ``dial`` per member, ``seed`` per seed address, ``topology`` for large meshes."""

    def __init__(self, ground: Ground, seeds: tuple[str, ...]) -> None:
        self._ground = ground
        self._targets: dict[str, _Target] = {}
        self._seeds: dict[str, NodeId | None] = dict.fromkeys(seeds)

    def start(self, now_us: int) -> None:
        """First dials of this process."""
        for seed in self._seeds:
            self._ground.timers.set("seed", seed, now_us + self._ground.jitter(self._first_us() // 10))
        self._ground.timers.set("topology", "", now_us + self._ground.jitter(TOPOLOGY_US))

    def add_seed(self, address: str, now_us: int) -> None:
        """One more address to join by."""
        if address not in self._seeds:
            self._seeds[address] = None
            self._ground.timers.set("seed", address, now_us + self._ground.jitter(EAGER_US))

    def learnt(self, entry: Entry, now_us: int) -> None:
        """A member is known and not connected: dial it soon."""
        ground = self._ground
        if entry.node_id in ground.connections or entry.state == "left":
            return
        if not ground.everyone_connects:
            return
        wait_us = EAGER_US if ground.node_id < entry.node_id else PATIENCE_US
        at_us = now_us + wait_us // 2 + ground.jitter(wait_us)
        armed = ground.timers.deadline("dial", entry.node_id)
        if armed is None or at_us < armed:
            ground.timers.set("dial", entry.node_id, at_us)

    def connected(self, peer: NodeId, address: str, now_us: int) -> None:
        """Stop dialling it; remember where it was reached."""
        self._ground.timers.cancel("dial", peer)
        self._target(peer).last_address = address
        if address in self._seeds:
            self._seeds[address] = peer
        self._ground.timers.set("settle", peer, now_us + STABLE_US)

    def disconnected(self, peer: NodeId, now_us: int) -> None:
        """Connection lost: dial again for ever, first after a random wait."""
        ground = self._ground
        ground.timers.cancel("settle", peer)
        entry = ground.table.get(peer)
        if entry is not None and entry.state != "left" and ground.everyone_connects:
            failures = self._target(peer).failures
            wait_us = ground.jitter(self._first_us()) if failures == 0 else self._backoff_us(failures)
            ground.timers.set("dial", peer, now_us + wait_us)
        for seed, owner in self._seeds.items():
            if owner == peer:
                ground.timers.set("seed", seed, now_us + ground.jitter(self._first_us()))

    def stable(self, peer: NodeId) -> None:
        """The connection has lasted."""
        self._target(peer).failures = 0

    def failed(self, address: str, now_us: int) -> None:
        """The shell says that a dial did not work: no need to wait for its time to run out."""
        ground = self._ground
        if address in self._seeds and ground.timers.deadline("seed", address) is not None:
            ground.timers.set("seed", address, now_us + self._backoff_us(self._target(address).failures))
        for name, target in self._targets.items():
            if target.last_address == address and ground.timers.deadline("dial", name) is not None:
                ground.timers.set("dial", name, now_us + self._backoff_us(target.failures))

    def seed_due(self, seed: str, now_us: int) -> None:
        """Dial a seed unless its node is connected (by that or any other address)."""
        ground = self._ground
        target = self._target(seed)
        if not self._covered(seed):
            ground.effects.append(Dial(None, seed, "join"))
            target.failures += 1
            ground.timers.set("seed", seed, now_us + CONNECT_US + self._backoff_us(target.failures))
        else:
            target.failures = 0
            ground.timers.set("seed", seed, now_us + ground.settings.rejoin_max_us)

    def due(self, entry: Entry, now_us: int) -> None:
        """Dial a member's next address."""
        ground = self._ground
        if entry.node_id in ground.connections or entry.state == "left":
            return
        target = self._target(entry.node_id)
        addresses = self._addresses(entry, target)
        if addresses and ground.is_admitted(entry.node_id):
            address = addresses[target.turn % len(addresses)]
            target.turn += 1
            target.last_address = address
            ground.effects.append(Dial(entry.node_id, address))
        target.failures += 1
        if ground.everyone_connects or not entry.live:
            ground.timers.set("dial", entry.node_id, now_us + CONNECT_US + self._backoff_us(target.failures))

    def topology_due(self, now_us: int) -> None:
        """Large meshes: keep half the connections by dialling, close what exceeds the limit. All: look for better paths."""
        ground = self._ground
        ground.timers.set("topology", "", ground.at_beat(now_us + TOPOLOGY_US + ground.jitter(TOPOLOGY_US)))
        limit = ground.settings.max_connections
        if not ground.everyone_connects:
            for node in sorted(ground.requested - ground.connections.keys()):
                if ground.timers.deadline("dial", node) is None:
                    ground.timers.set("dial", node, now_us + ground.jitter(EAGER_US))
            missing = limit // 2 - len(ground.connections)
            if missing > 0:
                candidates = [node for node in ground.table.live_ids() if node not in ground.connections]
                for node in ground.random.sample(candidates, min(len(candidates), missing, 4)):
                    ground.timers.set("dial", node, now_us + ground.jitter(TOPOLOGY_US))
        surplus = len(ground.connections) - limit
        if surplus > 0:
            spare = [peer for peer in ground.connections if peer not in ground.requested]
            for peer in ground.random.sample(spare, min(len(spare), surplus)):
                ground.effects.append(CloseConnection(peer, "connection_limit"))
        self._explore(now_us)

    def forget(self, node_id: NodeId) -> None:
        """The node is gone for good."""
        self._targets.pop(node_id, None)
        self._ground.timers.cancel("dial", node_id)
        self._ground.timers.cancel("settle", node_id)

    def _explore(self, now_us: int) -> None:
        """A settled but slow path, and an address that was never tried or was far better once: try it beside the present one."""
        ground = self._ground
        for peer, connection in ground.connections.items():
            entry, link = ground.table.get(peer), ground.links.known(peer)
            minimum_us = None if link is None or not link.settled(now_us) else link.min_rtt_us()
            if entry is None or link is None or minimum_us is None or minimum_us <= EXPLORE_ABOVE_US:
                continue
            target = self._target(peer)
            for address in entry.row.addresses:
                if host_of(address) == host_of(connection.address):
                    continue
                best_us = link.best_of(host_of(address))
                if best_us is not None and best_us * 2 > minimum_us:
                    continue
                if now_us - target.explored.get(address, -EXPLORE_US) >= EXPLORE_US:
                    target.explored[address] = now_us
                    ground.effects.append(Dial(peer, address, "explore"))
                    return

    def _covered(self, seed: str) -> bool:
        owner = self._seeds.get(seed)
        if owner is not None and owner in self._ground.connections:
            return True
        for peer in self._ground.connections:
            entry = self._ground.table.get(peer)
            if entry is not None and seed in entry.row.addresses:
                self._seeds[seed] = peer
                return True
        # A seed of a large mesh is only a way in: one connection anywhere is enough.
        return bool(self._ground.connections) and not self._ground.everyone_connects

    def _addresses(self, entry: Entry, target: _Target) -> list[str]:
        addresses = list(entry.row.addresses)
        if target.last_address and target.last_address not in addresses:
            addresses.append(target.last_address)
        return addresses[:ADDRESSES_KEPT]

    def _target(self, name: str) -> _Target:
        return self._targets.setdefault(name, _Target())

    def _first_us(self) -> int:
        return self._ground.settings.rejoin_first_max_us

    def _backoff_us(self, failures: int) -> int:
        """A few lost peers are dialled every 20 s at least, so that a healed cut is whole within 30 s; many, more rarely."""
        ground, settings = self._ground, self._ground.settings
        lost = sum(1 for entry in ground.table if entry.node_id not in ground.connections)
        ceiling_us = min(settings.rejoin_max_us, max(FEW_LOST_US, lost * PER_LOST_US))
        top_us = min(ceiling_us, settings.rejoin_min_us << min(failures, 16))
        return settings.rejoin_min_us + ground.jitter(top_us - settings.rejoin_min_us)
