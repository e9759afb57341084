"""Which of a machine's devices hold layers, and how much memory that is. Pure.

A graphics card beside the processor is not more memory for the same stage: an engine that runs on the cards reads weights
from their memory, and main memory only helps to load. So a node offers either its cards or its processor.
"""

import re
from collections.abc import Sequence

from config.settings import Settings
from protocol.rows import DeviceFact

_ENGINES_ON_CARDS = frozenset({"llama_cpp", "process"})
"""The reference engine and the mapped runtime use the processor."""


def place_layers(devices: Sequence[DeviceFact], settings: Settings) -> tuple[DeviceFact, ...]:
    """``devices`` with ``holds_layers`` set by ``node.layers_on`` and the engine.

    ``auto``: the cards when the engine can use cards and is not told otherwise, else the processor. Cards are devices with
    memory of their own (or Apple's): graphics built into a processor (kind ``other``) only hold layers when ``layers_on``
    says ``accelerators``. When there is no accelerator, the processor holds them, whatever was asked.
    """
    chosen = _cards(devices, settings) or [device for device in devices if device.kind == "cpu"]
    return tuple(
        device.model_copy(update={"holds_layers": any(device is each for each in chosen)}) for device in devices
    )


def may_use_cards(settings: Settings) -> bool:
    """False when cards decide nothing here, so that nobody need ask a driver for them."""
    asked = settings.node.layers_on
    return asked == "accelerators" or (asked == "auto" and settings.runtime.kind in _ENGINES_ON_CARDS)


def layer_memory_bytes(devices: Sequence[DeviceFact]) -> int:
    """What the devices that hold layers have together."""
    return sum(device.memory_bytes for device in devices if device.holds_layers)


def _cards(devices: Sequence[DeviceFact], settings: Settings) -> list[DeviceFact]:
    asked, named = settings.node.layers_on, settings.runtime.llama_devices
    accelerators = [device for device in devices if device.kind != "cpu" and device.memory_bytes]
    if asked == "accelerators":
        return accelerators
    if not may_use_cards(settings):
        return []
    cards = [device for device in accelerators if device.kind != "other"]
    if settings.runtime.kind != "llama_cpp" or not named:
        return cards
    return _named(cards, named.split(","))


def _named(cards: Sequence[DeviceFact], names: Sequence[str]) -> list[DeviceFact]:
    """The cards behind llama.cpp's device names: ``CUDA1`` is the second CUDA card, ``Vulkan0`` the first of all.

    ``CPU`` and numbers that do not exist give none.
    """
    found: list[DeviceFact] = []
    for name in names:
        match = re.fullmatch(r"\s*([A-Za-z]+)(\d*)\s*", name)
        if match is None or match[1].upper() == "CPU":
            continue
        same = [card for card in cards if card.kind == match[1].lower()] or cards
        found += same[int(match[2] or 0) :][:1]
    return found
