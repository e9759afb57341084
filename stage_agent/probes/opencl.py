"""Measures accelerators of any vendor through OpenCL, when ``pyopencl`` and a platform are there.

Bandwidth: a kernel that sums a buffer four times the size of the device's cache, in coalesced 16-byte reads. Compute:
chains of dependent fused multiply-adds in registers. Times come from the device's own event profiling and are the best of
several runs by the rules of ``trial``: runs while others kept the machine busy are set aside, and a result without a quiet
run says so. Software devices (PoCL) run the same code, which is how it is tested without a GPU; they count as ``cpu`` and
are left out by default. As a program, the child that ``apart`` starts, it reads ``ProbeSettings`` as JSON from stdin and
writes one line of JSON: ``opencl``, the facts, and ``opencl_trials``, what each was measured under.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from config.settings import ProbeSettings
from protocol.rows import DeviceFact
from stage_agent.probes.bandwidth import CACHE_MULTIPLE, MAX_BUFFER_BYTES, MAX_CACHE_PER_CORE_BYTES
from stage_agent.probes.devices import MAX_DEVICES
from stage_agent.probes.host import available_memory_bytes, usable_cores
from stage_agent.probes.trial import Trial, best_of

MIN_BUFFER_BYTES = 256 * 1024 * 1024
"""A smaller one is summed in less time than a launch takes; and some caches are not reported."""
BANDWIDTH_BUDGET_S, COMPUTE_BUDGET_S = 1.0, 0.3
"""Of the device's own time; quiet devices need less."""
_ITEM_BYTES = 16
_FMA_ITEMS, _FMA_STEPS = 65_536, 256
SOURCE = """
kernel void stream_sum(global const float4 *data, global float *sums, const uint per_item) {
    const size_t item = get_global_id(0), items = get_global_size(0);
    float4 sum = (float4)(0.0f);
    for (uint step = 0; step < per_item; step++) sum += data[item + step * items];
    sums[item] = sum.x + sum.y + sum.z + sum.w;
}
kernel void multiply_add(global float *out, const float factor, const uint steps) {
    float4 a = (float4)((float)get_global_id(0)), b = a + 1.0f, c = a + 2.0f, d = a + 3.0f;
    for (uint step = 0; step < steps; step++) {
        a = fma(a, (float4)(factor), b); b = fma(b, (float4)(factor), c);
        c = fma(c, (float4)(factor), d); d = fma(d, (float4)(factor), a);
    }
    out[get_global_id(0)] = a.x + b.y + c.z + d.w;
}
"""
_FLOPS_PER_STEP = 4 * 4 * 2


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a device's figures were measured under; ``buffer_bytes`` below four caches may show some cache."""

    device: str
    buffer_bytes: int
    cache_bytes: int
    """As reported."""
    runs: int
    others_load_milli: int
    busy: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """``conditions`` is ``None`` for a device that could not be measured."""

    fact: DeviceFact
    conditions: Conditions | None


def opencl_devices(busy_load_milli: int, *, software: bool = False) -> tuple[Measured, ...]:
    """Measured facts of all GPUs and accelerators (with ``software``: of CPU devices instead). Blocks for seconds.

    None without the package or a platform; a device whose measurement fails is reported without figures.
    """
    try:
        import pyopencl
    except ImportError:
        return ()
    try:
        platforms = pyopencl.get_platforms()
    except pyopencl.Error:
        return ()
    found: list[Measured] = []
    for platform in platforms:
        for device in _devices(pyopencl, platform):
            if bool(device.type & pyopencl.device_type.CPU) == software and len(found) < MAX_DEVICES:
                found.append(_measure(pyopencl, device, busy_load_milli, software=software))
    return tuple(found)


def _devices(pyopencl: Any, platform: Any) -> list[Any]:
    try:
        return list(platform.get_devices())
    except pyopencl.Error:  # a platform without devices says so by an error
        return []


def _measure(pyopencl: Any, device: Any, busy_load_milli: int, *, software: bool) -> Measured:
    bandwidth = flops = conditions = None
    name, cache = str(device.name).strip()[:64], int(device.global_mem_cache_size)
    try:
        context = pyopencl.Context([device])
        queue = pyopencl.CommandQueue(context, properties=pyopencl.command_queue_properties.PROFILING_ENABLE)
        program = pyopencl.Program(context, SOURCE).build()
        size, items = shape_of(device, software=software)
        summing = bandwidth_trial(pyopencl, queue, program, size, items, busy_load_milli)
        computing = _compute_trial(pyopencl, queue, program, busy_load_milli)
    except pyopencl.Error:
        pass  # out of memory, no compiler: the device exists, its speed is unknown
    else:
        bandwidth = int(size / summing.best_s)
        flops = int(_FMA_ITEMS * _FMA_STEPS * _FLOPS_PER_STEP / computing.best_s)
        load_milli = max(summing.others_load_milli, computing.others_load_milli)
        busy = summing.busy or computing.busy
        conditions = Conditions(name, size, cache, summing.runs + computing.runs, load_milli, busy)
    fact = DeviceFact(
        name=name,
        kind="cpu" if software else _kind(device),
        memory_bytes=int(device.global_mem_size),
        memory_bandwidth_bytes_per_s=bandwidth,
        compute_flops_per_s=flops,
        source="measured" if conditions else "unknown",
        measured_age_us=0 if conditions else None,
    )
    return Measured(fact, conditions)


