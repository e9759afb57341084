"""What ``llama-server --list-devices`` found, and the plan's layers over it. Pure.

An rpc-server may offer several devices; they are numbered on over all endpoints, in ``--rpc`` order. An endpoint that
cannot be reached, or whose protocol differs, is left out *silently* by some builds, and the rest are renumbered: so every
endpoint must be found here before anything is loaded, and devices are then named one by one.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_DEVICE = re.compile(r"^\s*(RPC\d+): (\S+) \((\d+) MiB, (\d+) MiB free\)")
_ASSIGNED = re.compile(r"load_tensors: layer\s+(\d+) assigned to device (\S+?),?(?:\s|$)")


@dataclass(frozen=True, slots=True)
class RemoteDevice:
    """One device of one rpc-server."""

    name: str
    endpoint: str
    total_mib: int


def parse_devices(lines: Iterable[str]) -> tuple[RemoteDevice, ...]:
    """The RPC devices among the lines, in order; local devices are not ours to use."""
    found = (_DEVICE.match(line) for line in lines)
    return tuple(RemoteDevice(each.group(1), each.group(2), int(each.group(3))) for each in found if each)


def missing_endpoints(endpoints: Sequence[str], devices: Sequence[RemoteDevice]) -> tuple[str, ...]:
    """Endpoints without a device, in order."""
    offered = {device.endpoint for device in devices}
    return tuple(endpoint for endpoint in endpoints if endpoint not in offered)


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """A device and how many consecutive layers it takes."""

    name: str
    layers: int


def spread(
    endpoints: Sequence[str], counts: Sequence[int], devices: Sequence[RemoteDevice]
) -> tuple[DeviceLayers, ...]:
    """Each endpoint's layers over its devices in proportion to their memory, in order; largest remainders round up."""
    result: list[DeviceLayers] = []
    for endpoint, count in zip(endpoints, counts, strict=True):
        own = [device for device in devices if device.endpoint == endpoint]
        weights = [max(1, device.total_mib) for device in own]
        shares = [count * weight // sum(weights) for weight in weights]
        order = sorted(range(len(own)), key=lambda index: (-(count * weights[index] % sum(weights)), index))
        for index in order[: count - sum(shares)]:
            shares[index] += 1
        result += [DeviceLayers(device.name, share) for device, share in zip(own, shares, strict=True)]
    return tuple(result)


def parse_assigned(line: str) -> tuple[int, str] | None:
    """Layer and device, when the line is the engine's word about where a layer went; ``layer_count`` is the output."""
    found = _ASSIGNED.search(line)
    return (int(found.group(1)), found.group(2)) if found else None


def expected_map(layers: Sequence[DeviceLayers], cpu_layers: int = 0) -> dict[int, str]:
    """Where every layer should go, the output layer included."""
    names = ["CPU"] * cpu_layers + [each.name for each in layers for _ in range(each.layers)]
    names.append(layers[-1].name if layers else "CPU")
    return dict(enumerate(names))


def first_difference(expected: dict[int, str], seen: dict[int, str]) -> str:
    """One sentence about the first layer that is elsewhere; empty when all are where they should be."""
    if not seen:
        return "llama-server did not say where its layers went"
    for layer in sorted(expected.keys() | seen.keys()):
        if expected.get(layer) != seen.get(layer):
            return f"layer {layer} is on {seen.get(layer, 'no device')}, the plan says {expected.get(layer, 'nothing')}"
    return ""
