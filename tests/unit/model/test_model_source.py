"""From a path to a model: what is found, and one line for each way it can fail."""

import os

import pytest

from protocol.errors import ModelError
from stage_agent.model_source import model_files, open_model, tensor_extents
from tests.fixtures_model import TensorSpec, gguf_bytes, metadata, tensors
from tests.unit.model.test_gguf_shards import split_set

WHOLE = tensors(4)


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(metadata(), WHOLE, fill=3))
    return path


@pytest.fixture
def split(tmp_path):
    paths = [tmp_path / f"tiny-{index + 1:05d}-of-00003.gguf" for index in range(3)]
    for path, content in zip(paths, split_set([], WHOLE[:5], WHOLE[5:]), strict=True):
        path.write_bytes(content)
    return paths


def test_a_file_and_its_directory_are_the_same_model(whole):
    assert open_model(whole) == open_model(whole.parent) == open_model(str(whole))


def test_any_shard_opens_the_whole_set(split):
    models = [open_model(path) for path in [*split, split[0].parent]]
    assert models == [models[0]] * 4
    assert models[0].layer_count == 4
    assert model_files(split[2]) == tuple(split)


def test_a_missing_shard_is_named(split):
    split[1].unlink()
    with pytest.raises(ModelError, match=r"shard tiny-00002-of-00003.gguf is missing \(1 of 3 are\)"):
        open_model(split[0])


def test_the_model_s_own_name_wins_over_the_file_s(whole):
    assert open_model(whole).name == "tiny"
    facts = metadata()
    del facts["general.name"]
    whole.write_bytes(gguf_bytes(facts, WHOLE))
    assert open_model(whole).name == "tiny"
    renamed = whole.rename(whole.with_name("Other Name.gguf"))
    assert open_model(renamed).name == "Other Name"


def test_the_path_is_not_part_of_the_digest(whole, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "renamed.gguf"
    other.write_bytes(whole.read_bytes())
    assert open_model(other).digest == open_model(whole).digest


def test_a_projector_beside_the_model_does_not_confuse(whole):
    whole.with_name("mmproj-tiny.gguf").write_bytes(b"whatever")
    assert open_model(whole.parent).layer_count == 4


def test_missing_files_and_directories_without_a_model(tmp_path):
    for path, words in [
        (tmp_path / "none.gguf", "none.gguf: no such file or directory"),
        (tmp_path / "a" / "b", "no such file or directory"),
        (tmp_path, "no model in this directory"),
        ("bad\0path", "cannot be read"),
        ("x" * 5000, "cannot be read"),
    ]:
        with pytest.raises(ModelError) as caught:
            open_model(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_directory_with_several_models_asks_for_one(whole):
    whole.with_name("other.gguf").write_bytes(whole.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 models; name one: other.gguf, tiny.gguf"):
        open_model(whole.parent)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_says_what_to_do(whole):
    whole.chmod(0)
    with pytest.raises(ModelError, match=r"permission denied; make it readable"):
        open_model(whole)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match=r"pipe.gguf: not a regular file"):
        open_model(tmp_path / "pipe.gguf")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"#!/bin/sh\n", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"GGUF", "truncated"),
    ],
)
def test_what_is_not_a_model_is_refused_in_one_line(whole, content, words):
    whole.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        open_model(whole)


def test_a_download_that_stopped_is_refused(whole):
    content = whole.read_bytes()
    whole.write_bytes(content[:-1])
    with pytest.raises(ModelError, match=r"truncated: tensor 'output.weight' ends 1 bytes behind the end"):
        open_model(whole)


def test_a_stage_finds_its_tensors_bytes_in_the_file(whole):
    content = whole.read_bytes()
    for extent in tensor_extents(whole, 0, 4, True, True):
        assert content[extent.offset : extent.offset + extent.nbytes] == bytes([3]) * extent.nbytes
    extent = next(e for e in tensor_extents(whole, 0, 1, True, False) if e.name == "token_embd.weight")
    assert (extent.file, extent.type, extent.shape, extent.nbytes) == (whole, "F16", (64, 100), 12_800)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_two_stages_together_read_every_tensor_exactly_once(whole, cut):
    first = tensor_extents(whole, 0, cut, True, False)
    second = tensor_extents(whole, cut, 4, False, True)
    assert sorted(extent.name for extent in first + second) == sorted(str(spec.name) for spec in WHOLE)


def test_a_middle_stage_reads_its_layers_and_the_rope_tables(whole):
    whole.write_bytes(gguf_bytes(metadata(), [*WHOLE, TensorSpec("rope_freqs.weight", (8,))]))
    names = [extent.name for extent in tensor_extents(whole, 1, 2, False, False)]
    assert names == ["blk.1.attn_q.weight", "blk.1.attn_norm.weight", "rope_freqs.weight"]


def test_with_tied_embeddings_the_last_stage_reads_the_embedding(whole):
    whole.write_bytes(gguf_bytes(metadata(), tensors(4, head=False)))
    names = [extent.name for extent in tensor_extents(whole, 3, 4, False, True)]
    assert names == ["token_embd.weight", "blk.3.attn_q.weight", "blk.3.attn_norm.weight", "output_norm.weight"]


def test_extents_of_a_split_model_name_the_shard(split):
    extents = tensor_extents(split[0], 0, 4, True, True)
    assert {extent.file for extent in extents} == set(split[1:])
    assert len(extents) == len(WHOLE)


def test_a_stage_s_extents_weigh_what_the_package_says(whole):
    package = open_model(whole)
    extents = tensor_extents(whole, 1, 3, False, False)
    assert sum(extent.nbytes for extent in extents) == sum(layer.weight_bytes for layer in package.layers[1:3])


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_a_crash(whole):
    from stage_agent.model_files import FileSource

    source = FileSource(whole)
    whole.write_bytes(whole.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"became shorter"):
        source.read(0, 200)


def test_a_larger_activation_value_widens_the_frame_only(whole):
    narrow, wide = open_model(whole), open_model(whole, activation_value_bytes=4)
    assert wide.activation_frame_bytes == 2 * narrow.activation_frame_bytes
    assert wide.layers == narrow.layers
