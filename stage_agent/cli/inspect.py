"""``stagemesh inspect MODEL``: what a model weighs, layer by layer, before anything is placed."""

from itertools import groupby
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from config.cache_types import CacheType
from coordinator.model.package import Layer, ModelPackage
from protocol.errors import ConfigurationError
from stage_agent.cli.output import JsonOption, console, print_json, printable
from stage_agent.model_source import open_model

_DIAGNOSTICS = {
    "expert_bytes_unknown": "layer files are absent: every expert counts as read for each token",
    "expert_used_count_missing": "the file does not say how many experts a token uses: every one counts as read",
    "layer_weights_uniform_fallback": "layer indices have gaps: every layer is given the average size",
    "nextn_layers_ignored": "layers for multi-token prediction are left out",
    "nextn_layers_not_streamed": "layers for multi-token prediction are resident, but plain decoding does not read them",
    "nextn_weights_absent": "the file ships without the weights of its multi-token prediction layers",
    "package_files_missing": "not all files of the package are here; sizes are those of the manifest",
    "sliding_window_ignored": "which layers use the sliding window is not known: all are counted as full attention",
    "tied_embeddings_assumed": "the output file is too small to hold a head: the embedding's copy is counted",
}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(name="inspect")(inspect)


def inspect(
    model: Annotated[str, typer.Argument(help="A .gguf file, a layer package, or a safetensors directory.")],
    as_json: JsonOption = False,
    cache_type: Annotated[str, typer.Option(help="Element type of the attention cache: f16, q8_0, f32, …")] = "f16",
) -> None:
    """Show a model's layers, exact bytes, cache per token and context length."""
    chosen = next((known for known in get_args(CacheType) if known == cache_type), None)
    if chosen is None:
        raise ConfigurationError(f"--cache-type {cache_type!r} is not one of {', '.join(get_args(CacheType))}")
    package = open_model(model, cache_type=chosen)
    if as_json:
        print_json(package_document(package))
    else:
        print_package(package, console())


def package_document(package: ModelPackage) -> dict[str, Any]:
    """The package as the JSON document of ``inspect --json``."""
    return {
        "name": package.name,
        "digest": package.digest,
        "architecture": package.architecture,
        "layer_count": package.layer_count,
        "layers": [
            {
                "weight_bytes": layer.weight_bytes,
                "streamed_bytes": layer.streamed_bytes,
                "kv_bytes_per_token": layer.kv_bytes_per_token,
                "kv_window_tokens": layer.kv_window_tokens,
                "recurrent_bytes_per_sequence": layer.recurrent_bytes_per_sequence,
            }
            for layer in package.layers
        ],
        "shared_first_bytes": package.shared_first_bytes,
        "shared_last_bytes": package.shared_last_bytes,
        "kv_bytes_per_token": package.kv_bytes_per_token,
        "native_context_length": package.native_context_length,
        "activation_width": package.activation_width,
        "activation_frame_bytes": package.activation_frame_bytes,
        "required_sideband_bytes": package.required_sideband_bytes,
        "active_weight_fraction": round(package.active_weight_fraction, 6),
        "forbidden_boundaries": [
            {"layer": boundary.layer, "reason": boundary.reason} for boundary in package.forbidden_boundaries
        ],
        "tied_embeddings": package.tied_embeddings,
        "weight_bytes": package.weight_bytes,
        "diagnostics": list(package.diagnostics),
    }


def print_package(package: ModelPackage, screen: Console) -> None:
    """A summary, then one row per run of equal layers."""
    about = f"  {printable(package.architecture)}, {package.layer_count} layers"
    screen.print(Text.assemble((printable(package.name), "bold"), about))
    screen.print(f"digest {package.digest}", style="dim", soft_wrap=True)
    screen.print(_summary(package))
    screen.print(_layer_table(package))
    for boundary in _runs([boundary.layer for boundary in package.forbidden_boundaries]):
        screen.print(f"no cut before layer {boundary}: they share an attention cache", style="yellow")
    for code in package.diagnostics:
        screen.print(f"{code}: {_DIAGNOSTICS.get(code, 'see the documentation')}", style="yellow", soft_wrap=True)


def _summary(package: ModelPackage) -> Table:
    cache_at_native = sum(
        layer.kv_bytes_per_token
        * min(package.native_context_length, layer.kv_window_tokens or package.native_context_length)
        for layer in package.layers
    )
    state = sum(layer.recurrent_bytes_per_sequence for layer in package.layers)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("weights in memory", _bytes(package.weight_bytes), _active(package))
    tied = "embeddings again (tied), output norm" if package.tied_embeddings else "output norm and head"
    table.add_row("first stage adds", _bytes(package.shared_first_bytes), "embeddings")
    table.add_row("last stage adds", _bytes(package.shared_last_bytes), tied)
    table.add_row("context", f"{package.native_context_length:,} tokens", "the longest it was trained for")
    table.add_row(
        "attention cache",
        f"{_bytes(package.kv_bytes_per_token)} per token",
        f"{_bytes(cache_at_native)} per lane at full context",
    )
    if state:
        table.add_row("recurrent state", f"{_bytes(state)} per lane", "whatever the context")
    width = f"{package.activation_width:,} values" if package.activation_width else ""
    table.add_row(
        "one token on the wire", _bytes(package.activation_frame_bytes + package.required_sideband_bytes), width
    )
    return table


def _active(package: ModelPackage) -> str:
    fraction = package.active_weight_fraction
    words = "dense" if fraction >= 1 else f"{fraction:.1%} of the layers read per token"
    return f"{words}; tied embeddings count twice" if package.tied_embeddings else words


def _layer_table(package: ModelPackage) -> Table:
    """One row per kind of layer, in order of first appearance; columns that say nothing are left out."""
    table = Table()
    shows_streamed = any(layer.streamed_bytes != layer.weight_bytes for layer in package.layers)
    shows_state = any(layer.recurrent_bytes_per_sequence for layer in package.layers)
    shows_window = any(layer.kv_window_tokens for layer in package.layers)
    table.add_column("layers", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("each weighs", justify="right")
    if shows_streamed:
        table.add_column("read per token", justify="right")
    table.add_column("cache per token", justify="right")
    if shows_window:
        table.add_column("window", justify="right")
    if shows_state:
        table.add_column("state per lane", justify="right")
    for layer, indices in _equal_layers(package.layers):
        cells = [", ".join(_runs(indices)), str(len(indices)), f"{layer.weight_bytes:,} B"]
        cells += [f"{layer.streamed_bytes:,} B"] if shows_streamed else []
        cells += [f"{layer.kv_bytes_per_token:,} B"]
        cells += [f"{layer.kv_window_tokens:,}" if layer.kv_window_tokens else "full"] if shows_window else []
        cells += [f"{layer.recurrent_bytes_per_sequence:,} B"] if shows_state else []
        table.add_row(*cells)
    return table


def _equal_layers(layers: tuple[Layer, ...]) -> list[tuple[Layer, list[int]]]:
    """Distinct layers with the indices that are like them."""
    kinds: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(index)
    return list(kinds.items())


def _runs(numbers: list[int]) -> list[str]:
    """Consecutive numbers as ``3–7``."""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return runs


def _bytes(count: int) -> str:
    """A size for people, decimal units."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or (unit == "B" and size < 10_000):
            return f"{count:,} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
