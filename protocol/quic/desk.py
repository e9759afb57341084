"""The inviter's side of joining: judge the proof, bind the token, sign the admission, each durable before the next."""

from collections.abc import Callable
from pathlib import Path

from protocol.admission import MAX_MEMBERS, AdmissionBook
from protocol.errors import StateError
from protocol.ids import node_id_of
from protocol.join_token import join_proof, proof_holds
from protocol.messages import JoinAccepted, JoinRefused, JoinRequest
from protocol.quic.identity import Identity
from protocol.quic.invites import Invite, InviteBox
from protocol.quic.mesh_files import MAX_SEEDS, save_membership

STATEMENTS_TOLD = 2_048
"""Statements in one answer (about 0.6 MB); the newcomer learns the rest by gossip."""


class AdmissionDesk:
    """See ``interface.JoinDesk``. ``seeds()`` are the addresses that newcomers should dial."""

    def __init__(
        self,
        *,
        identity: Identity,
        book: AdmissionBook,
        state_dir: Path,
        seeds: Callable[[], tuple[str, ...]],
        box: InviteBox | None = None,
    ) -> None:
        self._identity = identity
        self._book = book
        self._state_dir = state_dir
        self._seeds = seeds
        self._box = box or InviteBox(state_dir)

    def redeem(self, joiner_public_key: bytes, request: JoinRequest) -> JoinAccepted | JoinRefused:
        """One answer per request. The same newcomer asking again with its token gets the same answer (lost replies)."""
        try:
            return self._redeem(joiner_public_key, request)
        except StateError:
            return JoinRefused(reason="busy")

    def _redeem(self, public_key: bytes, request: JoinRequest) -> JoinAccepted | JoinRefused:
        joiner, book = node_id_of(public_key), self._book
        invite = self._box.find(request.token_id)
        if invite is None:
            return JoinRefused(reason="unknown_or_used_token")
        if not proof_holds(request.proof, self._expected(invite, joiner)):
            return JoinRefused(reason="bad_proof")
        if invite.used_by not in {"", joiner} or book.is_barred(joiner):
            return JoinRefused(reason="unknown_or_used_token")
        if not invite.used_by and self._box.expired(invite):
            return JoinRefused(reason="expired")
        if self._identity.node_id not in book or (joiner not in book and len(book.statements) >= MAX_MEMBERS):
            return JoinRefused(reason="busy")
        self._box.use(invite, joiner)
        book.admit(
            public_key,
            signer_public_key=self._identity.public_key,
            sign=self._identity.sign,
            successor=request.successor,
        )
        seeds = self._seeds()[:MAX_SEEDS]
        save_membership(self._state_dir, book, seeds)
        proof = book.chain(joiner)
        others = tuple(statement for statement in book.statements if statement not in proof)
        return JoinAccepted(mesh_id=book.mesh_id, admissions=(proof + others)[:STATEMENTS_TOLD], seeds=seeds)

    def _expected(self, invite: Invite, joiner: str) -> bytes:
        return join_proof(
            bytes.fromhex(invite.verifier),
            mesh_id=self._book.mesh_id,
            token_id=invite.token_id,
            joiner=joiner,
            inviter=self._identity.node_id,
        )
