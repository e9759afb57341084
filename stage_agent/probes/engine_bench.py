"""The serving engine's own benchmark, when one is configured: the most faithful figures, made by the code that will serve.

``llama-bench`` reads every weight once per generated token, so tokens/s × model bytes is the bandwidth that decoding
really gets; a prompt costs two operations per parameter and token, so tokens/s × 2 × parameters is the compute that
prefill really gets.
"""

import json
from dataclasses import dataclass
from typing import Any

from config.settings import ProbeSettings
from stage_agent.probes.child import BenchmarkFailed, output_of

_LIMIT_S = 300.0
_PROMPT_TOKENS, _TOKENS = 512, 32
_MAX_FIGURE = 2**53


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """What the engine reached on the devices that it uses; bytes/s, operations/s, and who said so."""

    memory_bandwidth_bytes_per_s: int
    compute_flops_per_s: int
    engine: str


def run_engine_bench(probe: ProbeSettings) -> EngineFigures:
    """Run ``probe.engine_bench`` on ``probe.engine_bench_model``; blocks for as long as the engine takes (limit 300 s).

    Raises ``BenchmarkFailed`` when it cannot be started, fails, takes longer, or does not say both figures.
    """
    command = [
        *(probe.engine_bench, "-m", probe.engine_bench_model, "-o", "json"),
        *("-p", str(_PROMPT_TOKENS), "-n", str(_TOKENS)),
    ]
    return parse_llama_bench(output_of(f"[probe] engine_bench = {probe.engine_bench!r}", command, limit_s=_LIMIT_S))


def parse_llama_bench(output: bytes) -> EngineFigures:
    """The figures from ``llama-bench -o json``; raises ``BenchmarkFailed`` when they are not there or not possible."""
    try:
        rows = json.loads(output)
        decode = next(row for row in rows if row["n_gen"] and not row["n_prompt"])
        prefill = next(row for row in rows if row["n_prompt"] and not row["n_gen"])
        figures = EngineFigures(
            memory_bandwidth_bytes_per_s=_figure(decode, "model_size", 1),
            compute_flops_per_s=_figure(prefill, "model_n_params", 2),
            engine=f"llama-bench {decode.get('build_number', '?')} {decode.get('backends', '')}".strip()[:64],
        )
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError) as error:
        raise BenchmarkFailed(
            f"the engine's benchmark gave no usable figures ({error!r}); is it llama-bench?"
        ) from error
    return figures


def _figure(row: dict[str, Any], per_token: str, factor: int) -> int:
    figure = int(float(row["avg_ts"]) * int(row[per_token]) * factor)
    if not 0 < figure < _MAX_FIGURE:
        raise ValueError(f"{per_token} × tokens/s is {figure}")
    return figure
