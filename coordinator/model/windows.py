"""Which layers use sliding-window attention, and how wide: stated by the file, or known for the architecture.

Files often give only ``attention.sliding_window``; engines then know the pattern by architecture ("every n-th layer
attends to everything"). An architecture that is not in the table and states no pattern is planned with full attention:
too much memory rather than too little (diagnostic ``sliding_window_ignored``).
"""

from dataclasses import dataclass

from coordinator.model.facts import ArchitectureFacts


@dataclass(frozen=True, slots=True)
class WindowPattern:
    """Every ``period``-th layer is full: the last of each group, or the first when ``dense_first``."""

    period: int
    dense_first: bool = False
    window: int = 0
    """Window when the file states none; 0 = the file must state it."""


WINDOW_PATTERNS: dict[str, WindowPattern] = {
    "afmoe": WindowPattern(4),
    "cohere2": WindowPattern(4),
    "exaone-moe": WindowPattern(4),
    "exaone4": WindowPattern(4),
    "gemma-embedding": WindowPattern(6),
    "gemma2": WindowPattern(2, window=4096),
    "gemma3": WindowPattern(6),
    "gemma3n": WindowPattern(5),
    "gpt-oss": WindowPattern(2),
    "llama4": WindowPattern(4, window=8192),
    "modern-bert": WindowPattern(3, dense_first=True),
    "olmo2": WindowPattern(4),
    "plamo3": WindowPattern(8),
    "smallthinker": WindowPattern(4, dense_first=True),
}


def layer_windows(facts: ArchitectureFacts, layer_count: int) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """Window in tokens per layer (``None`` = full attention) and diagnostics."""
    known = WINDOW_PATTERNS.get(facts.architecture)
    window = facts.integer("attention.sliding_window", known.window if known else 0, most=1 << 40)
    if not window:
        return (None,) * layer_count, ()
    suffix = "attention.sliding_window_pattern"
    if facts.is_array(suffix):
        flags = facts.per_layer(suffix, layer_count) or ()
        return tuple(window if flag else None for flag in flags), ()
    if not facts.has(suffix) and known is None:
        return (None,) * layer_count, ("sliding_window_ignored",)
    period = facts.integer(suffix, known.period if known else 1)
    dense_first = known is not None and known.dense_first
    return tuple(window if _slides(index, period, dense_first) else None for index in range(layer_count)), ()


def _slides(index: int, period: int, dense_first: bool) -> bool:
    if period == 0:
        return True
    return index % period != (0 if dense_first else period - 1)
