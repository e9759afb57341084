"""Where logits are made, as the engine places them: what the planner must not charge to the last stage. Pure.

In a star every activation passes through the head, which holds the embedding. When the output layer is that same matrix
(tied embeddings) the head computes the logits itself: the last stage then keeps no copy of it and streams none, the
vocabulary's logits never cross a link, and the head streams the matrix once per token. That one pass is what charging the
embedding to the first stage already prices. ``tied_output = "last"`` orders otherwise: the last stage holds and streams a copy
of its own. The engine's head reads from its assignment which of the two the plan has charged, so both always agree.
"""

from dataclasses import dataclass, replace

from coordinator.model.package import ModelPackage
from coordinator.planner.memory import parameter_bytes
from coordinator.planner.problem import Calibration
from coordinator.planner.transfer import transfer_us


def as_placed(model: ModelPackage, calibration: Calibration) -> ModelPackage:
    """``model`` with its shared bytes where an engine of this topology holds them."""
    if calibration.topology != "star" or not model.tied_embeddings or calibration.tied_output == "last":
        return model
    return replace(model, shared_last_bytes=max(0, model.shared_last_bytes - model.shared_first_bytes))


def last_holds_copy(model: ModelPackage, layer_start: int, charged_bytes: int) -> bool:
    """Whether a last stage from ``layer_start`` on was charged ``charged_bytes`` for a copy of the tied embedding, too."""
    return charged_bytes >= parameter_bytes(model, layer_start, model.layer_count)


@dataclass(frozen=True, slots=True)
class ReadoutSpeeds:
    """What decides where an output layer of its own is cheaper. Bytes per second; ``None`` = not known."""

    head_bytes_per_s: int | None
    """Main memory of the head: the engine keeps the output layer there, whatever device holds the head's layers."""
    last_bytes_per_s: int | None
    """The device that holds the last stage's layers."""
    link_bytes_per_s: int | None
    """From the last stage to the head; unknown costs nothing, as everywhere."""


def head_reads_out_cheaper(output_bytes: int, logit_bytes: int, speeds: ReadoutSpeeds) -> bool:
    """Whether a token costs less when the head makes the logits than when the last stage does and sends them.

    The head streams the matrix from its main memory; the last stage streams it from its own and puts ``logit_bytes`` on the
    link instead of one activation frame, which is small beside them. Memory costs something, so equal is not cheaper, and a
    guess is not enough.
    """
    if speeds.head_bytes_per_s is None or speeds.last_bytes_per_s is None:
        return False
    at_last_us = transfer_us(output_bytes, speeds.last_bytes_per_s) + transfer_us(logit_bytes, speeds.link_bytes_per_s)
    return transfer_us(output_bytes, speeds.head_bytes_per_s) < at_last_us
