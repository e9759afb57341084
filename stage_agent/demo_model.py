"""A small, real model for the demo: a llama-architecture GGUF with random weights that any llama decoder can run.

Its layers are of three sizes, as in real mixed quantisations (more precision at both ends and in every third layer), so
that a placement by layer count and one by bytes differ. Embeddings are tied. Weights come from a seeded generator and
are scaled so that the residual stream grows with the square root of the depth: activations stay finite in f16, and the
layers, not the tied embedding, decide the next token. The first layer's attention takes what it attends to out of the
stream, which keeps greedy decoding from repeating one token for ever. Rows of special and byte tokens are small, so greedy decoding
never emits them. Needs the extra ``demo``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from protocol.errors import ConfigurationError, StateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COMMON_WORDS = (
    "the of and to in is that it for on with as was at by be this from have not are or his an they which one all "
    "you were her had there been their we him has when who will more no if out so said what up its about into than "
    "them can only other new some could time these two may then do first any my now such like our over man me even "
    "most made after also did many before must through back years where much your way well down should because each "
    "just those people how too little state good very make world still own see men work long get here between both "
    "life being under never day same another know while last might us great old year off come since against go came "
    "right used take three stage node layer token model plan mesh link"
)
_EMBEDDING_SCALE = 0.25
"""Small against what the layers add, so that the tied embedding does not simply repeat the last token."""
_CONTRAST = 4.0
"""How much of its attended context the first layer takes out of the stream."""
_SMALL_ROW = 0.005
"""Scale of special and byte tokens: their logits stay near zero and are never the largest."""


@dataclass(frozen=True, slots=True)
class DemoShape:
    """Dimensions of the demo's model; the defaults weigh about 35 MB."""

    layers: int = 28
    width: int = 256
    feed_forward: int = 768
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 1_024
    context_length: int = 2_048
    rms_epsilon: float = 1e-5
    rope_base: float = 10_000.0

    @property
    def head_length(self) -> int:
        """Values per head."""
        return self.width // self.heads


def write_demo_model(path: str | Path, *, layers: int = 28, seed: int = 0, shape: DemoShape | None = None) -> Path:
    """Write the model to ``path`` (replaced in one step, never half-written) and return it. The same seed, the same bytes.

    ``shape`` overrides ``layers``. Raises ``ConfigurationError`` when the ``gguf`` package is missing and ``StateError``
    when the file cannot be written.
    """
    try:
        import gguf
    except ImportError:
        raise ConfigurationError(
            "the demo's model needs the package 'gguf'; install it with: pip install 'stagemesh[demo]'"
        ) from None
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(gguf, temporary, shape or DemoShape(layers=layers), np.random.default_rng(seed))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"{target}: the demo's model cannot be written ({error.strerror or error})") from None
    return target


