"""Is this the process that the mesh knows by its identity? Lost boot counters are raised, copies end.

A state directory that was wiped or restored counts its starts from too low: peers refuse it as older than what they
remember, and it counts on from higher up instead of being refused for ever. A *copied* state directory looks the same to
itself; but where the other process lives, peers turn the later one away (``protocol.quic.predecessor``). It ends when it was
told so again after ``CONFIRM_US``, since one word may come from a peer that has not missed a killed predecessor yet. The
process that was there first goes on, and says what its peers tell it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import StateError
from protocol.ids import Instance, NodeId
from protocol.messages import IdentityContested
from protocol.quic.invites import wall_clock_s
from stage_agent.clock import monotonic_us
from stage_agent.driver import Driver
from stage_agent.switches import Switches

RAISE_SPACING_US = 5_000_000
"""Refusals by several peers count as one."""
BOOT_STEP = 2**20
"""Where the wall clock does not help. Lies of a peer cannot exhaust the counter in steps of this size."""
CONFIRM_US = 4_000_000
CONFIRM_WITHIN_US = 60_000_000
SAID_AGAIN_US = 60_000_000


@dataclass(slots=True)
class OwnProcess:
    """See the module. ``greet_as`` makes the transport greet with another boot counter."""

    driver: Driver
    switches: Switches
    greet_as: Callable[[int], None]
    _raised_us: int | None = None
    _turned_away_us: int | None = None
    _said_us: dict[NodeId, int] = field(default_factory=dict)

    def cut_off(self, reason: str, address: str) -> None:
        """The peer there ended a connection or refused one."""
        row = self.driver.membership.own_row
        if reason == "identity_conflict":
            self.turned_away(address)
        elif reason == "older_boot" and row is not None:
            self._outrank(
                max(wall_clock_s(), row.boot_counter + BOOT_STEP), f"the peer at {address} remembers a later start"
            )

    def outranked(self, boot_counter: int) -> None:
        """A row of this identity by another process goes round: with that boot counter, signed by the key."""
        row = self.driver.membership.own_row
        if row is not None and boot_counter >= row.boot_counter:
            self._outrank(boot_counter + 1, "another process wrote rows under this identity")

    def turned_away(self, address: str) -> None:
        """The peer there lives with another process of this identity and refuses this one."""
        now_us, first_us = monotonic_us(), self._turned_away_us
        if first_us is None or now_us - first_us > CONFIRM_WITHIN_US:
            self._turned_away_us = now_us
            text = f"the peer at {address} refuses this process: another one, alive, uses this node's identity"
            self.driver.journal.tell("identity_conflict", text, "error", node_id=self.driver.node_id, address=address)
        elif now_us - first_us >= CONFIRM_US and not self.switches.stop.is_set():
            self.switches.barred = (
                f"another living process uses the identity of this node ({self.driver.node_id}), as the peer at {address}"
                " says: this later one ends; if its state directory is a copy, remove identity.pem and mesh.json there"
                " and `stagemesh join` with a new token"
            )
            self.switches.stop.set()

    def contested(self, peer: NodeId, message: IdentityContested) -> None:
        """A peer turned another process of this identity away."""
        driver = self.driver
        name = driver.narrator.name_of(peer)
        text = (
            f"{name} turned away another living process with this node's identity, at {message.address}: stop that copy"
        )
        self._conflict(driver.node_id, text, message.address)

    def shared(self, peer: NodeId, instance: Instance, address: str) -> None:
        """Two living processes use the identity of ``peer``; that at ``address`` was turned away here."""
        driver = self.driver
        name = "this very node" if peer == driver.node_id else driver.narrator.name_of(peer)
        self._conflict(peer, f"two living processes use the identity of {name}: stop that at {address}", address)
        driver.transport.send(peer, IdentityContested(instance=instance, address=address), "stream")

    def _conflict(self, node_id: NodeId, text: str, address: str) -> None:
        """Not plannable for a while; said once a minute."""
        now_us, driver = monotonic_us(), self.driver
        driver.carry_membership(driver.membership.on_conflict(node_id, now_us))
        if now_us - self._said_us.get(node_id, -SAID_AGAIN_US) >= SAID_AGAIN_US:
            self._said_us[node_id] = now_us
            driver.journal.tell("identity_conflict", text, "error", node_id=node_id, address=address)

    def _outrank(self, boot_counter: int, why: str) -> None:
        now_us, driver = monotonic_us(), self.driver
        if self._raised_us is not None and now_us - self._raised_us < RAISE_SPACING_US:
            return
        self._raised_us = now_us
        try:
            counter = driver.store.raise_boot_counter(boot_counter)
        except StateError as error:
            driver.journal.tell("state_unavailable", str(error), "error")
            return
        self.greet_as(counter)
        driver.journal.tell(
            "boot_counter_raised",
            f"{why}: counting this node's starts from {counter} on",
            "warning",
            boot_counter=counter,
        )
        driver.carry_membership(driver.membership.outrank(counter, now_us))
