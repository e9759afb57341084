"""What of each model is here, as the planner and the peers are told."""

import pytest

from protocol.rows import ModelFact, NodeRow, ServedModel
from stage_agent.artifacts.inventory import MAX_FACTS, holders_of, missing_weight_bytes, model_facts, offered_models
from stage_agent.model_source import open_model
from tests.fixtures_model import gguf_bytes, metadata, tensors, write_layer_package

DIGEST = "ab" * 32


def test_a_whole_model_lacks_nothing_and_a_package_lacks_its_absent_layers(tmp_path):
    manifest = write_layer_package(tmp_path / "package", 3)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata(layers=2), tensors(2)))
    assert missing_weight_bytes(tmp_path / "m.gguf") == 0
    assert missing_weight_bytes(tmp_path / "package") == 0
    for layer in (0, 2):
        (tmp_path / "package" / manifest["layers"][layer]["path"]).unlink()
    expected = manifest["layers"][0]["tensor_bytes"] + manifest["layers"][2]["tensor_bytes"]
    assert missing_weight_bytes(tmp_path / "package") == expected
    assert missing_weight_bytes(tmp_path / "nothing") is None


@pytest.fixture
def package(tmp_path):
    write_layer_package(tmp_path / "package", 3)
    return open_model(tmp_path / "package")


@pytest.mark.parametrize(
    ("mode", "missing", "offered", "transfer"),
    [
        ("trusted", {}, True, True), ("trusted", {}, False, False), ("off", {}, True, False),
        ("trusted", 0, False, True), ("off", 0, True, False), ("open", 100, True, True), ("open", 100, False, False),
    ],
)  # fmt: skip
def test_missing_bytes_can_come_from_peers_only_where_transfers_are_on_and_somebody_offers(
    package, mode, missing, offered, transfer
):
    held = {} if missing == {} else {package.digest: missing}
    (fact,) = model_facts(mode, [package], held, {package.digest} if offered else ())
    lacking = package.weight_bytes if missing == {} else missing
    assert fact == ModelFact(
        digest=package.digest,
        cached_bytes=package.weight_bytes - lacking,
        missing_bytes=lacking,
        artifact_transfer=transfer,
    )


def test_more_is_never_missing_than_the_model_weighs(package):
    (fact,) = model_facts("open", [package], {package.digest: 10**15}, ())
    assert (fact.cached_bytes, fact.missing_bytes) == (0, package.weight_bytes)


def test_a_row_holds_its_bound_of_facts_complete_models_first(package):
    from dataclasses import replace

    many = [replace(package, digest=f"{index:064x}") for index in range(MAX_FACTS + 9)]
    facts = model_facts("open", many, {many[-1].digest: 0}, ())
    assert len(facts) == MAX_FACTS
    assert facts[0].digest == many[-1].digest


def row(name, *facts, serves=()):
    return NodeRow(
        node_id=name, public_key=bytes(32), boot_counter=1, seq=1, instance="ab" * 16, name=name, version="v",
        models=facts, serves=tuple(ServedModel(slot="s", source="/m", digest=digest, version=1) for digest in serves),
    )  # fmt: skip


def fact(cached, *, transfer=True, digest=DIGEST):
    return ModelFact(digest=digest, cached_bytes=cached, artifact_transfer=transfer)


def test_who_serves_the_model_is_asked_first_then_who_has_most_of_it():
    rows = [
        row("d", fact(10)), row("c", fact(90)), row("b", fact(90)), row("a", fact(5), serves=(DIGEST,)),
        row("e", fact(99, transfer=False)), row("f", fact(0)), row("g", fact(50, digest="cd" * 32)),
    ]  # fmt: skip
    assert holders_of(DIGEST, rows) == ("a", "b", "c", "d")
    assert offered_models(rows) == {DIGEST, "cd" * 32}
    assert offered_models([row("e", fact(99, transfer=False)), row("f", fact(0))]) == frozenset()
