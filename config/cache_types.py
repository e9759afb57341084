"""The element types an engine may keep its attention cache in: named here because the settings offer them."""

from typing import Literal

CacheType = Literal["f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
DEFAULT_CACHE_TYPE: CacheType = "f16"
UNQUANTISED: frozenset[CacheType] = frozenset({"f16", "bf16", "f32"})
