"""Measures accelerators of any vendor through OpenCL, when ``pyopencl`` and a platform are there.

Bandwidth: a kernel that sums a buffer several times the size of any device cache, in coalesced 16-byte reads. Compute:
chains of dependent fused multiply-adds in registers. Times come from the device's own event profiling. Software devices
(PoCL) run the same code, which is how it is tested without a GPU; they count as ``cpu`` and are left out by default.
As a program, the child that ``apart`` starts, it writes the devices as one line of JSON.
"""

import json
import sys
from typing import Any, Literal

import numpy as np

from protocol.rows import DeviceFact
from stage_agent.probes.devices import MAX_DEVICES

BUFFER_BYTES = 256 * 1024 * 1024
RUNS = 5
_FMA_ITEMS, _FMA_STEPS = 65_536, 256
_SOURCE = """
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


def opencl_devices(*, software: bool = False) -> tuple[DeviceFact, ...]:
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
    facts: list[DeviceFact] = []
    for platform in platforms:
        for device in _devices(pyopencl, platform):
            if bool(device.type & pyopencl.device_type.CPU) == software and len(facts) < MAX_DEVICES:
                facts.append(_measure(pyopencl, device, software=software))
    return tuple(facts)


def _devices(pyopencl: Any, platform: Any) -> list[Any]:
    try:
        return list(platform.get_devices())
    except pyopencl.Error:  # a platform without devices says so by an error
        return []


def _measure(pyopencl: Any, device: Any, *, software: bool) -> DeviceFact:
    bandwidth = flops = None
    try:
        context = pyopencl.Context([device])
        queue = pyopencl.CommandQueue(context, properties=pyopencl.command_queue_properties.PROFILING_ENABLE)
        program = pyopencl.Program(context, _SOURCE).build()
        bandwidth = _bandwidth(pyopencl, context, queue, program, device)
        flops = _compute(pyopencl, context, queue, program)
    except pyopencl.Error:
        pass  # out of memory, no compiler: the device exists, its speed is unknown
    return DeviceFact(
        name=str(device.name).strip()[:64],
        kind="cpu" if software else _kind(device),
        memory_bytes=int(device.global_mem_size),
        memory_bandwidth_bytes_per_s=bandwidth,
        compute_flops_per_s=flops,
        source="measured" if bandwidth and flops else "unknown",
        measured_age_us=0 if bandwidth and flops else None,
    )


def _kind(device: Any) -> Literal["cuda", "rocm", "metal", "opencl", "other"]:
    """By vendor; ``other`` is graphics built into a processor, which shares its memory (Apple's is worth using)."""
    vendor = str(device.vendor).lower()
    if "apple" in vendor:
        return "metal"
    if bool(device.host_unified_memory):
        return "other"
    return "cuda" if "nvidia" in vendor else "rocm" if "advanced micro" in vendor or "amd" in vendor else "opencl"


def _bandwidth(pyopencl: Any, context: Any, queue: Any, program: Any, device: Any) -> int:
    size = min(BUFFER_BYTES, int(device.max_mem_alloc_size)) // (1 << 20) * (1 << 20)
    items = max(256, int(device.max_compute_units) * 1_024)
    per_item = size // (16 * items)
    data = pyopencl.Buffer(context, pyopencl.mem_flags.READ_ONLY, size)
    pyopencl.enqueue_fill_buffer(queue, data, np.float32(1), 0, size).wait()
    sums = pyopencl.Buffer(context, pyopencl.mem_flags.WRITE_ONLY, 4 * items)
    kernel = pyopencl.Kernel(program, "stream_sum")
    kernel.set_args(data, sums, np.uint32(per_item))
    return int(per_item * items * 16 * 1e9 / _best_ns(pyopencl, queue, kernel, items))


def _compute(pyopencl: Any, context: Any, queue: Any, program: Any) -> int:
    out = pyopencl.Buffer(context, pyopencl.mem_flags.WRITE_ONLY, 4 * _FMA_ITEMS)
    kernel = pyopencl.Kernel(program, "multiply_add")
    kernel.set_args(out, np.float32(0.5), np.uint32(_FMA_STEPS))
    operations = _FMA_ITEMS * _FMA_STEPS * _FLOPS_PER_STEP
    return int(operations * 1e9 / _best_ns(pyopencl, queue, kernel, _FMA_ITEMS))


def _best_ns(pyopencl: Any, queue: Any, kernel: Any, items: int) -> int:
    times = []
    for _ in range(RUNS):
        event = pyopencl.enqueue_nd_range_kernel(queue, kernel, (items,), None)
        event.wait()
        times.append(int(event.profile.end - event.profile.start))
    return max(1, min(times))


if __name__ == "__main__":
    sys.stdout.write(json.dumps([fact.model_dump() for fact in opencl_devices()]) + "\n")
