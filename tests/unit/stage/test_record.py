"""What an agent remembers, as a document."""

import json

import pytest

from protocol.errors import StateError
from stage_agent.stage.record import SlotRecord
from tests.unit.stage.builders import SLOT, agent, ballot, prepare, serve, stage, tell


def record():
    made = agent()
    serve(made, ballot(1))
    tell(made, prepare(ballot(2)))
    tell(made, stage(ballot(2)))
    return made.record(SLOT)


def test_a_record_survives_json_unchanged():
    assert SlotRecord.from_document(json.loads(json.dumps(record().to_document()))) == record()
    assert SlotRecord.from_document(SlotRecord().to_document()) == SlotRecord()


def test_a_record_of_a_newer_version_names_both_versions():
    with pytest.raises(StateError, match="version 2, this program reads 1"):
        SlotRecord.from_document({**record().to_document(), "version": 2})


@pytest.mark.parametrize(
    "damage",
    [
        lambda document: document.pop("promised"),
        lambda document: document["active"].pop("plan_hash"),
        lambda document: document["active"]["assignment"].update(layer_end=-1),
        lambda document: document.update(stranger=1),
        lambda document: document.update(cache_epoch="7"),
        lambda document: document.update(accepted=[]),
    ],
)
def test_a_damaged_record_is_never_half_believed(damage):
    document = record().to_document()
    damage(document)
    with pytest.raises(StateError, match="damaged"):
        SlotRecord.from_document(document)


@pytest.mark.parametrize("nonsense", [None, 7, "text", [], {}])
def test_something_else_is_refused(nonsense):
    with pytest.raises(StateError):
        SlotRecord.from_document(nonsense)