def _write(gguf: Any, path: Path, shape: DemoShape, random: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("stagemesh demo")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.rms_epsilon)
    writer.add_rope_dimension_count(shape.head_length)
    writer.add_rope_freq_base(shape.rope_base)
    plain = _add_vocabulary(gguf, writer, shape.vocabulary)
    weights = _Weights(gguf, writer, random)
    rows = np.where(plain, _EMBEDDING_SCALE, _SMALL_ROW)[:, None].astype(np.float32)
    weights.add_scaled("token_embd.weight", (shape.vocabulary, shape.width), rows, "F16")
    for layer in range(shape.layers):
        _add_layer(weights, shape, layer)
    weights.add_norm("output_norm.weight", shape.width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_layer(weights: "_Weights", shape: DemoShape, layer: int) -> None:
    attention, feed_forward, down = _precision(layer, shape.layers)
    prefix = f"blk.{layer}."
    keys = shape.kv_heads * shape.head_length
    weights.add_norm(f"{prefix}attn_norm.weight", shape.width)
    weights.add(f"{prefix}attn_q.weight", shape.width, shape.width, attention)
    weights.add(f"{prefix}attn_k.weight", keys, shape.width, attention)
    if layer == 0:
        weights.add_contrast(f"{prefix}attn_v.weight", f"{prefix}attn_output.weight", shape, attention)
    else:
        weights.add(f"{prefix}attn_v.weight", keys, shape.width, attention)
        weights.add(f"{prefix}attn_output.weight", shape.width, shape.width, attention)
    weights.add_norm(f"{prefix}ffn_norm.weight", shape.width)
    weights.add(f"{prefix}ffn_gate.weight", shape.feed_forward, shape.width, feed_forward)
    weights.add(f"{prefix}ffn_up.weight", shape.feed_forward, shape.width, feed_forward)
    weights.add(f"{prefix}ffn_down.weight", shape.width, shape.feed_forward, down)


def _precision(layer: int, layers: int) -> tuple[str, str, str]:
    """Element types of attention, feed-forward and its output: more at both ends and in every third layer."""
    if layer < layers // 8 or layer >= layers - layers // 8:
        return "F16", "F16", "F32"
    return ("Q8_0", "F16", "F16") if layer % 3 == 0 else ("Q8_0", "Q8_0", "Q8_0")


class _Weights:
    """Draws a tensor and hands it to the writer in its element type. Order of calls fixes the values."""

    def __init__(self, gguf: Any, writer: Any, random: np.random.Generator) -> None:
        self._gguf = gguf
        self._writer = writer
        self._random = random

    def add(self, name: str, rows: int, columns: int, kind: str) -> None:
        """A projection of ``columns`` inputs to ``rows`` outputs with unit gain."""
        scale = np.full((1, 1), columns**-0.5, dtype=np.float32)
        self.add_scaled(name, (rows, columns), scale, kind)

    def add_scaled(self, name: str, dimensions: tuple[int, int], scale: "NDArray[np.float32]", kind: str) -> None:
        """Normally distributed values times ``scale``."""
        self._put(name, self._random.standard_normal(dimensions, dtype=np.float32) * scale, kind)

    def add_contrast(self, value_name: str, output_name: str, shape: DemoShape, kind: str) -> None:
        """Value and output projections whose product is a negative projection: attention subtracts its context."""
        rows = shape.kv_heads * shape.head_length
        basis = self._random.standard_normal((rows, shape.width), dtype=np.float32) * np.float32(shape.width**-0.5)
        by_head = basis.reshape(shape.kv_heads, shape.head_length, shape.width)
        shared = shape.heads // shape.kv_heads
        output = np.repeat(by_head, shared, axis=0).reshape(shape.heads * shape.head_length, shape.width).T
        self._put(value_name, basis, kind)
        self._put(output_name, output * np.float32(-_CONTRAST / shared), kind)

    def _put(self, name: str, values: "NDArray[np.float32]", kind: str) -> None:
        quantisation = self._gguf.GGMLQuantizationType[kind]
        self._writer.add_tensor(name, self._gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)

    def add_norm(self, name: str, width: int) -> None:
        """Norm weights near one."""
        values = 1.0 + 0.05 * self._random.standard_normal(width, dtype=np.float32)
        self._writer.add_tensor(name, values.astype(np.float32))


def _add_vocabulary(gguf: Any, writer: Any, size: int) -> list[bool]:
    """A sentence-piece vocabulary: specials, all bytes, printable characters, words, letter pairs. True = plain text."""
    kinds = gguf.TokenType
    tokens: dict[str, int] = {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}
    tokens.update((f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256))
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    plain = ["▁", *(chr(code) for code in range(33, 127)), *(f"▁{word}" for word in _COMMON_WORDS.split())]
    plain += [first + second for first in letters for second in letters]
    for piece in plain[: max(size - len(tokens), 0)]:
        tokens.setdefault(piece, kinds.NORMAL)
    filler = 0
    while len(tokens) < size:
        tokens[f"▁{letters[filler % 26]}{filler}"] = kinds.NORMAL
        filler += 1
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(tokens))
    writer.add_token_scores(
        [0.0 if kind != kinds.NORMAL else -float(index) for index, kind in enumerate(tokens.values())]
    )
    writer.add_token_types([int(kind) for kind in tokens.values()])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    return [kind == kinds.NORMAL for kind in tokens.values()]
