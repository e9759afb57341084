"""A node's devices as the one that the cost model knows. Pure.

A stage's layers lie on the devices that its owner marks with ``holds_layers``: a machine with graphics cards serves from
their memory, not from its main memory. Engines fill several devices in proportion to their memory and run them one after
the other, so a node reads ``Σ memory`` bytes in ``Σ (memory ÷ bandwidth)`` seconds.
"""

from collections.abc import Sequence
from fractions import Fraction

from protocol.rows import DeviceFact


def layer_device(devices: Sequence[DeviceFact]) -> DeviceFact | None:
    """All devices that hold layers as one; ``None`` when there is none.

    Memory is the sum. Bandwidth and compute are the memory-weighted harmonic means, rounded down, and unknown as soon as one
    is unknown. The name counts equal names (``2 × RTX 4090``); kind is the first device's; the source is the weakest
    (unknown, spec, shaped, measured), the age the highest.
    """
    layers = [device for device in devices if device.holds_layers]
    if len(layers) < 2:
        return layers[0] if layers else None
    ages = [device.measured_age_us for device in layers if device.measured_age_us is not None]
    return DeviceFact(
        name=_name(layers)[:64],
        kind=layers[0].kind,
        memory_bytes=sum(device.memory_bytes for device in layers),
        memory_bandwidth_bytes_per_s=_harmonic(
            [(device.memory_bytes, device.memory_bandwidth_bytes_per_s) for device in layers]
        ),
        compute_flops_per_s=_harmonic([(device.memory_bytes, device.compute_flops_per_s) for device in layers]),
        source=min((device.source for device in layers), key=("unknown", "spec", "shaped", "measured").index),
        measured_age_us=max(ages, default=None),
    )


def _harmonic(shares: Sequence[tuple[int, int | None]]) -> int | None:
    """Σ memory ÷ Σ (memory ÷ speed); devices without memory take no layers and do not count."""
    used = [(memory, speed) for memory, speed in shares if memory]
    if not used:
        return None
    time = Fraction(0)
    for memory, speed in used:
        if not speed:
            return None
        time += Fraction(memory, speed)
    return int(sum(memory for memory, _speed in used) / time)


def _name(devices: Sequence[DeviceFact]) -> str:
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.name] = counts.get(device.name, 0) + 1
    return " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())
