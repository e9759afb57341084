"""Who belongs to the mesh, as operators change it (revoke, rotate) and as this node learns it about itself.

What is signed here is on the disk before it is merged, and merged before anybody hears it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from protocol.admission import MAX_CHAIN, AdmissionBook, mesh_name
from protocol.errors import IdentityBarred, StateError
from protocol.ids import NodeId, short
from protocol.quic import rotation
from protocol.quic.identity import Identity
from protocol.quic.mesh_files import save_statements
from protocol.rows import Admission
from stage_agent.api.commands import Accepted, Refused
from stage_agent.clock import monotonic_us
from stage_agent.driver import Driver
from stage_agent.mesh_book import MeshBook
from stage_agent.orders import OrderRefusedError, in_place_of
from stage_agent.switches import Switches

SPREAD_S = 1.0
"""A node that rotates its key stays this long under the old one, so that the news leaves."""
NAMES_SHOWN = 8


def revoked_text(mesh_id: str, node_id: str, signer: str) -> str:
    """The one line of a node that is revoked; ``signer`` is whoever revoked it, as people call it."""
    return (
        f"this node ({node_id}) was revoked from mesh {mesh_name(mesh_id)} by {signer}: it takes no part any more;"
        " to come back, `stagemesh join` with a new token makes a new identity"
    )


def standing_identity(state_dir: Path, identity: Identity, book: AdmissionBook) -> Identity:
    """The identity to start under: that of a key rotated in the meantime. Raises ``IdentityBarred`` for one that is out."""
    identity = rotation.settle(state_dir, identity, book)
    held = book.statement(identity.node_id)
    if held is not None and held.revoked:
        raise IdentityBarred(revoked_text(book.mesh_id, identity.node_id, f"node {held.signer}"))
    return identity


@dataclass(slots=True)
class Admittance:
    """See the module. ``look`` is called whenever the book has changed."""

    identity: Identity
    driver: Driver
    switches: Switches
    tasks: asyncio.TaskGroup

    @property
    def _book(self) -> MeshBook:
        return self.driver.book

    def look(self) -> None:
        """End the daemon if its identity is barred; begin again under the new key if that is what happened."""
        own, book, switches = self.identity.node_id, self._book.book, self.switches
        if switches.stop.is_set() or not book.is_barred(own):
            return
        held = book.statement(own)
        if held is not None and held.revoked:
            switches.barred = revoked_text(book.mesh_id, own, self.driver.narrator.name_of(held.signer))
            switches.stop.set()
        elif book.successor(own) == self.identity.successor:
            self.tasks.create_task(self._begin_again(), name="rotate key")
        else:
            switches.barred = (
                f"the key of this node ({own}) was replaced by that of node {book.successor(own)}: this is an old copy;"
                " stop it for good, or `stagemesh join` with a new token, which makes a new identity"
            )
            switches.stop.set()

    def revoke(self, name: str) -> Accepted | Refused:
        """Expel the node called ``name`` (id, start of an id, or name)."""
        found = self._find(name)
        if isinstance(found, Refused):
            return found
        narrator, book, own = self.driver.narrator, self._book.book, self.identity
        called = narrator.name_of(found)
        if found == own.node_id:
            return Refused(
                "own_node", "a node cannot revoke itself: `stagemesh leave` here, or `stagemesh revoke` on another node"
            )
        document = {"node_id": found, "name": called, "revoked": True}
        if book.is_revoked(found):
            return Accepted(document | {"already": True, "vouched_for": []})
        if (heir := book.successor(found)) is not None:
            return Refused("superseded_node", f"{called} has a new key since: revoke {heir} instead")
        if own.node_id not in book:
            return Refused("not_admitted", "this node is not admitted in its mesh any more: revoke on another one")
        if book.rests_on(own.node_id, found):
            return Refused("rests_on_node", self._why_not_here(found, called))
        made = book.revocation(found, signer_public_key=own.public_key, sign=own.sign)
        vouched_for = [statement.node_id for statement in made if not statement.revoked]
        if refused := self._believe(made):
            return refused
        text = f"revoked {called}: its identity is refused everywhere from now on"
        self.driver.journal.tell("node_revoked", text, "warning", node_id=found, vouched_for=vouched_for)
        return Accepted(document | {"already": False, "vouched_for": vouched_for})

    def rotate(self) -> Accepted | Refused:
        """Give this node a new key; the daemon goes on under it a moment later."""
        book, own = self._book.book, self.identity
        if book.successor(own.node_id) is not None:
            return Refused("rotating", "this node's key is being rotated already: wait a moment")
        if problem := rotation.why_not(own, book):
            return Refused("not_rotated", problem)
        try:
            made = rotation.rotate(self._book.state_dir, own, book, self._book.seeds)
        except StateError as error:
            return Refused("not_kept", str(error), status=507)
        self._merge(made)
        text = f"this node's key is replaced: it is {own.successor} from now on"
        self.driver.journal.tell("key_rotated", text, "warning", node_id=own.node_id, successor=own.successor)
        self.look()
        return Accepted({"node_id": own.node_id, "successor": own.successor})

    def inherit_orders(self) -> None:
        """Standing orders that name an id which this node had before its key was rotated hold for the present one."""
        book, own, driver = self._book.book, self.identity.node_id, self.driver
        old_ids = [held.node_id for held in book.statements if self._heir(held.node_id) == own]
        now_us = monotonic_us()
        try:
            if said := in_place_of(driver.orders.known(now_us), dict.fromkeys(old_ids, own)):
                driver.orders.say(said, now_us)
        except (OrderRefusedError, StateError) as error:
            driver.journal.tell("orders_not_inherited", str(error), "warning")

    def _heir(self, node_id: str) -> NodeId | None:
        """Who holds the place of ``node_id`` today; ``None`` when nobody took it."""
        heir: NodeId | None = None
        for _ in range(MAX_CHAIN):  # statements of others may lead in a circle
            following = self._book.book.successor(heir or node_id)
            if following is None:
                break
            heir = following
        return heir

    def _believe(self, made: Iterable[Admission]) -> Refused | None:
        """Durable first, then merged and told."""
        book = self._book.book
        made = tuple(made)
        try:
            save_statements(self._book.state_dir, book.mesh_id, (*book.statements, *made), self._book.seeds)
        except StateError as error:
            return Refused("not_kept", str(error), status=507)
        self._merge(made)
        return None

    def _merge(self, made: tuple[Admission, ...]) -> None:
        self._book.book.merge_all(made)
        driver = self.driver
        driver.post(lambda: driver.carry_membership(driver.membership.announce(list(made), monotonic_us())))

    async def _begin_again(self) -> None:
        await asyncio.sleep(SPREAD_S)
        self.switches.again = True
        self.switches.stop.set()

    def _find(self, name: str) -> NodeId | Refused:
        """Members and everybody the book knows, by id, name, or start of an id; the admitted come first."""
        book, narrator = self._book.book, self.driver.narrator
        known = {NodeId(held.node_id) for held in book.statements}
        if name in known:
            return NodeId(name)
        called = [node for node in known if narrator.name_of(node) == name]
        found = called or [node for node in known if node.startswith(name)]
        found = [node for node in found if node in book] or found
        if len(found) == 1:
            return found[0]
        if not found:
            return Refused("unknown_node", f"there is no node {name!r} in this mesh: see `stagemesh peers`", status=404)
        some = ", ".join(f"{node} ({narrator.name_of(node)})" for node in sorted(found)[:NAMES_SHOWN])
        return Refused("ambiguous_node", f"{name!r} can be any of {len(found)} nodes, say which by its id: {some}")

    def _why_not_here(self, node_id: str, called: str) -> str:
        """Who let this node in cannot be revoked by it: it would be out as well."""
        book, narrator = self._book.book, self.driver.narrator
        able = [node for node in book if node != node_id and not book.rests_on(node, node_id)]
        if not able:
            return (
                f"{called} founded this mesh and every admission rests on its key: `stagemesh rotate-key` on it makes its"
                " old key worthless; to be rid of the machine itself, found a new mesh"
            )
        some = ", ".join(narrator.name_of(node) for node in able[:NAMES_SHOWN])
        return (
            f"{called} let this node in, which would be out with it: run `stagemesh revoke {short(node_id)}` on {some}"
        )
