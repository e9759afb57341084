"""``mesh.json`` in the state directory: which mesh this node is in, who is admitted, and where to look for peers.

One file, replaced whole: a crash leaves either the old or the new membership, never half of one. Its absence means "in
no mesh". The daemon rewrites it when admissions or seeds change; ``init`` and ``join`` create it and never overwrite it.
"""

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from protocol.admission import AdmissionBook, make_admission, mesh_id_of, mesh_name
from protocol.errors import IdentityError, StateError
from protocol.ids import MeshId
from protocol.quic.identity import Identity
from protocol.quic.private_file import make_private_directory, read_private, write_private
from protocol.rows import Admission

FILE_NAME = "mesh.json"
MAX_SEEDS = 256
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Membership:
    """What ``mesh.json`` says."""

    mesh_id: MeshId
    admissions: tuple[Admission, ...]
    seeds: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The mesh's name."""
        return mesh_name(self.mesh_id)

    def book(self) -> AdmissionBook:
        """A book with every statement that holds; a tampered file cannot admit anybody."""
        return AdmissionBook(self.mesh_id, self.admissions)


def found_mesh(state_dir: Path, identity: Identity, name: str) -> Membership:
    """Create a mesh with this node as founder and only member. Raises ``IdentityError`` when it is in one already."""
    mesh_id = mesh_id_of(name, identity.public_key, identity.successor)
    founding = make_admission(
        mesh_id,
        identity.public_key,
        signer_public_key=identity.public_key,
        sign=identity.sign,
        successor=identity.successor,
    )
    membership = Membership(mesh_id, (founding,))
    store_first(state_dir, membership)
    return membership


def store_first(state_dir: Path, membership: Membership) -> None:
    """Write ``mesh.json`` where there is none. Raises ``IdentityError`` when there is one: it is never overwritten."""
    make_private_directory(state_dir)
    try:
        write_private(state_dir / FILE_NAME, _encode(membership), replace=False)
    except FileExistsError:
        raise IdentityError(
            f"{state_dir / FILE_NAME} exists: this node is in a mesh already; use another --state-dir, or leave first"
        ) from None


def save_membership(state_dir: Path, book: AdmissionBook, seeds: Iterable[str]) -> None:
    """Replace ``mesh.json``. Raises ``StateError``; the old file is then still there."""
    save_statements(state_dir, book.mesh_id, book.statements, seeds)


def save_statements(state_dir: Path, mesh_id: MeshId, statements: Iterable[Admission], seeds: Iterable[str]) -> None:
    """As ``save_membership``, for statements that no book has merged yet; of two about one node the later counts."""
    latest = {statement.node_id: statement for statement in statements}
    kept = tuple(dict.fromkeys(seeds))[:MAX_SEEDS]
    write_private(state_dir / FILE_NAME, _encode(Membership(mesh_id, tuple(latest.values()), kept)))


def load_membership(state_dir: Path) -> Membership | None:
    """What is stored; None when this node is in no mesh. Raises ``StateError`` when the file is damaged."""
    path = state_dir / FILE_NAME
    content = read_private(path)
    if content is None:
        return None
    try:
        return _decode(json.loads(content))
    except (ValueError, KeyError, TypeError, ValidationError, binascii.Error):
        raise StateError(f"{path} is damaged: restore it from a backup, or remove it and join again") from None


def _encode(membership: Membership) -> bytes:
    return json.dumps(
        {
            "schema": SCHEMA,
            "mesh_id": membership.mesh_id,
            "seeds": list(membership.seeds),
            "admissions": [_plain(admission) for admission in membership.admissions],
        },
        indent=1,
    ).encode()


def _decode(document: Any) -> Membership:
    if document["schema"] != SCHEMA:
        raise ValueError(document["schema"])
    seeds = document["seeds"]
    if not isinstance(seeds, list) or not all(isinstance(seed, str) for seed in seeds):
        raise ValueError("seeds")
    admissions = tuple(_admission(plain) for plain in document["admissions"])
    return Membership(MeshId(str(document["mesh_id"])), admissions, tuple(seeds[:MAX_SEEDS]))


_BINARY = ("public_key", "signer_public_key", "signature")


def _plain(admission: Admission) -> dict[str, Any]:
    plain = admission.model_dump()
    return plain | {field: base64.b64encode(plain[field]).decode() for field in _BINARY}


def _admission(plain: dict[str, Any]) -> Admission:
    binary = {field: base64.b64decode(plain[field], validate=True) for field in _BINARY}
    return Admission.model_validate(plain | binary)
