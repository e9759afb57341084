"""AMD's cards through ``amdsmi``, the Python package that comes with ROCm. Nothing here is required.

It adds what OpenCL does not know: how much of a card's memory is free. Its own figure of bandwidth is the vendor's, marked
``spec``. Sizes are in MiB and bandwidth in GB/s there. OpenCL names a card by its graphics version (``gfx1100``), people by
``market_name``: both are kept, so that one card is not taken for two.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from protocol.rows import DeviceFact
from stage_agent.probes.devices import MAX_DEVICES

MIB = 2**20


@dataclass(frozen=True, slots=True)
class AmdCard:
    """``graphics_version`` is the name that OpenCL has for it, or one like it."""

    fact: DeviceFact
    graphics_version: str


def amd_cards() -> tuple[AmdCard, ...]:
    """One per card; none without the package, its library or a card."""
    try:
        import amdsmi
    except (ImportError, KeyError, OSError):  # the package answers a missing library with each of them
        return ()
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException:
        return ()
    try:
        return tuple(_cards(amdsmi))
    finally:
        with contextlib.suppress(amdsmi.AmdSmiException):
            amdsmi.amdsmi_shut_down()


def _cards(amdsmi: Any) -> Iterator[AmdCard]:
    with contextlib.suppress(amdsmi.AmdSmiException):
        for handle in amdsmi.amdsmi_get_processor_handles()[:MAX_DEVICES]:
            with contextlib.suppress(amdsmi.AmdSmiException):  # one that cannot be read hides no other
                yield _card(amdsmi, handle)


def _card(amdsmi: Any, handle: Any) -> AmdCard:
    known, memory = amdsmi.amdsmi_get_gpu_asic_info(handle), amdsmi.amdsmi_get_gpu_vram_usage(handle)
    bandwidth = None
    with contextlib.suppress(amdsmi.AmdSmiException):
        gigabytes_per_s = amdsmi.amdsmi_get_gpu_vram_info(handle).get("vram_max_bandwidth")
        if isinstance(gigabytes_per_s, int) and gigabytes_per_s > 0:  # "N/A" where the driver does not say
            bandwidth = gigabytes_per_s * 10**9
    fact = DeviceFact(
        name=str(known["market_name"])[:64],
        kind="rocm",
        memory_bytes=max(0, memory["vram_total"] - memory["vram_used"]) * MIB,
        memory_bandwidth_bytes_per_s=bandwidth,
        source="spec" if bandwidth else "unknown",
    )
    return AmdCard(fact, str(known.get("target_graphics_version", "")))
