"""Who may have a model's files: one pure function.

* ``off``      nobody.
* ``trusted``  an admitted peer whose own signed row says that it holds or loads a stage of a model which needs this file.
* ``open``     every admitted peer.

An assignment is read from the peer's row (``StageFact`` with an accepted or active ballot), as readiness is: rows are
signed by their owner and spread by gossip, so every holder can judge, also one that is not part of the plan. An admitted
node that lies about itself could get a file that it was not assigned; it could as well have asked to be assigned.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from protocol.rows import NodeRow

Mode = Literal["off", "trusted", "open"]
Verdict = Literal["allowed", "mode_off", "not_allowed"]

HOLDING = frozenset({"loading", "ready", "serving", "draining"})


@dataclass(frozen=True, slots=True)
class AssignedRange:
    """Layers ``[layer_start, layer_end)`` of the model are a peer's stage, or about to be."""

    model_digest: str
    layer_start: int
    layer_end: int


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file is needed by stages that overlap ``[layer_start, layer_end)`` of the model."""

    model_digest: str
    layer_start: int
    layer_end: int


def assigned_ranges(row: NodeRow) -> tuple[AssignedRange, ...]:
    """The stages that a row claims."""
    return tuple(
        AssignedRange(fact.model_digest, fact.layer_start, fact.layer_end)
        for fact in row.stages
        if fact.state in HOLDING and fact.model_digest is not None and (fact.accepted or fact.active) is not None
    )


def judge_manifest(mode: Mode, *, admitted: bool, assigned: Iterable[AssignedRange], model_digest: str) -> Verdict:
    """May the peer see which files make up the model?"""
    if mode == "off":
        return "mode_off"
    if admitted and (mode == "open" or any(held.model_digest == model_digest for held in assigned)):
        return "allowed"
    return "not_allowed"


def judge_file(mode: Mode, *, admitted: bool, assigned: Iterable[AssignedRange], uses: Iterable[FileUse]) -> Verdict:
    """May the peer have the bytes of a file with these uses?"""
    if mode == "off":
        return "mode_off"
    if not admitted:
        return "not_allowed"
    if mode == "open":
        return "allowed"
    held = tuple(assigned)
    for use in uses:
        for stage in held:
            overlaps = stage.layer_start < use.layer_end and use.layer_start < stage.layer_end
            if stage.model_digest == use.model_digest and overlaps:
                return "allowed"
    return "not_allowed"
