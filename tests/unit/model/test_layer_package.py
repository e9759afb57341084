"""Layer packages: every rule of the manifest, and what is learned from the files beside it."""

import copy
import json

import pytest

from coordinator.model.layer_package import MAX_MANIFEST_BYTES, read_manifest
from protocol.errors import ModelError
from stage_agent.model_source import model_files, open_model, tensor_extents
from tests.fixtures_model import TensorSpec, gguf_bytes, metadata, write_layer_package


@pytest.fixture
def written(tmp_path):
    return tmp_path, write_layer_package(tmp_path)


def rewrite(directory, manifest):
    (directory / "model-package.json").write_text(json.dumps(manifest))


def test_weights_come_from_the_manifest_and_caches_from_the_metadata(written):
    directory, manifest = written
    package = open_model(directory)
    assert package.name == "tiny-layers"
    assert [layer.weight_bytes for layer in package.layers] == [entry["tensor_bytes"] for entry in manifest["layers"]]
    assert package.shared_first_bytes == manifest["shared"]["embeddings"]["tensor_bytes"]
    assert package.shared_last_bytes == manifest["shared"]["output"]["tensor_bytes"]
    assert package.kv_bytes_per_token == 3 * 128
    assert (package.native_context_length, package.activation_width) == (4096, 64)
    assert package.diagnostics == ()
    assert open_model(directory / "model-package.json") == package


def test_the_digest_changes_with_any_artifact_and_not_with_the_case_of_hashes(written):
    _, manifest = written
    digest = read_manifest(json.dumps(manifest).encode(), "m").digest
    lower = json.loads(
        json.dumps(manifest).replace(manifest["layers"][0]["sha256"], manifest["layers"][0]["sha256"].lower())
    )
    assert read_manifest(json.dumps(lower).encode(), "m").digest == digest
    manifest["layers"][2]["sha256"] = "00" * 32
    assert read_manifest(json.dumps(manifest).encode(), "m").digest != digest


def test_a_tied_package_charges_the_embedding_at_both_ends(tmp_path):
    manifest = write_layer_package(tmp_path, head=False)
    package = open_model(tmp_path)
    embedding = manifest["shared"]["embeddings"]["tensor_bytes"]
    assert package.tied_embeddings
    assert package.shared_last_bytes == manifest["shared"]["output"]["tensor_bytes"] + embedding
    last = tensor_extents(tmp_path, 2, 3, False, True)
    assert "token_embd.weight" in [extent.name for extent in last]


def test_a_node_that_holds_only_its_own_layers_can_still_plan(written):
    directory, manifest = written
    whole = open_model(directory)
    (directory / manifest["layers"][1]["path"]).unlink()
    partial = open_model(directory)
    assert partial.layers == whole.layers
    assert partial.digest == whole.digest
    assert partial.diagnostics == ("package_files_missing",)
    assert len(tensor_extents(directory, 0, 1, True, False)) == 3
    with pytest.raises(ModelError, match=r"no such file"):
        tensor_extents(directory, 0, 2, True, False)


def test_without_the_output_file_a_small_one_means_tied(tmp_path):
    manifest = write_layer_package(tmp_path, head=False)
    (tmp_path / manifest["shared"]["output"]["path"]).unlink()
    package = open_model(tmp_path)
    assert package.tied_embeddings
    assert package.diagnostics == ("tied_embeddings_assumed", "package_files_missing")


def test_experts_are_recognised_in_the_layer_files(tmp_path):
    facts = metadata(layers=3, expert_count=4, expert_used_count=1)
    manifest = write_layer_package(tmp_path, facts=facts)
    content = gguf_bytes(
        {"general.architecture": "llama"},
        [TensorSpec("blk.0.ffn_up_exps.weight", (64, 8, 4)), TensorSpec("blk.0.attn_norm.weight", (64,))],
    )
    entry = manifest["layers"][0]
    (tmp_path / entry["path"]).write_bytes(content)
    entry.update(tensor_count=2, tensor_bytes=64 * 8 * 4 * 4 + 256, artifact_bytes=len(content))
    rewrite(tmp_path, manifest)
    assert open_model(tmp_path).layers[0].streamed_bytes == 64 * 8 * 4 + 256
    (tmp_path / manifest["layers"][2]["path"]).unlink()
    assert "expert_bytes_unknown" in open_model(tmp_path).diagnostics


