"""What an agent must remember about one slot across restarts, and its strict, versioned document form.

The record is replaced whole and written durably before any answer that depends on it leaves (PROTOCOL §4).
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, ValidationError

from protocol.ballots import StageAssignment
from protocol.errors import StateError
from protocol.fencing import NO_EPOCH, PlanEpoch, epoch_from_wire, epoch_to_wire
from protocol.wire import Count, Digest, Epoch, Wire

RECORD_VERSION = 1


@dataclass(frozen=True, slots=True)
class HeldPlan:
    """One agent's part of one plan."""

    ballot: PlanEpoch
    plan_hash: str
    assignment: StageAssignment


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """The durable word of an agent about one slot.

    ``promised``, ``last_active``, ``closed`` and ``cache_epoch`` never go back. ``active`` is the plan that serves (or
    served when the process ended); it is ``None`` after retirement. ``closed`` is the highest ballot that was aborted,
    retired or orphaned here: nothing may be staged at it or below again.
    """

    promised: PlanEpoch = NO_EPOCH
    accepted: HeldPlan | None = None
    active: HeldPlan | None = None
    last_active: PlanEpoch = NO_EPOCH
    closed: PlanEpoch = NO_EPOCH
    cache_epoch: int = 0
    first_request_id: int = 0

    @property
    def current(self) -> PlanEpoch:
        """Whose word counts now: the promised ballot; the active plan's when that was given up; else nobody's.

        A ballot that was promised and then aborted protects no one: two that want to coordinate would keep each other out.
        """
        if self.promised > self.closed:
            return self.promised
        return NO_EPOCH if self.active is None else self.active.ballot

    def to_document(self) -> dict[str, Any]:
        """Plain msgpack and JSON types."""
        return _Document(
            version=RECORD_VERSION,
            promised=epoch_to_wire(self.promised),
            accepted=_held_document(self.accepted),
            active=_held_document(self.active),
            last_active=epoch_to_wire(self.last_active),
            closed=epoch_to_wire(self.closed),
            cache_epoch=self.cache_epoch,
            first_request_id=self.first_request_id,
        ).model_dump(mode="json")

    @classmethod
    def from_document(cls, document: object) -> "SlotRecord":
        """Inverse of ``to_document``. Raises ``StateError`` on anything else; a document is never half believed."""
        if isinstance(document, dict) and document.get("version") != RECORD_VERSION:
            raise StateError(
                f"slot record of version {document.get('version')!r}, this program reads {RECORD_VERSION}: "
                "use the program that wrote it"
            )
        try:
            parsed = _Document.model_validate(_tuples(document), strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise StateError(f"slot record is damaged at {where}: {problem['msg']}") from None
        return cls(
            promised=epoch_from_wire(parsed.promised),
            accepted=_held(parsed.accepted),
            active=_held(parsed.active),
            last_active=epoch_from_wire(parsed.last_active),
            closed=epoch_from_wire(parsed.closed),
            cache_epoch=parsed.cache_epoch,
            first_request_id=parsed.first_request_id,
        )

    def validate(self) -> None:
        """Internal order of the ballots; asserts."""
        assert self.last_active <= self.promised, (self.last_active, self.promised)
        if self.active is not None:
            assert self.active.ballot == self.last_active, (self.active.ballot, self.last_active)
            assert self.active.ballot != self.closed, self.closed
        if self.accepted is not None:
            assert self.accepted.ballot <= self.promised, (self.accepted.ballot, self.promised)


class _HeldDocument(Wire):
    model_config = ConfigDict(extra="forbid")

    ballot: Epoch
    plan_hash: Digest
    assignment: StageAssignment


class _Document(Wire):
    model_config = ConfigDict(extra="forbid")

    version: int
    promised: Epoch
    accepted: _HeldDocument | None
    active: _HeldDocument | None
    last_active: Epoch
    closed: Epoch
    cache_epoch: Count
    first_request_id: Count


def _held_document(held: HeldPlan | None) -> _HeldDocument | None:
    if held is None:
        return None
    return _HeldDocument(ballot=epoch_to_wire(held.ballot), plan_hash=held.plan_hash, assignment=held.assignment)


def _held(document: _HeldDocument | None) -> HeldPlan | None:
    if document is None:
        return None
    return HeldPlan(epoch_from_wire(document.ballot), document.plan_hash, document.assignment)


def _tuples(value: object) -> object:
    """JSON and msgpack give lists where the strict models want tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in value)
    return value
