"""Who may have which files, in every mode."""

import itertools

import pytest

from protocol.rows import NodeRow, StageFact
from protocol.wire import Epoch
from stage_agent.artifacts.policy import AssignedRange, FileUse, assigned_ranges, judge_file, judge_manifest

MODEL, OTHER = "ab" * 32, "cd" * 32
EPOCH = Epoch(term=3, node_id="c", instance="ef" * 16)


def test_when_off_nobody_gets_anything_whatever_they_hold():
    held = (AssignedRange(MODEL, 0, 9),)
    uses = (FileUse(MODEL, 0, 9),)
    for admitted in (True, False):
        assert judge_file("off", admitted=admitted, assigned=held, uses=uses) == "mode_off"
        assert judge_manifest("off", admitted=admitted, assigned=held, model_digest=MODEL) == "mode_off"


@pytest.mark.parametrize("mode", ["trusted", "open"])
def test_a_peer_that_is_not_admitted_gets_nothing_in_any_mode(mode):
    held = (AssignedRange(MODEL, 0, 9),)
    assert judge_file(mode, admitted=False, assigned=held, uses=(FileUse(MODEL, 0, 9),)) == "not_allowed"
    assert judge_manifest(mode, admitted=False, assigned=held, model_digest=MODEL) == "not_allowed"


def test_open_serves_every_admitted_peer():
    assert judge_file("open", admitted=True, assigned=(), uses=(FileUse(MODEL, 0, 9),)) == "allowed"
    assert judge_manifest("open", admitted=True, assigned=(), model_digest=MODEL) == "allowed"


def test_trusted_serves_exactly_the_files_whose_layers_overlap_the_stage_of_the_same_model():
    for start, end, first, last in itertools.product(range(5), range(6), range(5), range(1, 6)):
        stage, use = AssignedRange(MODEL, start, end), FileUse(MODEL, first, last)
        shared = set(range(start, end)) & set(range(first, last))
        if start < end and first < last:
            expected = "allowed" if shared else "not_allowed"
            assert judge_file("trusted", admitted=True, assigned=[stage], uses=[use]) == expected
            assert (
                judge_file("trusted", admitted=True, assigned=[stage], uses=[FileUse(OTHER, first, last)]) != "allowed"
            )


def test_one_of_several_stages_and_one_of_several_uses_are_enough():
    stages = [AssignedRange(OTHER, 0, 4), AssignedRange(MODEL, 6, 8)]
    uses = [FileUse(MODEL, 0, 1), FileUse(MODEL, 7, 8)]
    assert judge_file("trusted", admitted=True, assigned=stages, uses=uses) == "allowed"
    assert judge_file("trusted", admitted=True, assigned=stages, uses=uses[:1]) == "not_allowed"
    assert judge_file("trusted", admitted=True, assigned=stages, uses=()) == "not_allowed"
    assert judge_file("trusted", admitted=True, assigned=(), uses=uses) == "not_allowed"


def row(**stage):
    fact = {"slot": "s", "model_digest": MODEL, "layer_start": 2, "layer_end": 5, "accepted": EPOCH} | stage
    return NodeRow(
        node_id="n", public_key=bytes(32), boot_counter=1, seq=1, instance="ab" * 16, name="n", version="v",
        stages=(StageFact(**fact),),
    )  # fmt: skip


@pytest.mark.parametrize("state", ["loading", "ready", "serving", "draining"])
def test_a_stage_that_is_loaded_or_loading_under_a_ballot_counts(state):
    assert assigned_ranges(row(state=state)) == (AssignedRange(MODEL, 2, 5),)
    assert assigned_ranges(row(state=state, accepted=None, active=EPOCH)) == (AssignedRange(MODEL, 2, 5),)


@pytest.mark.parametrize(
    "stage", [{"state": "idle"}, {"state": "failed"}, {"state": "loading", "accepted": None},
              {"state": "serving", "model_digest": None}],
)  # fmt: skip
def test_a_stage_without_ballot_model_or_load_does_not(stage):
    assert assigned_ranges(row(**stage)) == ()
