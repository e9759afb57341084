"""Where logits are made, as the engine places them: what the planner must not charge to the last stage. Pure.

In a star every activation passes through the head, which holds the embedding. When the output layer is that same matrix
(tied embeddings) the head computes the logits itself: the last stage then keeps no copy of it and streams none, the
vocabulary's logits never cross a link, and the head streams the matrix once per token. That one pass is what charging the
embedding to the first stage already prices.
"""

from dataclasses import replace

from coordinator.model.package import ModelPackage
from coordinator.planner.problem import Calibration


def as_placed(model: ModelPackage, calibration: Calibration) -> ModelPackage:
    """``model`` with its shared bytes where an engine of this topology holds them."""
    if calibration.topology != "star" or not model.tied_embeddings:
        return model
    return replace(model, shared_last_bytes=max(0, model.shared_last_bytes - model.shared_first_bytes))
