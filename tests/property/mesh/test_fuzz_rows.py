"""Genuinely signed rows with hostile content against the membership core: admitted peers may lie about anything.

Every number at its bounds, every list at its longest, names and addresses that mean nothing, versions that leave no room
for another. The core stays whole, its messages stay sendable, and what it holds stays bounded by its members.
"""

import random
from collections import Counter

import pytest

from protocol.codec import MAX_DATAGRAM_BYTES, decode, encode, encode_row
from protocol.membership import Send
from protocol.membership.effects import Rejected
from protocol.messages import Ack, DigestRequest, Gossip, GossipPush, Ping, RowVersion
from protocol.orders import MAX_ORDERS, OperatorOrder
from protocol.rows import Coordinate, DeviceFact, LinkFact, ModelFact, ServedModel, SignedRow, StageFact
from protocol.wire import MAX_INTEGER, Epoch
from tests.bench.rows import append
from tests.property.growth import growth
from tests.property.mesh.test_membership import core_of
from tests.simulation.membership_mesh import identity, row_of

SECOND = 1_000_000
PAYLOAD_MAX = 262_144
ADMITTED, PEERS = 6, 5
NUMBERS = (0, 1, 2, 1_000, 2**31, 2**32, MAX_INTEGER - 1, MAX_INTEGER)
COORDINATES = (-MAX_INTEGER, -1, 0, 1, 20_000, MAX_INTEGER)
ADDRESSES = (
    "a:1",
    "[::1]:7946",
    ":::",
    "0.0.0.0:0",
    "255.255.255.255:99999",
    "x" * 128,
    "\x00:1",
    "10.0.0.9:7946",
    "é:1",
)
EFFECTS_MAX = 2_000
"""Of one message or one turn of the timers, in a mesh of six."""
GROWTH_BYTES = 10_000_000
"""Five rows at their largest are 2 MB each; one leaked row in ten would be 100."""


def extreme_row(die: random.Random) -> SignedRow:
    """Signed by its owner, who is one of eight, two of them strangers and one of them the core itself."""
    who = identity(die.randrange(8))
    row = row_of(who, die.choice(["x", "n" * 64, "\x00", "é"]), tuple(die.choices(ADDRESSES, k=die.randrange(17))))
    changes = {
        "boot_counter": die.choice(NUMBERS),
        "seq": die.choice(NUMBERS),
        "incarnation": die.choice(NUMBERS),
        "max_term": die.choice(NUMBERS),
        "instance": die.choice("ab0") * 32,
        "status": die.choice(["running", "running", "draining", "leaving", "left"]),
        "detected_memory_bytes": die.choice(NUMBERS),
    }
    for field, fill in die.sample(list(LONG_LISTS.items()), die.randrange(4)):
        changes[field] = fill(die)
    payload = encode_row(row.model_copy(update=changes))
    if len(payload) > PAYLOAD_MAX:
        return extreme_row(die)
    return SignedRow(payload=payload, signature=who.sign(payload))


def links(die: random.Random) -> tuple[LinkFact, ...]:
    targets = [identity(die.randrange(8)).node_id if die.random() < 0.2 else f"t{n}" for n in range(1_024)]
    rtt_us, samples, rate = die.choice(NUMBERS), die.choice(NUMBERS), die.choice(NUMBERS)
    return tuple(LinkFact(target=to, min_rtt_us=rtt_us, samples=samples, send_bytes_per_s=rate) for to in targets)


def orders(die: random.Random) -> tuple[OperatorOrder, ...]:
    kinds, version = ("exclude", "pin_stage0", "lock", "policy", "k" * 64), die.choice(NUMBERS)
    return tuple(
        OperatorOrder(kind=die.choice(kinds), subject=f"s{n}", value="9" * 256, version=version, author="a")
        for n in range(MAX_ORDERS)
    )


def coordinate(die: random.Random) -> Coordinate:
    x, y, z = (die.choice(COORDINATES) for _ in range(3))
    return Coordinate(x_us=x, y_us=y, z_us=z, height_us=die.choice(NUMBERS), error_milli=die.choice([0, 1, 1_500]))


def stages(die: random.Random) -> tuple[StageFact, ...]:
    epoch = Epoch(term=die.choice(NUMBERS), node_id="z" * 64, instance="f" * 32)
    return tuple(
        StageFact(slot=f"s{n}", state="serving", promised=epoch, active=epoch, layer_end=die.choice(NUMBERS))
        for n in range(16)
    )


LONG_LISTS = {
    "links": links,
    "orders": orders,
    "coordinate": coordinate,
    "stages": stages,
    "devices": lambda die: (DeviceFact(name="d" * 64, kind="other", memory_bytes=die.choice(NUMBERS)),) * 64,
    "models": lambda die: (ModelFact(digest="0" * 64, cached_bytes=die.choice(NUMBERS)),) * 64,
    "serves": lambda die: (
        (ServedModel(slot="s", source="x" * 1_024, digest="0" * 64, version=die.choice(NUMBERS)),) * 16
    ),
    "degraded": lambda _: ("d" * 64,) * 16,
}


