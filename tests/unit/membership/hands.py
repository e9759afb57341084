"""One core, a clock, and hands to play everybody else with."""

from collections.abc import Callable
from random import Random
from typing import Any

from config.settings import LinkSettings, MembershipSettings
from protocol.codec import encode_row
from protocol.membership import (
    Membership,
    Send,
)
from protocol.membership.effects import Effect
from protocol.membership.signing import refutation_bytes
from protocol.messages import (
    Ack,
    Gossip,
    GossipPush,
    MembershipMessage,
    Ping,
)
from protocol.rows import Accusation, Refutation, SignedRow
from tests.simulation.membership_mesh import Identity, identity, row_of, verify

SECOND = 1_000_000
HOUR = 3_600 * SECOND
INSTANCE = "a" * 32


class Bench:
    """The core of node 0, a clock, and hands to play everybody else with."""

    def __init__(self, **options: Any) -> None:
        self.now_us = 10 * SECOND
        self.admitted = {identity(number).node_id for number in range(10)}
        self.me = identity(0)
        settings = options.pop("settings", MembershipSettings())
        self.core = Membership(
            node_id=self.me.node_id,
            public_key=self.me.public_key,
            sign=self.me.sign,
            verify=verify,
            settings=settings,
            link_settings=LinkSettings(),
            random=Random(1),
            boot_counter=5,
            instance=INSTANCE,
            is_admitted=self.admitted.__contains__,
            now_us=self.now_us,
            **options,
        )
        self.effects: list[Effect] = self.core.publish(row_of(self.me, "me", ("10.0.0.1:1",)), self.now_us)

    def row(self, number: int, seq: int, boot: int = 1, **fields: Any) -> SignedRow:
        who = identity(number)
        plain = row_of(who, f"n{number}", (f"10.0.0.{number + 1}:1",)).model_copy(
            update={"boot_counter": boot, "seq": seq, **fields}
        )
        payload = encode_row(plain)
        return SignedRow(payload=payload, signature=who.sign(payload))

    def connect(self, number: int, *, seq: int = 1) -> list[Effect]:
        """The peer connects and shows its row."""
        effects = self.core.on_connected(identity(number).node_id, f"10.0.0.{number + 1}:1", self.now_us)
        return [*effects, *self.gossip(number, rows=(self.row(number, seq),))]

    def say(self, number: int, message: MembershipMessage, lane: str = "stream") -> list[Effect]:
        effects = self.core.on_message(identity(number).node_id, message, self.now_us, lane=lane)  # type: ignore[arg-type]
        self.core.validate()
        return effects

    def gossip(self, number: int, **items: Any) -> list[Effect]:
        return self.say(number, GossipPush(gossip=Gossip(**items)))

    def run(self, seconds: float, answer: Callable[[Send], None] = lambda _: None) -> list[Effect]:
        """Let timers fire on time; ``answer`` sees every message and may feed the core."""
        end_us, seen = self.now_us + int(seconds * SECOND), list[Effect]()
        while (due_us := self.core.next_deadline()) is not None and due_us <= end_us:
            self.now_us = max(self.now_us, due_us)
            effects = self.core.on_timer(self.now_us)
            seen += effects
            for effect in effects:
                if isinstance(effect, Send):
                    answer(effect)
            self.core.validate()
        self.now_us = end_us
        return seen

    def answer_pings_of(self, *numbers: int, rtt_us: int = 400) -> Callable[[Send], None]:
        who = {identity(number).node_id for number in numbers}

        def answer(send: Send) -> None:
            if send.peer in who and isinstance(send.message, Ping):
                self.core.on_message(send.peer, Ack(seq=send.message.seq), self.now_us + rtt_us, lane=send.lane)

        return answer

    def health(self, number: int) -> int:
        """The local health that this node owns up to when the peer asks whether it is there."""
        answers = sent(self.say(number, Ping(seq=1)), Ack)
        return answers[0].message.health  # type: ignore[union-attr]

    def state(self, number: int) -> str | None:
        member = self.core.members().get(identity(number).node_id)
        return None if member is None else member.state

    def kill(self, number: int) -> None:
        """Nobody answers until the node is dead; others keep talking."""
        others = [other for other in range(1, 10) if other != number and self.state(other) == "alive"]
        for _ in range(60):
            self.run(1, self.answer_pings_of(*others))
            if self.state(number) == "dead":
                return
        raise AssertionError("it never died")


def sent(effects: list[Effect], kind: type) -> list[Send]:
    return [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def accusation(number: int, accuser: int, verdict: str = "suspect", incarnation: int = 0, boot: int = 1) -> Accusation:
    return Accusation(
        node_id=identity(number).node_id,
        boot_counter=boot,
        incarnation=incarnation,
        verdict=verdict,  # type: ignore[arg-type]
        accuser=identity(accuser).node_id,
    )


def refutation(who: Identity, boot: int, incarnation: int, seq: int) -> Refutation:
    payload = refutation_bytes(who.node_id, boot, incarnation, seq)
    return Refutation(
        node_id=who.node_id, boot_counter=boot, incarnation=incarnation, seq=seq, signature=who.sign(payload)
    )
