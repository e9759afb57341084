"""Which stage needs a tensor, and how much of it one token reads: decided by GGUF tensor names.

``blk.N.*`` belongs to layer N. Of the rest, the output head and its norm belong to the last stage, rope tables to every
stage (charged once, to the first), everything else (embeddings, per-layer embeddings, encoders) to the first.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.model.facts import ArchitectureFacts
from protocol.errors import ModelError

TOKEN_EMBEDDING = "token_embd.weight"  # noqa: S105 - a tensor's name
OUTPUT_HEAD = "output.weight"
_LAYER = re.compile(r"^blk\.(\d{1,6})\.(.+)$")
_LAST = re.compile(r"^(output(_norm)?|output_\w+|altup_unembd_proj|cls|cls_out|dense_[23])\.|^(nextn|mtp)\.")
_EVERYWHERE = re.compile(r"^rope_")
_EXPERTS = re.compile(r"_(?:ch)?exps\b|^ffn_(gate|up|down)\.\d+\.")


@dataclass(frozen=True, slots=True)
class Role:
    """``layer`` is set for a block's tensor; otherwise exactly one of the three flags."""

    layer: int | None = None
    first: bool = False
    last: bool = False
    everywhere: bool = False


def role_of(name: str) -> Role:
    """The stage a tensor belongs to. Total: a name nobody knows goes to the first stage."""
    match = _LAYER.match(name)
    if match is not None:
        return Role(layer=int(match[1]))
    if _LAST.match(name):
        return Role(last=True)
    if _EVERYWHERE.match(name):
        return Role(everywhere=True)
    return Role(first=True)


@dataclass(slots=True)
class LayerBytes:
    """Sum over one layer's tensors; ``expert_bytes`` is the part of which a token reads only ``used`` of ``count``."""

    weight_bytes: int = 0
    expert_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WeightTally:
    """Bytes by role. ``layers`` holds only the indices that occur."""

    layers: dict[int, LayerBytes]
    first_bytes: int
    last_bytes: int
    embedding_bytes: int
    """Of ``token_embd.weight`` alone; 0 when the file has none."""
    has_head: bool


def tally(tensors: Iterable[tuple[str, int]]) -> WeightTally:
    """Add up (name, bytes) pairs."""
    layers: dict[int, LayerBytes] = {}
    first_bytes = last_bytes = embedding_bytes = 0
    has_head = False
    for name, nbytes in tensors:
        role = role_of(name)
        if role.layer is not None:
            layer = layers.setdefault(role.layer, LayerBytes())
            layer.weight_bytes += nbytes
            if is_expert(name):
                layer.expert_bytes += nbytes
        elif role.last:
            last_bytes += nbytes
            has_head = has_head or name == OUTPUT_HEAD
        else:
            first_bytes += nbytes
            embedding_bytes += nbytes if name == TOKEN_EMBEDDING else 0
    return WeightTally(layers, first_bytes, last_bytes, embedding_bytes, has_head)


def is_expert(name: str) -> bool:
    """Whether only the chosen experts' share of this tensor is read for a token (shared experts are always read)."""
    match = _LAYER.match(name)
    return match is not None and _EXPERTS.search(match[2]) is not None


def expert_share(facts: ArchitectureFacts, layer_count: int) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
    """(used, count) per layer; (1, 1) where every expert must be assumed active, with a diagnostic.

    Raises ``ModelError`` when more experts are used than there are.
    """
    counts = facts.per_layer("expert_count", layer_count) or (0,) * layer_count
    used = facts.per_layer("expert_used_count", layer_count)
    if used is None:
        return [(1, 1)] * layer_count, ("expert_used_count_missing",) if any(counts) else ()
    for count, chosen in zip(counts, used, strict=True):
        if chosen > count > 0:
            raise ModelError(f"{facts.where}: {facts.key('expert_used_count')} is {chosen} of only {count} experts")
    return [(chosen, count) if count and chosen else (1, 1) for count, chosen in zip(counts, used, strict=True)], ()