class Besieged:
    """The core of node 0 among five members that lie."""

    def __init__(self, die: random.Random) -> None:
        self.die, self.now_us = die, 1_000_000
        self.core = core_of(0, self.now_us, ADMITTED)
        self.versions: dict[str, tuple[int, int]] = {}
        self.outcomes: Counter[str] = Counter()
        for number in range(1, PEERS + 1):
            self.core.on_connected(identity(number).node_id, f"10.0.0.{number + 1}:1", self.now_us)

    def case(self) -> None:
        """One row from one peer, in one of the messages that carry rows or speak of them; sometimes time passes."""
        die, sender = self.die, identity(self.die.randrange(1, PEERS + 1)).node_id
        gossip = Gossip(rows=(extreme_row(die),))
        line = RowVersion(
            node_id=identity(die.randrange(8)).node_id, boot_counter=die.choice(NUMBERS), seq=die.choice(NUMBERS)
        )
        message = die.choice([
            GossipPush(gossip=gossip), Ping(seq=die.choice(NUMBERS), gossip=gossip),
            Ack(seq=die.choice(NUMBERS), health=die.choice(NUMBERS), held_us=die.choice(NUMBERS), gossip=gossip),
            GossipPush(gossip=gossip), DigestRequest(rows=(line,), admissions=(line,)),
        ])  # fmt: skip
        assert decode(encode(message)) == message, "it passes the codec: it is valid but for its meaning"
        self.check(self.core.on_message(sender, message, self.now_us, lane=die.choice(["stream", "datagram"])))
        if die.random() < 0.05:
            self.check(self.core.on_disconnected(sender, self.now_us))
            self.check(self.core.on_connected(sender, die.choice(ADDRESSES), self.now_us))
        if die.random() < 0.2:
            self.pass_time(die.choice([1, 50_000, SECOND, 5 * SECOND]))

    def pass_time(self, wait_us: int) -> None:
        end_us, turns = self.now_us + wait_us, 0
        while (due_us := self.core.next_deadline()) is not None and due_us <= end_us:
            self.now_us = max(self.now_us, due_us)
            self.check(self.core.on_timer(self.now_us))
            turns += 1
            assert turns < 5_000, "the timers come to rest"
        self.now_us = end_us

    def check(self, effects: list[object]) -> None:
        """After every input: whole, bounded, versions never go back, and everything that is sent can be sent."""
        self.core.validate()
        assert len(effects) <= EFFECTS_MAX
        for effect in effects:
            self.outcomes[effect.reason if isinstance(effect, Rejected) else type(effect).__name__] += 1
            if isinstance(effect, Send):
                size = len(encode(effect.message))
                assert effect.lane == "stream" or size <= MAX_DATAGRAM_BYTES
        known = {identity(number).node_id for number in range(1, ADMITTED)}
        for node_id, _, version in self.core.standings():
            assert node_id in known, "strangers' rows are not stored, whoever signed them"
            assert version >= self.versions.get(node_id, (0, 0))
            self.versions[node_id] = version

    def look(self) -> None:
        """What others ask of the core has an answer, whatever coordinates and links the rows show."""
        assert len(self.core.members(self.now_us)) <= ADMITTED
        for source in range(ADMITTED):
            for target in range(ADMITTED):
                rtt_us = self.core.estimate_rtt_us(identity(source).node_id, identity(target).node_id)
                assert rtt_us is None or rtt_us >= 0
        assert len(self.core.link_facts(self.now_us)) <= PEERS


def besiege(cases: int, seed: int) -> Counter[str]:
    besieged = Besieged(random.Random(seed))
    for number in range(cases):
        besieged.case()
        if number % 20 == 0:
            besieged.look()
    return besieged.outcomes


def test_signed_rows_with_extreme_content_leave_the_core_whole() -> None:
    outcomes = sum((besiege(60, seed) for seed in range(4)), Counter[str]())
    assert outcomes["row_unadmitted"] > 5
    assert outcomes["MemberChanged"] > 10


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_many_signed_rows_with_extreme_content_leave_no_growth() -> None:
    """The same core is besieged on: growth is measured over the second half, with every table at its bound."""
    besieged, cases = Besieged(random.Random(1)), 10_000
    with growth() as grown:
        for _ in range(2):
            for _ in range(cases // 2):
                besieged.case()
            besieged.look()
            grown.mark()
    append("fuzz", "signed_rows", cases=cases, outcomes=dict(besieged.outcomes), growth_bytes=grown.bytes)
    assert grown.bytes < GROWTH_BYTES, grown.keepers()
