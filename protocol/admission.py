"""Who belongs to a mesh: signed admissions and revocations, and the book that every node keeps of them.

Theory of operation. A mesh is founded by one key: ``mesh_id`` is ``<name>.<hash of the name and the founder's keys>``, so
whoever knows the id can recognise the founder's first statement, an admission of itself, without trusting anybody. Any
admitted node may admit or revoke others by signing a statement; statements spread by gossip and are kept one per node.

A node is *admitted* when its statement is not a revocation and the signer is admitted, up to the founder. That makes
revocation cascade: whom a revoked key let in is out too, until another admitted node vouches for them again
(``AdmissionBook.revoke`` returns those statements together with the revocation, so that it never surprises anybody).
A revoked id never returns; the machine makes a new identity.

Keys rotate by succession. An id is the hash of a key, so a new key is a new id; which one may follow is fixed beforehand:
every admission names its node's ``successor``, the hash of a key that nobody has seen yet. The moment a book holds a
statement about that key (signed by the old one), the old id is *replaced*: it is admitted no longer, and of everything its
key ever signed only the statement about the successor still counts. So whoever finds the old key, before or after, can
neither name another successor nor let anybody in, and books cannot disagree about who follows. The successor vouches
again for those whom the old key admitted (``AdmissionBook.succeed``).

The founder, and who succeeded it, can be revoked by nobody else: everything hangs on it.

Merging is commutative and idempotent: of two statements about one node a revocation wins, then the higher version, then
the smaller signer. A revocation counts when its signer was ever admitted here; whether an admission counts depends on the
final set of statements alone, so two books that hold the same statements agree, whatever order they came in.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol.ids import MeshId, NodeId, node_id_of
from protocol.rows import Admission

MAX_MEMBERS = 4_096
"""Statements in one book; at the limit new nodes are refused, revocations of known ones are not."""
MAX_CHAIN = 32
"""Links from a node to the founder. A longer chain is not admitted: somebody nearer to the founder must vouch."""
MESH_NAME_MAX = 24
_STATEMENT = "stagemesh admission 1"

Sign = Callable[[bytes], bytes]
"""Ed25519 signature of bytes by this node's key."""


def mesh_id_of(name: str, founder_public_key: bytes, successor: str = "") -> MeshId:
    """The id of the mesh ``name`` founded by that key, which ``successor`` may follow.

    ``name``: 1–24 characters of ``a-z 0-9 -`` (the caller checks).
    """
    founded = b"stagemesh mesh 1\0" + name.encode() + b"\0" + founder_public_key + successor.encode()
    digest = hashlib.sha256(founded).digest()[:20]
    return MeshId(f"{name}.{base64.b32encode(digest).decode('ascii').lower()}")


def mesh_name(mesh_id: str) -> str:
    """The name that people gave the mesh."""
    return mesh_id.rpartition(".")[0]


def statement_bytes(admission: Admission) -> bytes:
    """What the signer signs: every field but the signature, in one unambiguous encoding."""
    raw: bytes = msgpack.packb(
        [
            _STATEMENT,
            admission.mesh_id,
            admission.node_id,
            admission.public_key,
            admission.version,
            admission.revoked,
            admission.signer,
            admission.signer_public_key,
            *([admission.successor] if admission.successor else []),
        ],
        use_bin_type=True,
    )
    return raw


def make_admission(
    mesh_id: str,
    public_key: bytes,
    *,
    signer_public_key: bytes,
    sign: Sign,
    version: int = 1,
    revoked: bool = False,
    successor: str = "",
) -> Admission:
    """A signed statement about the node that owns ``public_key``; ``successor`` is the id of the key that may follow."""
    unsigned = Admission(
        mesh_id=mesh_id,
        node_id=node_id_of(public_key),
        public_key=public_key,
        version=version,
        revoked=revoked,
        successor=successor,
        signer=node_id_of(signer_public_key),
        signer_public_key=signer_public_key,
        signature=bytes(64),
    )
    return unsigned.model_copy(update={"signature": sign(statement_bytes(unsigned))})