def test_a_stage_reads_its_own_files_only(written):
    directory, _ = written
    first = tensor_extents(directory, 0, 2, True, False)
    assert [extent.name for extent in first] == [
        "blk.0.attn_q.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.weight", "blk.1.attn_norm.weight", "token_embd.weight",
    ]  # fmt: skip
    assert {extent.file.name for extent in first} == {"000.gguf", "001.gguf", "embeddings.gguf"}
    manifest_ = read_manifest((directory / "model-package.json").read_bytes(), "m")
    assert [artifact.role for artifact in manifest_.stage_artifacts(0, 2)] == [
        "metadata",
        "embeddings",
        "layer 0",
        "layer 1",
    ]
    assert [artifact.role for artifact in manifest_.stage_artifacts(2, 3)] == ["metadata", "layer 2", "output"]
    assert len(model_files(directory)) == 1 + 3 + 3


def edited(manifest, path, value):
    changed = copy.deepcopy(manifest)
    *parents, key = path
    target = changed
    for parent in parents:
        target = target[parent]
    if value is Ellipsis:
        del target[key]
    else:
        target[key] = value
    return changed


L1 = ("layers", 1)
REJECTED = [
    (("schema_version",), 2, "schema_version is 2; expected 1"),
    (("schema_version",), ..., "schema_version is missing"),
    (("schema_version",), True, "schema_version is True"),
    (("format",), "layers", "format is 'layers'"),
    (("format",), ..., "format is missing"),
    (("model_id",), "", "model_id is ''"),
    (("model_id",), ..., "model_id is missing"),
    (("source_model",), ..., "source_model is not an object"),
    (("source_model", "path"), ..., "source_model.path is missing"),
    (("source_model", "sha256"), "xyz", "source_model.sha256 is 'xyz'"),
    (("source_model", "files"), [{"path": "a", "size_bytes": 0, "sha256": "00" * 32}], "source_model.files[0].size_bytes is 0"),
    (("source_model", "files"), [{"path": "a", "size_bytes": 1, "sha256": "0"}], "source_model.files[0].sha256"),
    (("layer_count",), 0, "layer_count is 0"),
    (("layer_count",), -1, "layer_count is -1"),
    (("layer_count",), 2.5, "layer_count is 2.5"),
    (("layer_count",), 10**18, "layer_count is 1000000000000000000"),
    (("layer_count",), 2, "layers[2].layer_index is 2; expected an index below layer_count 2"),
    (("layer_count",), 4, "layers lacks index 3 (1 of 4 missing)"),
    (("skippy_abi_version",), ..., "skippy_abi_version is missing"),
    (("activation_width",), 0, "activation_width is 0"),
    (("activation_width",), 63, "activation_width is 63 but llama.embedding_length is 64"),
    (("shared",), [], "shared is not an object"),
    (("shared", "metadata"), ..., "shared.metadata is not an object"),
    (("shared", "embeddings"), ..., "shared.embeddings is not an object"),
    (("shared", "output"), ..., "shared.output is not an object"),
    (("layers",), {}, "layers is {}; expected an array"),
    (("layers",), [1], "layers[0] is not an object"),
    ((*L1, "layer_index"), 0, "layers[1].layer_index 0 appears twice"),
    ((*L1, "layer_index"), ..., "layers[1].layer_index is missing"),
    ((*L1, "path"), "/etc/passwd", "layers[1].path is '/etc/passwd'; expected a relative path without '..'"),
    ((*L1, "path"), "../outside.gguf", "layers[1].path is '../outside.gguf'"),
    ((*L1, "path"), "layers/../../outside.gguf", "expected a relative path"),
    ((*L1, "path"), "..\\outside.gguf", "expected a relative path"),
    ((*L1, "path"), "C:/outside.gguf", "expected a relative path"),
    ((*L1, "path"), "layers//a.gguf", "expected a relative path"),
    ((*L1, "path"), "layers/./a.gguf", "expected a relative path"),
    ((*L1, "path"), "layers/a\0.gguf", "expected a relative path"),
    ((*L1, "path"), "a" * 2000, "expected a relative path"),
    ((*L1, "path"), 7, "layers[1].path is 7"),
    ((*L1, "path"), "layers/000.gguf", "path 'layers/000.gguf' is used by layer 0 and by layer 1"),
    ((*L1, "tensor_count"), 0, "layers[1].tensor_bytes is 24832; expected zero exactly when tensor_count (0) is zero"),
    ((*L1, "tensor_bytes"), 0, "layers[1].tensor_bytes is 0; expected zero exactly when tensor_count (2) is zero"),
    ((*L1, "tensor_bytes"), -5, "layers[1].tensor_bytes is -5"),
    ((*L1, "tensor_bytes"), 2**60, "layers[1].tensor_bytes is 1152921504606846976"),
    ((*L1, "tensor_bytes"), 24831, "holds 2 tensors of 24832 bytes, the manifest says 2 of 24831"),
    ((*L1, "tensor_count"), 3, "holds 2 tensors of 24832 bytes, the manifest says 3"),
    ((*L1, "artifact_bytes"), 0, "layers[1].artifact_bytes is 0"),
    ((*L1, "artifact_bytes"), 100, "layers[1].artifact_bytes is 100; expected at least the 24832"),
    ((*L1, "artifact_bytes"), 99999, "bytes, the manifest says 99999"),
    ((*L1, "sha256"), "g" * 64, "layers[1].sha256 is"),
    ((*L1, "sha256"), "0" * 63, "layers[1].sha256 is"),
    ((*L1, "sha256"), ..., "layers[1].sha256 is missing"),
    (("projectors",), [{"path": "p.gguf"}], "projectors[0].kind is missing"),
    (("projectors",), "none", "projectors is 'none'"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "words"), REJECTED)
