"""Whose memory holds layers: a card beside the processor is not more memory for the same stage."""

import pytest

from config.settings import NodeSettings, RuntimeSettings, Settings
from protocol.rows import DeviceFact
from stage_agent.probes.placement import layer_memory_bytes, place_layers

CPU = DeviceFact(name="cpu", kind="cpu", memory_bytes=64)
CARD = DeviceFact(name="4090", kind="cuda", memory_bytes=24)
TWIN = DeviceFact(name="4090", kind="cuda", memory_bytes=24)
BUILT_IN = DeviceFact(name="iris", kind="other", memory_bytes=32)
ARC = DeviceFact(name="arc", kind="opencl", memory_bytes=12)


def layers_on(devices, engine="llama_cpp", asked="auto", named=""):
    settings = Settings(node=NodeSettings(layers_on=asked), runtime=RuntimeSettings(kind=engine, llama_devices=named))
    placed = place_layers(devices, settings)
    return [index for index, device in enumerate(placed) if device.holds_layers], layer_memory_bytes(placed)


@pytest.mark.parametrize(
    ("devices", "options", "expected"),
    [
        ((CPU,), {}, ([0], 64)),
        ((CPU, CARD), {}, ([1], 24)),
        ((CPU, CARD), {"engine": "process"}, ([1], 24)),
        ((CPU, CARD), {"engine": "reference"}, ([0], 64)),
        ((CPU, CARD), {"engine": "mapped"}, ([0], 64)),
        ((CPU, CARD), {"asked": "cpu"}, ([0], 64)),
        ((CPU, BUILT_IN), {}, ([0], 64)),
        ((CPU, BUILT_IN), {"asked": "accelerators"}, ([1], 32)),
        ((CPU,), {"asked": "accelerators"}, ([0], 64)),
        ((CPU, CARD, TWIN), {}, ([1, 2], 48)),
        ((CPU, CARD, TWIN), {"named": "CUDA1"}, ([2], 24)),
        ((CPU, CARD, TWIN), {"named": "cuda0, CUDA1"}, ([1, 2], 48)),
        ((CPU, CARD, TWIN), {"named": "CUDA7"}, ([0], 64)),
        ((CPU, CARD), {"named": "CPU"}, ([0], 64)),
        ((CPU, CARD, ARC), {"named": "Vulkan1"}, ([2], 12)),
        ((CPU, CARD, ARC), {"engine": "process", "named": "CPU"}, ([1, 2], 36)),
    ],
)
def test_layers_lie_on_the_cards_when_the_engine_uses_them_and_else_in_main_memory(devices, options, expected):
    assert layers_on(devices, **options) == expected
