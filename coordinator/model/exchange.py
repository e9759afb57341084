"""A ``ModelPackage`` as bytes between nodes, so that a coordinator without the file can plan it.

msgpack of plain lists; strict on the way in: every number is checked against the bounds of a row's numbers, and a
package with no layers, or more than ``MAX_LAYERS``, is refused.
"""

from dataclasses import asdict
from typing import Annotated

import msgpack
from pydantic import Field, ValidationError

from config.cache_types import DEFAULT_CACHE_TYPE, CacheType
from coordinator.model.package import ForbiddenBoundary, Layer, ModelPackage
from protocol.codec import first_problem, unpack
from protocol.errors import WireError
from protocol.wire import Bytes, Count, Digest, Wire

MAX_LAYERS = 4_096


class _Layer(Wire):
    weight_bytes: Bytes
    streamed_bytes: Bytes
    kv_bytes_per_token: Bytes
    kv_window_tokens: Annotated[int, Field(ge=1)] | None
    recurrent_bytes_per_sequence: Bytes


class _Boundary(Wire):
    layer: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    reason: Annotated[str, Field(max_length=512)]


class _Package(Wire):
    name: Annotated[str, Field(max_length=512)]
    digest: Digest
    layers: Annotated[tuple[_Layer, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    shared_first_bytes: Bytes
    shared_last_bytes: Bytes
    native_context_length: Annotated[int, Field(ge=1, le=2**32)]
    activation_frame_bytes: Bytes
    activation_width: Count | None
    forbidden_boundaries: Annotated[tuple[_Boundary, ...], Field(max_length=MAX_LAYERS)]
    required_sideband_bytes: Bytes
    diagnostics: Annotated[tuple[Annotated[str, Field(max_length=512)], ...], Field(max_length=64)]
    architecture: Annotated[str, Field(max_length=128)]
    tied_embeddings: bool
    cache_type: CacheType = DEFAULT_CACHE_TYPE


def package_to_document(package: ModelPackage) -> bytes:
    """About 40 bytes a layer."""
    raw: bytes = msgpack.packb(asdict(package), use_bin_type=True)
    return raw


def package_from_document(raw: bytes) -> ModelPackage:
    """Inverse of ``package_to_document``. Raises ``WireError('malformed')``."""
    try:
        read = _Package.model_validate(unpack(raw))
    except ValidationError as error:
        raise WireError("malformed", f"model package: {first_problem(error)}") from None
    fields = {name: getattr(read, name) for name in _Package.model_fields}
    fields["layers"] = tuple(Layer(**layer.model_dump()) for layer in read.layers)
    fields["forbidden_boundaries"] = tuple(
        ForbiddenBoundary(each.layer, each.reason) for each in read.forbidden_boundaries
    )
    return ModelPackage(**fields)