def signature_holds(admission: Admission) -> bool:
    """Whether ids belong to their keys and the signer's signature is right (about 0.1 ms)."""
    if admission.node_id != node_id_of(admission.public_key):
        return False
    if admission.signer != node_id_of(admission.signer_public_key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(admission.signer_public_key).verify(
            admission.signature, statement_bytes(admission)
        )
    except (InvalidSignature, ValueError):
        return False
    return True


class AdmissionBook:
    """The admitted ids of one mesh. At most ``MAX_MEMBERS`` statements; see the module for how they combine."""

    def __init__(self, mesh_id: str, statements: Iterable[Admission] = ()) -> None:
        self.mesh_id = MeshId(mesh_id)
        self._statements: dict[NodeId, Admission] = {}
        self._admitted: set[NodeId] = set()
        self._expected: set[str] = set()
        """Ids that some statement names as a successor."""
        self.version = 0
        """Goes up by one whenever a statement is taken over: lets others notice a change without comparing."""
        self.merge_all(statements)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._admitted

    def __len__(self) -> int:
        return len(self._admitted)

    def __iter__(self) -> Iterator[NodeId]:
        return iter(sorted(self._admitted))

    @property
    def statements(self) -> tuple[Admission, ...]:
        """Everything held, founder first, signers before those they admitted: an order in which a new book takes all."""
        return tuple(sorted(self._statements.values(), key=lambda held: (self._depth(held.node_id), held.node_id)))

    def statement(self, node_id: str) -> Admission | None:
        """What is held about ``node_id``."""
        return self._statements.get(NodeId(node_id))

    def is_revoked(self, node_id: str) -> bool:
        """Whether the id was revoked (an id never heard of is not)."""
        held = self._statements.get(NodeId(node_id))
        return held is not None and held.revoked

    def successor(self, node_id: str) -> NodeId | None:
        """The id that took this one's place because its key was rotated; None when it stands for itself."""
        held = self._statements.get(NodeId(node_id))
        follows = NodeId(held.successor) if held is not None else NodeId("")
        return follows if follows in self._statements else None

    def is_barred(self, node_id: str) -> bool:
        """Whether the id is out for good, revoked or replaced; not so one that only lost whoever vouched for it."""
        return self.is_revoked(node_id) or self.successor(node_id) is not None

    def barred_as(self, node_id: str) -> Literal["", "revoked", "superseded"]:
        """Why the id is out for good; empty when it is not."""
        if self.is_revoked(node_id):
            return "revoked"
        return "superseded" if self.is_barred(node_id) else ""

    def proof_against(self, node_id: str) -> tuple[Admission, ...]:
        """Statements that show anybody in the mesh that ``node_id`` is barred, signers first; empty when it is not."""
        if not self.is_barred(node_id):
            return ()
        about = self._statements[NodeId(node_id) if self.is_revoked(node_id) else self.successor(node_id) or NodeId("")]
        return (*self._signers(about), about)

    def rests_on(self, node_id: str, other: str) -> bool:
        """Whether ``node_id`` is admitted by way of ``other`` and would be out with it (or is it)."""
        return any(link.node_id == other for link in self.chain(node_id))

    def merge(self, admission: Admission) -> bool:
        """Take over a statement. True when the book changed.

        False for what is known or superseded, for another mesh, a wrong signature, a signer never admitted here (send
        the signer's statement first) or replaced, and a new node beyond ``MAX_MEMBERS``.
        """
        if admission.mesh_id != self.mesh_id:
            return False
        node_id = NodeId(admission.node_id)
        held = self._statements.get(node_id)
        if held is not None and _rank(admission) <= _rank(held):
            return False
        if held is None and len(self._statements) >= MAX_MEMBERS:
            return False
        if held is not None and held.successor and admission.successor != held.successor and not admission.revoked:
            return False  # fixed for good: or an old key could be given another heir
        if not self._may_sign(admission) or not signature_holds(admission):
            return False
        self._statements[node_id] = admission
        self._expected.add(admission.successor)
        if held is not None or node_id in self._expected:
            self._admitted = {node for node in self._statements if self._reaches_founder(node)}
        elif self._reaches_founder(node_id):  # nobody can hang on a node that was unknown until now
            self._admitted.add(node_id)
        self.version += 1
        return True

    def merge_all(self, admissions: Iterable[Admission]) -> int:
        """Merge in any order; signers may come after those they admitted. How many were taken over."""
        waiting, taken = list(admissions), 0
        while waiting:
            left = [admission for admission in waiting if not self.merge(admission)]
            taken += len(waiting) - len(left)
            if len(left) == len(waiting):
                break
            waiting = left
        return taken

    def chain(self, node_id: str) -> tuple[Admission, ...]:
        """The statements that prove ``node_id`` admitted, founder first; empty when it is not admitted."""
        if node_id not in self._admitted:
            return ()
        links = [self._statements[NodeId(node_id)]]
        while not self._is_founding(links[-1]):
            links.append(self._statements[NodeId(links[-1].signer)])
        return tuple(reversed(links))

    def admit(self, public_key: bytes, *, signer_public_key: bytes, sign: Sign, successor: str = "") -> Admission:
        """The signed admission of a newcomer, already in this book; the one held when it is admitted already.

        The signer must be admitted (assert). A barred id must be refused before (assert).
        """
        assert node_id_of(signer_public_key) in self._admitted
        node_id = node_id_of(public_key)
        held = self._statements.get(node_id)
        if held is not None and node_id in self._admitted:
            return held
        assert not self.is_barred(node_id)
        made = make_admission(
            self.mesh_id,
            public_key,
            signer_public_key=signer_public_key,
            sign=sign,
            version=1 if held is None else held.version + 1,
            successor=successor or (held.successor if held is not None else ""),
        )
        self.merge(made)
        return made

    def succeed(
        self, public_key: bytes, new_public_key: bytes, *, sign: Sign, sign_new: Sign, successor: str
    ) -> tuple[Admission, ...]:
        """What makes ``new_public_key`` take the place of ``public_key``; nothing is merged yet.

        Its own admission by the old key comes first, then its word for all that the old key said, revocations too. The
        old key must be admitted and name the new one (assert). ``successor`` is the id that may follow the new key.
        """
        old, new = node_id_of(public_key), node_id_of(new_public_key)
        assert old in self._admitted
        assert self._statements[old].successor == new
        first = make_admission(
            self.mesh_id, new_public_key, signer_public_key=public_key, sign=sign, successor=successor
        )
        vouched = (
            self._restated(held, new_public_key, sign_new, revoked=held.revoked)
            for held in self.statements
            if held.signer == old and held.node_id != old
        )
        return (first, *vouched)

    def revoke(self, node_id: str, *, signer_public_key: bytes, sign: Sign) -> tuple[Admission, ...]:
        """Make a ``revocation`` and merge it."""
        made = self.revocation(node_id, signer_public_key=signer_public_key, sign=sign)
        self.merge_all(made)
        return made

    def revocation(self, node_id: str, *, signer_public_key: bytes, sign: Sign) -> tuple[Admission, ...]:
        """What revokes a known id and vouches for those it admitted, not merged yet; empty when it would change nothing.

        The signer must be admitted, and not by way of the one it revokes (assert).
        """
        held = self._statements.get(NodeId(node_id))
        if held is None or held.revoked:
            return ()
        signer = node_id_of(signer_public_key)
        assert signer in self._admitted
        assert signer == node_id or not self.rests_on(signer, node_id)
        vouched_for = [
            orphan
            for orphan in self.statements
            if orphan.signer == node_id != orphan.node_id and not orphan.revoked and node_id in self._admitted
        ]
        return tuple(
            self._restated(about, signer_public_key, sign, revoked=about is held)
            for about in (held, *(vouched_for if signer != node_id else ()))
        )

    def _restated(self, held: Admission, signer_public_key: bytes, sign: Sign, *, revoked: bool) -> Admission:
        """The next version of what is held, by another signer."""
        return make_admission(
            self.mesh_id,
            held.public_key,
            signer_public_key=signer_public_key,
            sign=sign,
            version=held.version + 1,
            revoked=revoked,
            successor=held.successor,
        )

    def validate(self) -> None:
        """The invariants: the admitted ones are exactly those whose chain reaches the founder; none is revoked."""
        assert len(self._statements) <= MAX_MEMBERS
        for node_id in self._admitted:
            links = self.chain(node_id)
            assert links[0].signer == links[0].node_id
            assert all(not link.revoked for link in links)

    def _is_founding(self, admission: Admission) -> bool:
        """Whether this is the founder's word about itself."""
        if admission.node_id != admission.signer:
            return False
        name, key = mesh_name(self.mesh_id), admission.signer_public_key
        return mesh_id_of(name, key, admission.successor) == self.mesh_id

    def _may_sign(self, admission: Admission) -> bool:
        if self.successor(admission.signer) not in {None, admission.node_id}:
            return False  # a replaced key has said its last word
        if self._is_founding(admission):
            return True
        signer = self._statements.get(NodeId(admission.signer))
        if signer is None or signer.public_key != admission.signer_public_key:
            return False
        if admission.signer != admission.node_id:
            # What everything hangs on hangs on nobody else, and an old key says nothing against its heir.
            heir = admission.revoked and signer.successor == admission.node_id
            return not heir and not self._carries_all(admission.node_id)
        # A node may say of itself only that it is gone; letting oneself in needs somebody else.
        return admission.revoked

    def _carries_all(self, node_id: str) -> bool:
        """Whether it is the founder, or succeeded it."""
        held = self._statements.get(NodeId(node_id))
        for _ in range(MAX_CHAIN):
            if held is None or self._is_founding(held):
                return held is not None
            before = self._statements.get(NodeId(held.signer))
            held = before if before is not None and before.successor == held.node_id else None
        return False

    def _signers(self, admission: Admission) -> tuple[Admission, ...]:
        """Those who vouch for a statement, founder first, as far as they are held."""
        links: list[Admission] = []
        while len(links) < MAX_CHAIN and not self._is_founding(admission):
            signer = self._statements.get(NodeId(admission.signer))
            if signer is None or signer in links:
                break
            links.append(signer)
            admission = signer
        return tuple(reversed(links))

    def _reaches_founder(self, node_id: NodeId) -> bool:
        return self._depth(node_id) < MAX_CHAIN

    def _depth(self, node_id: str) -> int:
        """Links to the founder; ``MAX_CHAIN`` when a link is missing, revoked, or replaced by another than comes next."""
        child: str | None = None
        for depth in range(MAX_CHAIN):
            held = self._statements.get(NodeId(node_id))
            if held is None or held.revoked or self.successor(node_id) not in {None, child}:
                return MAX_CHAIN
            if self._is_founding(held):
                return depth
            child, node_id = node_id, held.signer
        return MAX_CHAIN


def _rank(admission: Admission) -> tuple[bool, int, tuple[int, ...], bytes]:
    """Larger wins. Ties at equal version: the smaller signer, then the smaller signature, so that all books agree."""
    signer = tuple(-ord(character) for character in admission.signer)
    return admission.revoked, admission.version, signer, bytes(255 - byte for byte in admission.signature)
