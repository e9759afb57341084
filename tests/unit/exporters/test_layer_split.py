"""llama.cpp's placement rule, simulated as its source computes it, against the flags made for a plan."""

import random
from itertools import accumulate

import numpy as np
import pytest

from coordinator.exporters.layer_split import split_flags

CPU = -1


def placed_by_llama_cpp(blocks: int, gpu_layers: int, tensor_split: tuple[int, ...]) -> list[int]:
    """Device of each of the ``blocks + 1`` units; float32 throughout, as in ``load_tensors``."""
    start, active = max(blocks + 1 - gpu_layers, 0), min(gpu_layers, blocks + 1)
    shares = np.array(list(accumulate(np.array(tensor_split, np.float32))), np.float32)
    if len(shares):
        shares = (shares / shares[-1]).astype(np.float32)
    units = []
    for unit in range(blocks + 1):
        if unit < start or not len(shares):
            units.append(CPU)
        else:
            position = np.float32(unit - start) / np.float32(active)
            units.append(int(np.searchsorted(shares, position, side="right")))
    return units


def wanted(cpu: int, counts: list[int]) -> list[int]:
    blocks = [CPU] * cpu + [device for device, count in enumerate(counts) for _ in range(count)]
    return [*blocks, len(counts) - 1]


def random_parts(source: random.Random, layers: int, parts: int) -> list[int]:
    cuts = sorted(source.sample(range(1, layers), parts - 1)) if parts > 1 else []
    return [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]


@pytest.mark.parametrize("seed", range(8))
def test_every_random_partition_is_placed_exactly(seed) -> None:
    source = random.Random(seed)
    for _ in range(120):
        layers = source.randint(2, 256)
        counts = random_parts(source, layers, source.randint(1, min(8, layers)))
        flags = split_flags(counts)
        assert sum(flags.tensor_split) == layers + 1
        assert placed_by_llama_cpp(layers, flags.gpu_layers, flags.tensor_split) == wanted(0, counts), counts


@pytest.mark.parametrize("seed", range(4))
def test_the_first_layers_stay_on_the_head_s_cpu_when_asked(seed) -> None:
    source = random.Random(seed)
    for _ in range(120):
        layers = source.randint(3, 256)
        cpu, *counts = random_parts(source, layers, source.randint(2, min(8, layers)))
        flags = split_flags(counts, cpu_layers=cpu)
        assert placed_by_llama_cpp(layers, flags.gpu_layers, flags.tensor_split) == wanted(cpu, counts), (cpu, counts)


def test_a_device_may_get_nothing() -> None:
    flags = split_flags([5, 0, 4])
    assert flags.arguments() == ("-ngl", "999", "-sm", "layer", "-ts", "5,0,5")
    assert placed_by_llama_cpp(9, flags.gpu_layers, flags.tensor_split) == [0] * 5 + [2] * 5


def test_plain_layer_counts_would_be_wrong_and_the_simulation_shows_it() -> None:
    assert placed_by_llama_cpp(8, 999, (4, 4)).count(0) == 5
    assert [placed_by_llama_cpp(8, 999, (3, 2, 3))[:8].count(device) for device in range(3)] == [4, 2, 2]


def test_everything_on_the_cpu_offloads_nothing() -> None:
    assert split_flags([], cpu_layers=8).arguments() == ("-ngl", "0", "-sm", "layer")
