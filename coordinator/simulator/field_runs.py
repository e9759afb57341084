"""Measured runs of real meshes, as people publish them: a JSON list of rows, one per run.

``stagemesh calibrate`` reads this format. Required per row: ``id``, ``engine``, ``model_bytes``, ``n_layers``, ``nodes``
(``device``, and what is known of ``mem_bandwidth_gb_s``, ``memory_gb``, ``share`` or ``layers_half_open``,
``solo_tok_s``), ``link`` (``type``, ``rtt_ms``, ``bandwidth_gbit_s``) and ``decode_tok_s_split``. Everything else is a
note to the reader and ignored; ``null`` is the same as absent. A row that does not know the model's bytes or layers
cannot be predicted and is passed over. Bytes, GB/s = 10⁹, milliseconds, tokens per second.
"""

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coordinator.simulator.toml_table import ScenarioError

MAX_RUNS = 10_000
LEAST_TOK_S = 1e-6
"""Slower than a token in eleven days is a slip of the pen."""


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_unsaid(cls, row: Any) -> Any:
        """``null`` means what leaving the key out means."""
        return {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else row


class RunNode(_Row):
    """One node of a run. ``layers_half_open`` is never empty."""

    device: str = Field(default="", max_length=200)
    mem_bandwidth_gb_s: float | None = Field(default=None, gt=0, le=1e6)
    memory_gb: float | None = Field(default=None, gt=0, le=1e6)
    share: float | None = Field(default=None, gt=0, le=1)
    layers_half_open: tuple[int, int] | None = None
    solo_tok_s: float | None = Field(default=None, ge=LEAST_TOK_S, le=1e6)

    @field_validator("layers_half_open")
    @classmethod
    def _not_empty(cls, layers: tuple[int, int] | None) -> tuple[int, int] | None:
        if layers is not None and not 0 <= layers[0] < layers[1]:
            raise ValueError(f"{list(layers)} is no range: half-open, it must end above its start")
        return layers


class RunLink(_Row):
    """The links of a run, all alike."""

    type: str = Field(default="", max_length=200)
    rtt_ms: float | None = Field(default=None, ge=0, le=1e5)
    bandwidth_gbit_s: float | None = Field(default=None, gt=0, le=1e5)


class FieldRun(_Row):
    """One measured run."""

    id: str = Field(min_length=1, max_length=100)
    engine: str = Field(max_length=200)
    parallelism: str = Field(default="PP", max_length=100)
    model: str = Field(default="", max_length=200)
    model_bytes: int = Field(gt=0, le=2**53)
    n_layers: int = Field(gt=0, le=512)
    nodes: tuple[RunNode, ...] = Field(min_length=1, max_length=256)
    link: RunLink = RunLink()
    decode_tok_s_solo: float | None = Field(default=None, ge=LEAST_TOK_S, le=1e6)
    decode_tok_s_split: float | None = Field(default=None, ge=LEAST_TOK_S, le=1e6)
    activation_bytes_decode: int | None = Field(default=None, gt=0, le=2**40)
    fully_determines_sim_input: bool = True
    confidence: str = "high"

    @field_validator("id")
    @classmethod
    def _can_be_shown(cls, run_id: str) -> str:
        if not run_id.isprintable():
            raise ValueError("has characters that cannot be shown")
        return run_id

    @model_validator(mode="after")
    def _every_layer_on_one_node(self) -> Self:
        """At least a layer per node; stated ranges, in any order, cover the model once."""
        if len(self.nodes) > self.n_layers:
            raise ValueError(f"{len(self.nodes)} nodes cannot share {self.n_layers} layers")
        ranges = sorted(node.layers_half_open for node in self.nodes if node.layers_half_open)
        covered = 0
        for start, end in ranges if len(ranges) == len(self.nodes) else ():
            if end > self.n_layers:
                raise ValueError(f"layers_half_open ends at {end}, the model has {self.n_layers} layers")
            if start != covered:
                fault = "on no node" if start > covered else "on two nodes"
                raise ValueError(f"layers {min(start, covered)} to {max(start, covered)} are {fault}")
            covered = end
        if ranges and len(ranges) == len(self.nodes) and covered < self.n_layers:
            raise ValueError(f"layers {covered} to {self.n_layers} are on no node")
        return self

    @property
    def measured_us(self) -> float | None:
        """Time per token of the split run."""
        return None if self.decode_tok_s_split is None else 1e6 / self.decode_tok_s_split

    @property
    def remote_head(self) -> bool:
        """The client's machine holds no layers: even a single node is reached over the link."""
        return "remote" in self.parallelism.lower()

    @property
    def pipelined(self) -> bool:
        """Layers are split over the nodes; tensor-parallel runs are not what is modelled here."""
        words = self.parallelism.lower().replace("(", " ").split()
        return not ({"tp", "tensor"} & set(words)) or "pp" in words

    @property
    def scored(self) -> bool:
        """Every input is stated, so that a prediction invents nothing."""
        return self.fully_determines_sim_input and self.measured_us is not None and self.pipelined

    @property
    def profile_name(self) -> str:
        """The engine profile that this run belongs to, by what its engine is."""
        return profile_for(self.engine, self.parallelism)


_ENGINES = (
    ("in-box", ("in-box", "one box", "-sm layer", "in one box")),
    ("petals", ("petals",)),
    ("ds4", ("ds4", "dwarfstar")),
    ("skippy", ("skippy", "mesh-llm")),
    ("exo-mlx", ("exo", "mlx")),
    ("llama-cpp-rpc", ("llama.cpp", "rpc", "gpustack", "localai", "lm studio")),
)


def profile_for(engine: str, parallelism: str = "") -> str:
    """The profile of an engine's family; engines of no known family are taken for ``skippy``, the plain chain."""
    text = f"{engine} {parallelism}".lower()
    for name, words in _ENGINES:
        if any(word in text for word in words):
            return name
    return "skippy"


def parse_runs(name: str, text: str) -> tuple[FieldRun, ...]:
    """The runs of a JSON document: a list of rows, or an object with ``rows``.

    Raises:
        ScenarioError: naming the row and the key.
    """
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 0)
        raise ScenarioError(name, line, "", f"not a JSON document: {getattr(error, 'msg', error)}") from error
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not rows or len(rows) > MAX_RUNS:
        raise ScenarioError(name, 0, "rows", f"needs a list of 1 to {MAX_RUNS} runs")
    runs: list[FieldRun] = []
    for index, row in enumerate(rows):
        label = str(row.get("id", index)) if isinstance(row, dict) else str(index)
        if isinstance(row, dict) and any(key in row and row[key] is None for key in ("model_bytes", "n_layers")):
            continue
        try:
            run = FieldRun.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join((f"rows[{label}]", *(str(part) for part in first["loc"])))
            raise ScenarioError(name, _line_of(text, label), key, first["msg"].removeprefix("Value error, ")) from error
        if any(run.id == other.id for other in runs):
            raise ScenarioError(name, _line_of(text, label), f"rows[{label}].id", "appears twice")
        runs.append(run)
    return tuple(runs)


def _line_of(text: str, label: str) -> int:
    at = text.find(json.dumps(label))
    return text.count("\n", 0, at) + 1 if at >= 0 else 0