def _kind(device: Any) -> Literal["cuda", "rocm", "metal", "opencl", "other"]:
    """By vendor; ``other`` is graphics built into a processor, which shares its memory (Apple's is worth using)."""
    vendor = str(device.vendor).lower()
    if "apple" in vendor:
        return "metal"
    if bool(device.host_unified_memory):
        return "other"
    return "cuda" if "nvidia" in vendor else "rocm" if "advanced micro" in vendor or "amd" in vendor else "opencl"


def shape_of(device: Any, *, software: bool) -> tuple[int, int]:
    """Bytes of the buffer and number of work items: every item sums equally many pieces of 16 bytes.

    Four caches, at least 256 MiB, bounded by what one allocation may have, a quarter of the device's memory and 2 GiB.
    A software device's cache is bounded per core and its memory is the machine's, as on the processor's own path.
    """
    cache, memory = int(device.global_mem_cache_size), int(device.global_mem_size)
    if software or bool(device.host_unified_memory):
        memory = min(memory, available_memory_bytes())
    if software:
        cache = min(cache, usable_cores() * MAX_CACHE_PER_CORE_BYTES)
    wished = max(MIN_BUFFER_BYTES, CACHE_MULTIPLE * cache)
    items = max(256, int(device.max_compute_units) * 1_024)
    row = items * _ITEM_BYTES
    bound = min(int(device.max_mem_alloc_size), memory // 4, MAX_BUFFER_BYTES)
    return max(1, min(-(-wished // row), bound // row)) * row, items


def bandwidth_trial(pyopencl: Any, queue: Any, program: Any, size: int, items: int, busy_load_milli: int) -> Trial:
    """Sum ``size`` bytes by ``items`` work items; what is read in one run is the whole buffer, once."""
    data = pyopencl.Buffer(queue.context, pyopencl.mem_flags.READ_ONLY, size)
    pyopencl.enqueue_fill_buffer(queue, data, np.float32(1), 0, size).wait()
    sums = pyopencl.Buffer(queue.context, pyopencl.mem_flags.WRITE_ONLY, 4 * items)
    kernel = pyopencl.Kernel(program, "stream_sum")
    kernel.set_args(data, sums, np.uint32(size // (_ITEM_BYTES * items)))
    return _best_of(pyopencl, queue, kernel, items, BANDWIDTH_BUDGET_S, busy_load_milli)


def _compute_trial(pyopencl: Any, queue: Any, program: Any, busy_load_milli: int) -> Trial:
    out = pyopencl.Buffer(queue.context, pyopencl.mem_flags.WRITE_ONLY, 4 * _FMA_ITEMS)
    kernel = pyopencl.Kernel(program, "multiply_add")
    kernel.set_args(out, np.float32(0.5), np.uint32(_FMA_STEPS))
    return _best_of(pyopencl, queue, kernel, _FMA_ITEMS, COMPUTE_BUDGET_S, busy_load_milli)


def _best_of(pyopencl: Any, queue: Any, kernel: Any, items: int, budget_s: float, busy_load_milli: int) -> Trial:
    """By the device's clock, which only runs while a kernel does: what a launch costs is not the device's speed."""
    spent_ns = 0

    def run() -> None:
        nonlocal spent_ns
        event = pyopencl.enqueue_nd_range_kernel(queue, kernel, (items,), None)
        event.wait()
        spent_ns += max(1, int(event.profile.end - event.profile.start))

    run()  # the first pays for what a driver does once
    return best_of(
        run,
        budget_s=budget_s,
        busy_load_milli=busy_load_milli,
        cores=usable_cores(),
        clock=lambda: spent_ns / 1e9,
    )


def run_accelerators(probe: ProbeSettings, *, software: bool = False) -> dict[str, Any]:
    """The document of this program."""
    found = opencl_devices(probe.busy_load_milli, software=software)
    return {
        "opencl": [each.fact.model_dump() for each in found],
        "opencl_trials": [asdict(each.conditions) for each in found if each.conditions is not None],
    }


if __name__ == "__main__":
    settings = ProbeSettings.model_validate_json(sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(run_accelerators(settings)) + "\n")
