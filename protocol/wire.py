"""Base of every wire type, and the bounded scalars they are made of.

Units: bytes, microseconds, bytes per second. Ages are durations at the moment of sending, never timestamps. Bounds are
part of the type: a list longer than its bound is malformed, not truncated.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_INTEGER = 2**53
"""Above this a number is not a measurement but an attack or a bug."""

Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Bytes = Count
Micros = Count
NodeName = Annotated[str, Field(min_length=1, max_length=64)]
Id = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.\-]+$")]
InstanceId = Annotated[str, Field(min_length=32, max_length=32, pattern=r"^[0-9a-f]+$")]
Digest = Annotated[str, Field(min_length=64, max_length=64, pattern=r"^[0-9a-f]+$")]
Label = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=512)]
Address = Annotated[str, Field(min_length=3, max_length=128)]
"""``host:port``, IPv6 in brackets."""


class Wire(BaseModel):
    """Base of all wire types: frozen, strict, unknown fields ignored, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class Epoch(Wire):
    """A ballot on the wire; see ``protocol.fencing.PlanEpoch`` for its order."""

    term: Count
    node_id: Annotated[str, Field(max_length=64)]
    instance: Annotated[str, Field(max_length=32)]
