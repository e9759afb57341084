"""Which files a stage needs, and what of a peer's listing is refused before a byte of the model moves."""

import json

import pytest

from protocol.ballots import ArtifactRef
from protocol.errors import ModelError
from stage_agent.artifacts.stage_files import (
    Listing,
    check_listing,
    is_plain_name,
    manifest_at,
    needed,
    uses_of,
)
from stage_agent.model_source import open_model, tensor_extents
from tests.fixtures_model import write_layer_package
from tests.integration.artifact_mesh import assignment_of


@pytest.fixture
def written(tmp_path):
    manifest = write_layer_package(tmp_path, 4)
    return tmp_path, manifest, open_model(tmp_path).digest


def paths(directory, start, end, digest):
    listing = Listing(manifest=manifest_at(directory)[0])
    return [file.path for file in needed(listing, assignment_of(digest, start, end))]


def test_a_stage_needs_the_metadata_its_layers_and_what_its_end_of_the_pipeline_shares(written):
    directory, _, digest = written
    assert paths(directory, 1, 3, digest) == ["shared/metadata.gguf", "layers/001.gguf", "layers/002.gguf"]
    assert paths(directory, 0, 1, digest) == ["shared/metadata.gguf", "shared/embeddings.gguf", "layers/000.gguf"]
    assert sorted(paths(directory, 3, 4, digest)) == sorted(
        ["shared/metadata.gguf", "layers/003.gguf", "shared/output.gguf", "shared/embeddings.gguf"]
    )
    assert len(paths(directory, 0, 4, digest)) == 7


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 2), (2, 3), (0, 3), (1, 3)])
def test_with_exactly_the_needed_files_the_stage_can_read_its_tensors(tmp_path, head, start, end):
    write_layer_package(tmp_path, 3, head=head)
    digest = open_model(tmp_path).digest
    whole = tensor_extents(tmp_path, start, end, start == 0, end == 3)
    kept = set(paths(tmp_path, start, end, digest))
    for file in tmp_path.rglob("*.gguf"):
        if str(file.relative_to(tmp_path)) not in kept:
            file.unlink()
    assert tensor_extents(tmp_path, start, end, start == 0, end == 3) == whole


def test_what_a_stage_needs_is_what_the_policy_lets_it_have(written):
    directory, _, digest = written
    _, manifest = manifest_at(directory)
    uses = {artifact.path: found for artifact, found in uses_of(manifest, digest)}
    for start in range(4):
        for end in range(start + 1, 5):
            wanted = set(paths(directory, start, end, digest))
            allowed = {
                path for path, found in uses.items()
                if any(start < use.layer_end and use.layer_start < end for use in found)
            }  # fmt: skip
            assert wanted == allowed


def test_a_manifest_of_another_model_is_refused_by_its_digest(written):
    directory, manifest, digest = written
    manifest["layers"][1]["sha256"] = "00" * 32
    listing = Listing(manifest=json.dumps(manifest).encode())
    with pytest.raises(ModelError, match="another model"):
        check_listing(listing, assignment_of(digest, 0, 1))
    check_listing(Listing(manifest=manifest_at(directory)[0]), assignment_of(digest, 0, 1))


def test_a_range_beyond_the_model_is_refused(written):
    directory, _, digest = written
    with pytest.raises(ModelError, match="5 were assigned of 4"):
        check_listing(Listing(manifest=manifest_at(directory)[0]), assignment_of(digest, 3, 5))


def reference(path, sha256="ab" * 32, size_bytes=5):
    return ArtifactRef(path=path, sha256=sha256, size_bytes=size_bytes)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "x" * 201, "\u202egguf"]
)
def test_a_file_name_that_leaves_the_directory_or_hides_is_refused(name):
    assert not is_plain_name(name)
    with pytest.raises(ModelError):
        check_listing(Listing((reference(name),)), assignment_of("ab" * 32, 0, 1))


@pytest.mark.parametrize("name", ["m.gguf", "Qwen3-0.6B-Q4_K_M-00001-of-00002.gguf", "config.json", "modèle 1.gguf"])
def test_ordinary_names_pass(name):
    assert is_plain_name(name)


def test_an_empty_listing_or_one_that_names_a_file_twice_is_refused():
    stage = assignment_of("ab" * 32, 0, 1)
    with pytest.raises(ModelError, match="no file"):
        check_listing(Listing(), stage)
    with pytest.raises(ModelError, match="twice"):
        check_listing(Listing((reference("a"), reference("a", "cd" * 32))), stage)


def test_when_the_assignment_names_files_no_other_is_fetched():
    named = (reference("x"), reference("y", "cd" * 32))
    stage = assignment_of("ab" * 32, 0, 1, artifacts=named)
    assert check_listing(Listing((reference("renamed"),)), stage)
    for other in (reference("x", "ef" * 32), reference("x", size_bytes=6)):
        with pytest.raises(ModelError, match="assignment does not"):
            check_listing(Listing((reference("y", "cd" * 32), other)), stage)
