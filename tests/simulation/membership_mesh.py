"""A mesh of real membership cores on the simulated network, and what must hold after every event."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from config.settings import LinkSettings, MembershipSettings
from protocol.codec import MAX_DATAGRAM_BYTES, decode, encode
from protocol.ids import NodeId, node_id_of
from protocol.membership import (
    CloseConnection,
    Conflict,
    Dial,
    MemberChanged,
    Membership,
    Rejected,
    Send,
)
from protocol.membership.effects import Effect
from protocol.membership.signing import open_row
from protocol.messages import Ack, GossipPush, Ping
from protocol.rows import NodeRow, SignedRow
from tests.simulation.network import SimNetwork

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
OPENED_MAX = 20_000
"""Rows that a mesh shares; the oldest goes first."""


@dataclass(frozen=True)
class Identity:
    """A key pair that costs nothing: the signature is a keyed hash, the 'public key' its name."""

    public_key: bytes

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.public_key)

    def sign(self, payload: bytes) -> bytes:
        return hashlib.blake2b(payload, key=self.public_key, digest_size=64).digest()


def verify(public_key: bytes, signature: bytes, payload: bytes) -> bool:
    return hashlib.blake2b(payload, key=public_key, digest_size=64).digest() == signature


def identity(number: int) -> Identity:
    return Identity(hashlib.sha256(b"node %d" % number).digest())


def row_of(who: Identity, name: str, addresses: tuple[str, ...], **fields: Any) -> NodeRow:
    return NodeRow(
        node_id=who.node_id,
        public_key=who.public_key,
        boot_counter=0,
        seq=0,
        instance="0" * 32,
        name=name,
        version="0.1.0",
        addresses=addresses,
        **fields,
    )


@dataclass
class Change:
    at_us: int
    observer: NodeId
    change: MemberChanged


class MembershipPort:
    """Drives one core in the simulated network: the effects it carries out are exactly those of the real driver."""

    def __init__(self, mesh: "Mesh", number: int, seeds: tuple[str, ...]) -> None:
        self.mesh = mesh
        self.number = number
        self.who = identity(number)
        self.name = self.who.node_id
        self.network = mesh.network
        self.rejected: Counter[str] = Counter()
        self.conflicts: list[Conflict] = []
        self.dials: list[tuple[int, Dial]] = []
        mesh.boots[number] += 1
        boot = mesh.boots[number]
        self.core = Membership(
            node_id=self.who.node_id,
            public_key=self.who.public_key,
            sign=self._sign,
            verify=verify,
            settings=mesh.settings,
            link_settings=mesh.link_settings,
            random=Random(f"{mesh.seed} {number} {boot}"),
            boot_counter=boot,
            instance=f"{mesh.network.random.getrandbits(128):032x}",
            is_admitted=mesh.admitted.__contains__,
            now_us=self.now_us,
            seeds=seeds,
        )
        if mesh.shared_rows:
            self.core._ground.open_row = mesh.open_row

    def _sign(self, payload: bytes) -> bytes:
        signature = self.who.sign(payload)
        if not payload.startswith(b"stagemesh refutation"):
            self.mesh.history[self.name].append(SignedRow(payload=payload, signature=signature))
        return signature

    @property
    def now_us(self) -> int:
        return self.network.local(self.name)

    def publish(self, **fields: Any) -> None:
        row = row_of(self.who, f"n{self.number}", (self.mesh.address(self.number),), **fields)
        self.carry_out(self.core.publish(row, self.now_us))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(peer, message, lane):
                    self._send(peer, message, lane)
                case Dial(_, address, purpose):
                    self.dials.append((self.network.now_us, effect))
                    if purpose != "explore":
                        self.network.dial(self.name, address)
                case CloseConnection(peer, _):
                    self.network.close(self.name, peer)
                case MemberChanged(node_id, old, new, reason):
                    self.network.note(f"changed {self.name} {node_id} {old} {new} {reason}")
                    self.mesh.changes.append(Change(self.network.now_us, self.name, effect))
                case Rejected(_, reason):
                    self.rejected[reason] += 1
                case Conflict():
                    self.conflicts.append(effect)
        self.network.arm(self.name)

    def _send(self, peer: NodeId, message: Any, lane: str) -> None:
        if self.mesh.codec:
            raw = encode(message)
            if lane == "datagram":
                assert len(raw) <= MAX_DATAGRAM_BYTES, (message.type, len(raw))
            self.network.send(self.name, peer, raw, lane)
        else:
            self.network.send(self.name, peer, message, lane)

    def on_connected(self, peer: str, address: str, now_us: int) -> None:
        self.carry_out(self.core.on_connected(NodeId(peer), address, now_us))

    def on_disconnected(self, peer: str, now_us: int) -> None:
        self.carry_out(self.core.on_disconnected(NodeId(peer), now_us))

    def on_message(self, sender: str, message: Any, lane: str, now_us: int) -> None:
        decoded: Any = decode(message) if self.mesh.codec else message
        if self.mesh.codec and self.mesh.shared_rows:
            decoded = self.mesh.shared(decoded)
        if decoded is not None:
            self.carry_out(self.core.on_message(NodeId(sender), decoded, now_us, lane=lane))  # type: ignore[arg-type]

    def on_timer(self, now_us: int) -> None:
        self.carry_out(self.core.on_timer(now_us))

    def on_clock_gap(self, gap_us: int, now_us: int) -> None:
        self.carry_out(self.core.on_clock_gap(gap_us, now_us))

    def next_deadline(self) -> int | None:
        return self.core.next_deadline()


class Mesh:
    """Nodes 0…n−1, all admitted, node k dials the seeds."""

    def __init__(
        self,
        nodes: int,
        seed: int = 0,
        *,
        codec: bool = True,
        shared_rows: bool = False,
        settings: MembershipSettings | None = None,
        seeds: int = 1,
    ) -> None:
        """``codec=False`` hands messages over as objects. ``shared_rows``: a row is opened once, not once per node."""
        self.seed = seed
        self.codec = codec
        self.shared_rows = shared_rows or not codec
        self.settings = settings or MembershipSettings()
        self.link_settings = LinkSettings()
        self.network = SimNetwork(seed, len if codec else (lambda _: 100))
        self.boots: Counter[int] = Counter()
        self.changes: list[Change] = []
        self.history: defaultdict[NodeId, list[SignedRow]] = defaultdict(list)
        self.numbers = list(range(nodes))
        self.ids = [identity(number).node_id for number in self.numbers]
        self.admitted: set[NodeId] = set(self.ids)
        self.ports: dict[int, MembershipPort] = {}
        self.opened: dict[bytes, tuple[SignedRow, NodeRow]] = {}
        self.crashed_us: dict[NodeId, int] = {}
        self.seeds = tuple(self.address(number) for number in range(seeds))
        for number in self.numbers:
            self.network.add_host(self.ids[number], self.address(number))

    def open_row(self, signed: SignedRow) -> NodeRow:
        """Large meshes share the decoded rows, which are frozen: a thousand tables of a thousand rows fit the memory."""
        known = self.opened.get(signed.signature)
        if known is not None and known[0].payload == signed.payload:
            return known[1]
        row = open_row(signed, verify)
        self.opened[signed.signature] = signed, row
        if len(self.opened) > OPENED_MAX:
            del self.opened[next(iter(self.opened))]
        return row

    def shared(self, message: Any) -> Any:
        """The decoded message, with the rows that the mesh holds already in the place of equal ones."""
        rows = message.gossip.rows if isinstance(message, GossipPush | Ping | Ack) else ()
        if not rows:
            return message
        same = tuple(known[0] if (known := self.opened.get(row.signature)) and known[0] == row else row for row in rows)
        return message.model_copy(update={"gossip": message.gossip.model_copy(update={"rows": same})})

    @staticmethod
    def address(number: int) -> str:
        return f"10.0.{number // 250}.{number % 250 + 1}:7946"

    def start(self, number: int, *, seeds: tuple[str, ...] | None = None) -> MembershipPort:
        chosen = self.seeds if seeds is None else seeds
        port = MembershipPort(self, number, tuple(seed for seed in chosen if seed != self.address(number)))
        self.ports[number] = port
        self.network.start(port.name, port)
        port.publish()
        return port

    def start_all(self) -> "Mesh":
        for number in self.numbers:
            self.start(number)
        return self

    def crash(self, number: int) -> None:
        self.network.crash(self.ids[number])
        del self.ports[number]
        self.crashed_us[self.ids[number]] = self.network.now_us

    def exit(self, number: int) -> None:
        """The process ends properly."""
        self.network.exit(self.ids[number])
        del self.ports[number]
        self.crashed_us[self.ids[number]] = self.network.now_us

    def ran_lately(self, node_id: NodeId, observer: NodeId) -> bool:
        """Whether its process runs, or ran so shortly ago that its last messages may still be under way.

        They also wait in the queue of an observer whose loop hangs.
        """
        if any(port.who.node_id == node_id for port in self.ports.values()):
            return True
        host, since_us = self.network.hosts[observer], self.network.now_us
        if host.frozen_until_us > since_us - 2 * SECOND:
            since_us = min(since_us, host.frozen_since_us)
        return since_us - self.crashed_us.get(node_id, 0) < 2 * SECOND

    def run(self, seconds: float) -> None:
        self.network.run_for(int(seconds * SECOND))

    def run_until(self, condition: Callable[[], bool], seconds: float, step: float = 0.1) -> float | None:
        """Seconds until the condition held (checked every ``step``), or ``None``."""
        start = self.network.now_us
        while self.network.now_us - start < seconds * SECOND:
            if condition():
                return (self.network.now_us - start) / SECOND
            self.network.run_for(int(step * SECOND))
        return (self.network.now_us - start) / SECOND if condition() else None

    def state(self, observer: int, subject: int) -> str | None:
        member = self.ports[observer].core.members().get(self.ids[subject])
        return None if member is None else member.state

    def alive_set(self, observer: int) -> set[NodeId]:
        port = self.ports[observer]
        return {port.name, *(node_id for node_id, state, _ in port.core.standings() if state == "alive")}

    def converged(self) -> bool:
        """Every running node sees exactly the running nodes alive, and everybody's latest row."""
        if not self.agreed():
            return False
        latest = {port.name: port.core.own_row for port in self.ports.values()}
        return all(
            (row := latest.get(node_id)) is None or version == (row.boot_counter, row.seq)
            for port in self.ports.values()
            for node_id, _, version in port.core.standings()
        )

    def agreed(self) -> bool:
        """Every running node sees exactly the running nodes alive."""
        running = {self.ids[number] for number in self.ports}
        return all(self.alive_set(number) == running for number in self.ports)

    def deaths(self, since_us: int = 0) -> list[Change]:
        return [change for change in self.changes if change.change.new == "dead" and change.at_us >= since_us]
