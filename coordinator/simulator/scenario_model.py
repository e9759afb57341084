"""The ``[model]`` table: stated layer by layer, or read from a file by a function that the caller supplies."""

import hashlib
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from typing import Any, cast, get_args

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType
from coordinator.model.package import ForbiddenBoundary, Layer, ModelPackage
from coordinator.planner.plan import PlanRefused
from coordinator.planner.problem import KvCache
from coordinator.planner.validate import MAX_LAYERS
from coordinator.simulator.toml_table import Table
from coordinator.simulator.units import ceil_div
from protocol.errors import ModelError

ModelOpener = Callable[[str, CacheType], ModelPackage]
"""Path, and the element type of the attention cache that its memory is counted by. Raises ``ModelError``."""

BYTES_PER_ACTIVATION_F16 = 2

_STATED = (
    "layer_count", "weight_bytes_per_layer", "layer_weight_bytes", "shared_first_bytes", "shared_last_bytes",
    "active_weight_fraction", "activation_width", "forbidden_boundaries", "recurrent_bytes_per_sequence",
    "kv_bytes_per_token", "native_context_length", "activation_frame_bytes", "name",
)  # fmt: skip


def read_model(table: Table | None, open_model: ModelOpener) -> tuple[ModelPackage | PlanRefused, KvCache | None]:
    """The package, or the refusal that names the missing fact; and how lanes share the cache."""
    if table is None:
        return PlanRefused("missing_layers", "the scenario has no [model] table"), None
    kv_cache = cast("KvCache | None", table.choice("kv_cache", ("per_lane", "unified")))
    cache_type = cast("CacheType | None", table.choice("cache_type", get_args(CacheType)))
    path = table.text("path")
    if path is None:
        if cache_type is not None:
            table.fail("cache_type", "needs path; without a file kv_bytes_per_token says what the cache takes")
        return _stated(table), kv_cache
    for key in _STATED:
        if key in table:
            table.fail(key, "cannot be combined with path: the file says it")
    try:
        return open_model(path, cache_type or DEFAULT_CACHE_TYPE), kv_cache
    except ModelError as error:
        table.fail("path", str(error))


def _stated(table: Table) -> ModelPackage | PlanRefused:
    count = table.whole("layer_count", high=MAX_LAYERS)
    width = table.whole("activation_width", low=1, high=2**24)
    frame = table.whole("activation_frame_bytes", high=2**40)
    native = table.whole("native_context_length", high=2**31)
    first, last = table.whole("shared_first_bytes") or 0, table.whole("shared_last_bytes") or 0
    name = table.text("name") or "scenario"
    layers = _layers(table, count or 0)
    forbidden = _forbidden(table, count or 0)
    if not count:
        return PlanRefused("missing_layers", "[model] layer_count is missing or 0")
    if isinstance(layers, PlanRefused):
        return layers
    if not native:
        return PlanRefused("missing_native_context", "[model] native_context_length is missing or 0")
    if sum(layer.weight_bytes for layer in layers) + first + last > 2**53:
        table.fail(None, "all weights together are beyond 2^53 bytes")
    if frame is None:
        frame = 0 if width is None else width * BYTES_PER_ACTIVATION_F16
    digest = hashlib.sha256(repr((name, layers, first, last, native, frame, forbidden)).encode()).hexdigest()
    return ModelPackage(
        name=name,
        digest=digest,
        layers=layers,
        shared_first_bytes=first,
        shared_last_bytes=last,
        native_context_length=native,
        activation_frame_bytes=frame,
        activation_width=width,
        forbidden_boundaries=forbidden,
    )


def _layers(table: Table, count: int) -> tuple[Layer, ...] | PlanRefused:
    if "weight_bytes_per_layer" in table and "layer_weight_bytes" in table:
        table.fail("layer_weight_bytes", "cannot be combined with weight_bytes_per_layer")
    uniform = table.whole("weight_bytes_per_layer")
    listed = table.numbers("layer_weight_bytes", count) if isinstance(table.peek("layer_weight_bytes"), list) else None
    if listed is None and "layer_weight_bytes" in table:
        table.fail(
            "layer_weight_bytes", "needs a list with one entry per layer; weight_bytes_per_layer takes one number"
        )
    fractions = table.numbers("active_weight_fraction", count, high=1, whole=False) or [Decimal(1)] * count
    if not all(fractions):
        table.fail("active_weight_fraction", "is 0: every token reads some weights; leave it out for a dense model")
    recurrent = table.numbers("recurrent_bytes_per_sequence", count) or [Decimal(0)] * count
    total_or_list = table.peek("kv_bytes_per_token")
    kv = table.numbers("kv_bytes_per_token", count, high=2**40)
    if not count:
        return ()
    if uniform is None and listed is None:
        return PlanRefused("missing_weights", "[model] needs weight_bytes_per_layer or layer_weight_bytes")
    if kv is None:
        return PlanRefused(
            "missing_kv",
            "[model] kv_bytes_per_token is missing; a model without attention states recurrent_bytes_per_sequence and 0 here",
        )
    if not isinstance(total_or_list, list):
        kv = [Decimal(ceil_div(int(kv[0]), count))] * count
    weights = listed or [Decimal(uniform or 0)] * count
    return tuple(
        Layer(
            weight_bytes=int(weight),
            streamed_bytes=int((weight * fraction).to_integral_value(rounding=ROUND_CEILING)),
            kv_bytes_per_token=int(cache),
            recurrent_bytes_per_sequence=int(state),
        )
        for weight, fraction, cache, state in zip(weights, fractions, kv, recurrent, strict=True)
    )


def _forbidden(table: Table, count: int) -> tuple[ForbiddenBoundary, ...]:
    boundaries: list[ForbiddenBoundary] = []
    for entry in table.entries("forbidden_boundaries"):
        layer, reason = _forbidden_entry(table, entry)
        if not 1 <= layer < max(count, 1):
            table.fail("forbidden_boundaries", f"{layer} is not a boundary inside 1 … {count - 1}")
        boundaries.append(ForbiddenBoundary(layer, reason))
    return tuple(sorted(boundaries, key=lambda boundary: boundary.layer))


def _forbidden_entry(table: Table, entry: Any) -> tuple[int, str]:
    if isinstance(entry, dict) and entry.keys() <= {"layer", "reason"}:
        layer, reason = entry.get("layer"), entry.get("reason", "forbidden")
    else:
        layer, reason = entry, "forbidden"
    if isinstance(layer, bool) or not isinstance(layer, int) or not isinstance(reason, str):
        table.fail("forbidden_boundaries", 'needs layer numbers, or { layer = 3, reason = "…" }')
    return layer, reason
