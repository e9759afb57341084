"""Rows: what a node says of itself, and what others may say of it.

A row is owned and signed by its node; only accusations (suspect, dead) are made by others.
"""

from typing import Annotated, Literal

from pydantic import Field

from config.cache_types import DEFAULT_CACHE_TYPE
from protocol.ballots import FormerSplit
from protocol.orders import MAX_ORDERS, OperatorOrder
from protocol.wire import (
    MAX_INTEGER,
    Address,
    Bytes,
    Count,
    Digest,
    Epoch,
    Id,
    InstanceId,
    Label,
    Micros,
    NodeName,
    Text,
    Wire,
)


class DeviceFact(Wire):
    """One compute device and its memory; ``holds_layers``: the owner's stages lie there."""

    name: Label
    kind: Literal["cpu", "cuda", "rocm", "metal", "vulkan", "opencl", "other"]
    memory_bytes: Bytes
    memory_bandwidth_bytes_per_s: Count | None = None
    compute_flops_per_s: Count | None = None
    source: Literal["measured", "shaped", "spec", "unknown"] = "unknown"
    measured_age_us: Micros | None = None
    holds_layers: bool = True


class LinkFact(Wire):
    """What the row's owner measured on its outgoing link to ``target``."""

    target: Id
    min_rtt_us: Micros | None = None
    samples: Count = 0
    first_age_us: Micros = 0
    last_age_us: Micros = 0
    jitter_us: Micros | None = None
    send_bytes_per_s: Count | None = None
    receive_bytes_per_s: Count | None = None
    bandwidth_age_us: Micros | None = None
    bandwidth_limited_by: Literal["link", "app", "cpu", "window"] | None = None
    """Of sending, if that is known, else of receiving."""
    receive_limited_by: Literal["link", "app", "cpu", "window"] | None = None
    """Only where it differs from ``bandwidth_limited_by``."""
    degraded: bool = False
    over_tcp: bool = False
    """UDP does not pass on this link: control runs over the TLS lane."""
    shaped: bool = False
    estimated: bool = False


class StageFact(Wire):
    """The agent's own word about one slot; readiness is read from here and nowhere else."""

    slot: Id
    state: Literal["idle", "loading", "ready", "serving", "draining", "failed"]
    promised: Epoch | None = None
    accepted: Epoch | None = None
    active: Epoch | None = None
    plan_hash: Digest | None = None
    model_digest: Digest | None = None
    layer_start: Count = 0
    layer_end: Count = 0
    stage_index: Count = 0
    stage_count: Count = 0
    context_length: Count = 0
    lanes: Count = 0
    cache_type: Label = DEFAULT_CACHE_TYPE
    required_bytes: Bytes = 0
    loaded_bytes: Bytes = 0
    total_bytes: Bytes = 0
    decode_us_per_layer: Micros | None = None
    decode_samples: Count = 0
    decode_age_us: Micros | None = None
    tpot_us: Micros | None = None
    """Stage 0 only: mean time per output token since the plan became active, hops included."""
    tpot_tokens: Count = 0
    former: FormerSplit | None = None
    """Stage 0 only: what the last move of cuts replaced."""
    detail: Text = ""


class ModelFact(Wire):
    """A model this node can read from its own disk, or an artifact share of it."""

    digest: Digest
    cached_bytes: Bytes = 0
    missing_bytes: Bytes = 0
    artifact_transfer: bool = False


class ServedModel(Wire):
    """An operator's wish for one slot. Every node repeats the highest version it knows, so no node's death ends it."""

    slot: Id
    source: Annotated[str, Field(max_length=1024)]
    digest: Digest
    priority: Count = 0
    version: Count = 0
    removed: bool = False
    """Not wanted any more; outlives the wish it ends, or an old row would bring that back."""


class Coordinate(Wire):
    """Network coordinate of a node (Vivaldi): µs in three dimensions, the height of its access link, its own error."""

    x_us: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] = 0
    y_us: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] = 0
    z_us: Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)] = 0
    height_us: Micros = 0
    error_milli: Annotated[int, Field(ge=0, le=1_500)] = 1_500


class NodeRow(Wire):
    """Everything a node says of itself. Ordered by ``(boot_counter, seq)``; the higher row replaces the lower whole."""

    node_id: Id
    public_key: Annotated[bytes, Field(min_length=32, max_length=32)]
    boot_counter: Count
    seq: Count
    instance: InstanceId
    incarnation: Count = 0
    name: NodeName
    version: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=16)] = ()
    status: Literal["running", "draining", "leaving", "left"] = "running"
    degraded: Annotated[tuple[Label, ...], Field(max_length=16)] = ()
    detected_memory_bytes: Bytes = 0
    memory_cap_bytes: Bytes | None = None
    runtime_headroom_bytes: Bytes | None = None
    memory_source: Literal["measured", "shaped"] = "measured"
    devices: Annotated[tuple[DeviceFact, ...], Field(max_length=64)] = ()
    links: Annotated[tuple[LinkFact, ...], Field(max_length=1024)] = ()
    stages: Annotated[tuple[StageFact, ...], Field(max_length=16)] = ()
    models: Annotated[tuple[ModelFact, ...], Field(max_length=64)] = ()
    serves: Annotated[tuple[ServedModel, ...], Field(max_length=16)] = ()
    orders: Annotated[tuple[OperatorOrder, ...], Field(max_length=MAX_ORDERS)] = ()
    max_term: Count = 0
    can_coordinate: bool = True
    can_host_stage: bool = True
    engine: Label = ""
    keeps_loads: bool = True
    """See ``Promise.keeps_loads``."""
    coordinate: Coordinate | None = None
    api_address: Annotated[str, Field(max_length=128)] = ""
    """``host:port`` of the node's HTTP API, told only when others can reach it; for people and scrapers."""


class SignedRow(Wire):
    """A row as its owner's exact bytes (msgpack of ``NodeRow``) and the Ed25519 signature over them."""

    payload: Annotated[bytes, Field(max_length=262_144)]
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]


class Accusation(Wire):
    """What others may say of a node: suspect or dead, about one incarnation of one boot."""

    node_id: Id
    boot_counter: Count
    incarnation: Count
    verdict: Literal["suspect", "dead"]
    accuser: Id


class Refutation(Wire):
    """The owner's short answer to an accusation: alive in ``incarnation``, and ``seq`` is its latest row.

    Fits a datagram where a row may not. Signed over ``protocol.membership.signing.refutation_bytes``.
    """

    node_id: Id
    boot_counter: Count
    incarnation: Count
    seq: Count
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]


class Admission(Wire):
    """``signer`` (an admitted node) admits or revokes ``node_id``. Signed over the canonical bytes of the other fields.

    ``successor`` is the id of the one key that may take this node's place; empty when its key cannot be rotated.
    """

    mesh_id: Id
    node_id: Id
    public_key: Annotated[bytes, Field(min_length=32, max_length=32)]
    version: Count
    revoked: bool = False
    successor: Annotated[str, Field(max_length=64)] = ""
    signer: Id
    signer_public_key: Annotated[bytes, Field(min_length=32, max_length=32)]
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]