def test_a_manifest_that_breaks_a_rule_is_refused_and_the_field_named(written, path, value, words):
    directory, manifest = written
    rewrite(directory, edited(manifest, path, value))
    with pytest.raises(ModelError) as caught:
        open_model(directory)
    assert words in str(caught.value)
    assert "model-package.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "holds a JSON list, not an object"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 90_000 + b"1" + b"}" * 90_000, "nested too deeply"),
        (b'{"schema_version": 1, "schema_version": 1}', "key 'schema_version' appears twice"),
        (b'{"layer_count": NaN}', "NaN is not a JSON number"),
        (b'{"layer_count": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"{" + b" " * MAX_MANIFEST_BYTES + b"}", "more than the 16777216 that are accepted"),
        (b'{"layers": [' + b"0," * 600_000 + b"0]}", "more than 500000 JSON values"),
    ],
)
def test_a_hostile_document_is_refused(content, words):
    with pytest.raises(ModelError, match=words.replace("(", "\\(")):
        read_manifest(content, "model-package.json")


def test_a_package_without_its_metadata_file_is_refused(written):
    directory, manifest = written
    (directory / manifest["shared"]["metadata"]["path"]).unlink()
    with pytest.raises(ModelError, match=r"shared/metadata.gguf is missing"):
        open_model(directory)


def test_a_manifest_with_another_number_of_layers_than_the_metadata_is_refused(tmp_path):
    write_layer_package(tmp_path, facts=metadata(layers=4))
    with pytest.raises(ModelError, match=r"layer_count is 3 but llama.block_count is 4"):
        open_model(tmp_path)


def test_every_truncation_of_a_manifest_is_refused(written):
    _, manifest = written
    content = json.dumps(manifest).encode()
    for length in range(len(content)):
        with pytest.raises(ModelError):
            read_manifest(content[:length], "m")
