"""Which stage needs a safetensors tensor: decided by the names that checkpoints use."""

import re

from coordinator.model.tensor_roles import Role

_LAYER = re.compile(r"^(?P<tower>.*?)(?:^|\.)(?:layers|h|blocks|block)\.(?P<index>\d{1,6})\.")
_OTHER_TOWER = re.compile(r"vision|visual|image|audio|speech|encoder|projector|resampler|mtp", re.IGNORECASE)
_EXPERTS = re.compile(r"\bexperts\.")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$")
_HEAD = re.compile(r"^(.*\.)?(lm_head|embed_out)\.|^output\.(weight|bias)$")
_LAST_NORM = re.compile(
    r"^(.*\.)?(norm|ln_f|final_layernorm|final_layer_norm|final_norm|embedding_norm)\.(weight|bias)$"
)


def safetensors_role(name: str, layer_count: int) -> Role | None:
    """The stage a tensor belongs to; ``None`` for layers behind the last (multi-token prediction)."""
    match = _LAYER.match(name)
    if match is not None and not _OTHER_TOWER.search(match["tower"]):
        index = int(match["index"])
        return Role(layer=index) if index < layer_count else None
    if _OTHER_TOWER.search(name):
        return Role(first=True)
    return Role(last=True) if is_head(name) or _LAST_NORM.match(name) else Role(first=True)


def is_embedding(name: str) -> bool:
    """Whether this is the token embedding of the language model."""
    return _EMBEDDING.search(name) is not None and not _OTHER_TOWER.search(name)


def is_head(name: str) -> bool:
    """Whether this is part of the output head."""
    return _HEAD.match(name) is not None


def is_routed_expert(name: str) -> bool:
    """Whether only the chosen experts' share of this tensor is read for a token."""
    return _EXPERTS.search(name) is not None
