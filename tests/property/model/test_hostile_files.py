"""Whatever the bytes are, a reader gives a valid package or one typed error, quickly and in bounded memory."""

import json
import struct
import time
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.model.gguf_header import MAX_KEPT_ARRAY_ITEMS, MAX_METADATA_PAIRS, MAX_SKIPPED_STRINGS, MAX_TENSORS
from coordinator.model.layer_package import MAX_MANIFEST_BYTES, read_manifest
from coordinator.model.package import ModelPackage
from coordinator.model.safetensors_header import read_safetensors_header
from coordinator.model.safetensors_package import index_files
from coordinator.model.source import MemorySource
from protocol.errors import ModelError
from tests.fixtures_model import Q8_0, Raw, TensorSpec, array, gguf_bytes, metadata, package, safetensors_bytes, tensors

FACTS = metadata(
    "gemma3n", 3,
    attention__sliding_window=64, attention__shared_kv_layers=1, attention__head_count_kv=[2, 2, 1],
    expert_count=4, expert_used_count=2, nextn_predict_layers=1, ssm__state_size=4, ssm__inner_size=8, ssm__conv_kernel=2,
)  # fmt: skip
SMALL = gguf_bytes(
    {
        **FACTS,
        "tokenizer.ggml.tokens": array("str", ["<s>", "a", "ü"]),
        "tokenizer.ggml.scores": array("f32", [0.0, 1.0]),
    },
    [
        *tensors(3, rows=[1, 2, 3])[1:],
        TensorSpec("token_embd.weight", (32, 3), Q8_0),
        TensorSpec("blk.1.up_exps.w", (2, 2, 4)),
    ],
)
HEADER = SMALL.index(b"blk.1.up_exps.w") + 64


PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy: time is judged by the tests of the worst inputs, in processor time."""


def survives(content: bytes) -> ModelPackage | None:
    """The package, or ``None`` when the file was refused with a typed, one-line error. Anything else fails the test."""
    try:
        result = package(content)
    except ModelError as refusal:
        error = refusal
    else:
        error = None
    if error is not None:
        assert len(str(error).splitlines()) == 1
        return None
    assert result.layer_count >= 1
    assert all(
        min(layer.weight_bytes, layer.streamed_bytes, layer.kv_bytes_per_token, layer.recurrent_bytes_per_sequence) >= 0
        and layer.streamed_bytes <= layer.weight_bytes
        for layer in result.layers
    )
    assert result.weight_bytes <= 2 * len(content) + 3 * result.layer_count
    assert all(0 < boundary.layer < result.layer_count for boundary in result.forbidden_boundaries)
    assert 0 < result.activation_frame_bytes < 2**53
    return result


def test_the_corpus_s_seed_is_a_valid_model():
    assert survives(SMALL) is not None


def test_every_truncation_is_refused():
    lengths = [*range(HEADER), *range(HEADER, len(SMALL), 41), len(SMALL) - 1]
    assert not any(survives(SMALL[:length]) for length in lengths)


@pytest.mark.parametrize("mask", [0xFF, 0x01, 0x80])
def test_every_byte_flip_of_the_header_is_survived(mask):
    outcomes = []
    for position in range(HEADER):
        content = bytearray(SMALL)
        content[position] ^= mask
        outcomes.append(survives(bytes(content)))
    assert sum(outcome is None for outcome in outcomes) > HEADER // 10, "flips in structure are noticed"


@pytest.mark.parametrize("value", [0, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_eight_bytes_of_the_header_may_be_an_absurd_number(value):
    for position in range(HEADER - 8):
        survives(SMALL[:position] + struct.pack("<Q", value) + SMALL[position + 8 :])


@PATIENT
@given(st.binary(max_size=400))
def test_random_bytes_behind_a_valid_beginning_are_survived(tail):
    survives(SMALL[:24] + tail)


@PATIENT
@given(
    st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=12), st.integers(0, 200)
)
def test_several_changed_bytes_at_once_are_survived(changes, cut):
    content = bytearray(SMALL)
    for position, value in changes:
        content[position] = value
    survives(bytes(content[: len(content) - cut]))


@PATIENT
@given(
    st.dictionaries(
        st.sampled_from(sorted({key.split(".", 1)[1] for key in FACTS})),
        st.one_of(
            st.integers(0, 2**32 - 1),
            st.booleans(),
            st.text(max_size=5),
            st.floats(width=32),
            st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
        ),
        max_size=6,
    ),
    st.sampled_from(
        ["llama", "mamba", "rwkv7", "gemma3", "gemma3n", "qwen35", "nemotron_h", "deepseek2", "kimi-linear", "novel"]
    ),
)
def test_any_metadata_values_are_survived(values, architecture):
    facts = {
        f"{architecture}.{key.split('.', 1)[1]}": value for key, value in FACTS.items() if not key.startswith("general")
    }
    facts.update({f"{architecture}.{key}": value for key, value in values.items()})
    survives(gguf_bytes({"general.architecture": architecture, **facts}, tensors(3, rows=[1, 2, 3])))


@PATIENT
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.booleans(), st.lists(st.integers(0, 11), max_size=3))
def test_weights_are_exact_when_complete_and_never_too_small_otherwise(rows, head, missing):
    specs = tensors(len(rows), rows=rows, head=head)
    kept = [spec for spec in specs if not any(str(spec.name).startswith(f"blk.{index}.") for index in missing)]
    result = survives(gguf_bytes(metadata(layers=len(rows)), kept))
    if result is None:
        assert not any(str(spec.name).startswith("blk.") for spec in kept)
        return
    held = sum(spec.nbytes for spec in kept) + (0 if head else specs[0].nbytes)
    if len(kept) == len(specs):
        assert result.weight_bytes == held
        assert [layer.weight_bytes for layer in result.layers] == [count * 256 + 256 for count in rows]
    else:
        assert 0 <= result.weight_bytes - held < len(rows)
        assert result.diagnostics == ("layer_weights_uniform_fallback",)


@PATIENT
@given(st.binary(max_size=300))
def test_random_bytes_are_no_safetensors_file(content):
    for candidate in (content, struct.pack("<Q", len(content)) + content, safetensors_bytes({}, header=content)):
        with suppress(ModelError):
            read_safetensors_header(MemorySource(candidate), "m")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MANIFEST_KEYS = [
    "schema_version",
    "format",
    "model_id",
    "source_model",
    "layer_count",
    "shared",
    "layers",
    "skippy_abi_version",
]


@PATIENT
@given(st.dictionaries(st.sampled_from(MANIFEST_KEYS), JSON), JSON)
def test_any_json_is_no_manifest(document, other):
    for value in ({"schema_version": 1, "format": "layer-package", **document}, other):
        content = json.dumps(value).encode()
        with pytest.raises(ModelError):
            read_manifest(content, "m")


@PATIENT
@given(
    st.dictionaries(
        st.text(max_size=8), st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), JSON), max_size=3
    )
)
def test_any_json_header_is_survived(document):
    content = json.dumps(document).encode()
    try:
        header = read_safetensors_header(MemorySource(safetensors_bytes({}, header=content)), "m")
    except ModelError:
        return
    assert all(entry.offset + entry.nbytes <= 8 + len(content) for entry in header.tensors)


def many_strings():
    return gguf_bytes({"a": Raw(struct.pack("<IIQ", 9, 8, MAX_SKIPPED_STRINGS) + bytes(8 * MAX_SKIPPED_STRINGS))})


def many_tensors():
    specs = [TensorSpec(f"blk.{index}.{'x' * 200}", (1,), offset=32 * index) for index in range(MAX_TENSORS)]
    return gguf_bytes(metadata(layers=1000), specs, with_data=False) + bytes(32 * MAX_TENSORS + 64)


def many_arrays():
    items = array("i64", [2**60] * MAX_KEPT_ARRAY_ITEMS)
    return gguf_bytes([(f"key{index}", items) for index in range(MAX_METADATA_PAIRS // 2)])


def many_long_keys():
    return gguf_bytes([(f"{index:01024d}", "v" * 1024) for index in range(MAX_METADATA_PAIRS)])


WORST = {
    "as many strings as are accepted": (many_strings, package),
    "as many tensors as are accepted": (many_tensors, package),
    "arrays without end": (many_arrays, package),
    "long keys": (many_long_keys, package),
    "a manifest of small objects": (lambda: b'{"layers":[' + b'{"a":1},' * 160_000 + b"1]}", lambda content: read_manifest(content, "m")),
    "a manifest of one long string": (lambda: b'{"a":"' + b"\\u0041" * (MAX_MANIFEST_BYTES // 6 - 10) + b'"}', lambda content: read_manifest(content, "m")),
    "a checkpoint header of small tensors": (
        lambda: safetensors_bytes({f"t{index}": ("U8", (1,), 1) for index in range(28_000)}),
        lambda content: read_safetensors_header(MemorySource(content), "m"),
    ),
    "an index without end": (
        lambda: json.dumps({"weight_map": {f"t{index}": "a.safetensors" for index in range(248_000)}}).encode(),
        lambda content: index_files(content, "m"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WORST))
def test_the_largest_input_that_is_looked_at_takes_less_than_a_second(name):
    build, read = WORST[name]
    content = build()
    seconds = []
    for _ in range(3):  # the best of three: on a busy machine even processor time grows
        started = time.process_time()
        with suppress(ModelError):
            read(content)
        seconds.append(time.process_time() - started)
        if seconds[-1] < 1.0:
            break
    assert min(seconds) < 1.0


@pytest.mark.parametrize("name", list(WORST)[1:4])
def test_the_largest_header_that_is_looked_at_takes_little_memory(name):
    build, read = WORST[name]
    content = build()
    tracemalloc.start()
    try:
        with suppress(ModelError):
            read(content)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40_000_000
