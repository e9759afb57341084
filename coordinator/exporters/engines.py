"""The exporters by the name that ``stagemesh export --to`` takes."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from config.cache_types import DEFAULT_CACHE_TYPE
from coordinator.exporters.exo import export_exo
from coordinator.exporters.export import Export, ExportRequest
from coordinator.exporters.llama_cpp import export_llama_cpp
from coordinator.exporters.mlx import export_mlx
from coordinator.exporters.prima_cpp import export_prima_cpp
from coordinator.exporters.torch_engines import export_sglang, export_vllm

Exporter = Callable[[ExportRequest], Export]


def _in_its_own_cache(exporter: Exporter) -> Exporter:
    """``exporter`` of an engine that is not told the cache type, which says so where the plan has chosen one."""

    def export(request: ExportRequest) -> Export:
        made, cache_type = exporter(request), request.plan.cache_type
        if cache_type == DEFAULT_CACHE_TYPE:
            return made
        said = (
            f"cache type {cache_type}, by which the plan counts memory: set the engine's own nearest, or plan with f16"
        )
        return replace(made, cannot=(*made.cannot, said))

    return export


EXPORTERS: Mapping[str, Exporter] = {
    "llama-cpp": export_llama_cpp,
    "vllm": _in_its_own_cache(export_vllm),
    "sglang": _in_its_own_cache(export_sglang),
    "mlx": _in_its_own_cache(export_mlx),
    "exo": _in_its_own_cache(export_exo),
    "prima-cpp": _in_its_own_cache(export_prima_cpp),
}
DEFAULT_PORTS: Mapping[str, int] = {
    "llama-cpp": 21_061,
    "vllm": 29_501,
    "sglang": 20_000,
    "mlx": 22_100,
    "exo": 52_415,
    "prima-cpp": 9_000,
}
