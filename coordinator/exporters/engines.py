"""The exporters by the name that ``stagemesh export --to`` takes."""

from collections.abc import Callable, Mapping

from coordinator.exporters.exo import export_exo
from coordinator.exporters.export import Export, ExportRequest
from coordinator.exporters.llama_cpp import export_llama_cpp
from coordinator.exporters.mlx import export_mlx
from coordinator.exporters.prima_cpp import export_prima_cpp
from coordinator.exporters.torch_engines import export_sglang, export_vllm

EXPORTERS: Mapping[str, Callable[[ExportRequest], Export]] = {
    "llama-cpp": export_llama_cpp,
    "vllm": export_vllm,
    "sglang": export_sglang,
    "mlx": export_mlx,
    "exo": export_exo,
    "prima-cpp": export_prima_cpp,
}
DEFAULT_PORTS: Mapping[str, int] = {
    "llama-cpp": 21_061,
    "vllm": 29_501,
    "sglang": 20_000,
    "mlx": 22_100,
    "exo": 52_415,
    "prima-cpp": 9_000,
}
