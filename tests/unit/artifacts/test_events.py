"""What people are told about transfers, and how long a liar is left alone."""

import pytest

from protocol.ids import NodeId
from stage_agent.artifacts.download import DISTRUST_US, MAX_DISTRUSTED, Distrust
from stage_agent.artifacts.events import (
    ArtifactDiscarded,
    ArtifactFetched,
    MixedPartsWrong,
    OwnFileDamaged,
    PeerMisbehaved,
    told,
)

SHA = "ab" * 32
A, B = NodeId("a" * 32), NodeId("b" * 32)
NAMES = {A: "anna", B: "bob"}


@pytest.mark.parametrize(
    ("event", "kind", "severity", "words"),
    [
        (
            PeerMisbehaved(A, SHA, "wrong_bytes"),
            "artifact_peer_misbehaved",
            "warning",
            ["anna", "wrong bytes", SHA[:12]],
        ),
        (PeerMisbehaved(B, SHA, "wrong_model"), "artifact_peer_misbehaved", "warning", ["bob", "not", SHA[:12]]),
        (MixedPartsWrong(SHA, (A, B)), "artifact_parts_wrong", "warning", ["anna, bob"]),
        (ArtifactFetched(SHA, 5, 5, 1_500_000, (A,)), "artifact_fetched", "info", ["anna", "5 bytes", "1.5 s"]),
        (ArtifactDiscarded(SHA, 5, "damaged"), "artifact_damaged", "warning", ["damaged"]),
        (ArtifactDiscarded(SHA, 5, "evicted"), "artifact_evicted", "info", ["make room"]),
        (OwnFileDamaged(SHA, "/m/x.gguf"), "model_file_damaged", "error", ["/m/x.gguf", "replace it"]),
    ],
)
def test_every_event_is_one_sentence_with_names_of_nodes(event, kind, severity, words):
    said = told(event, NAMES.__getitem__)
    assert (said[0], said[2]) == (kind, severity)
    assert "\n" not in said[1]
    assert all(word in said[1] for word in words), said[1]


def test_a_liar_is_left_alone_about_that_file_for_a_while_only():
    now_us = 1_000
    distrust = Distrust(lambda: now_us)
    distrust.add(A, SHA)
    assert (A, SHA) in distrust
    assert (B, SHA) not in distrust
    assert (A, "cd" * 32) not in distrust
    now_us += DISTRUST_US
    assert (A, SHA) not in distrust


def test_liars_cannot_fill_the_memory():
    distrust = Distrust(lambda: 0)
    for index in range(2 * MAX_DISTRUSTED):
        distrust.add(A, f"{index:064x}")
    assert len(distrust._until_us) == MAX_DISTRUSTED
    assert (A, f"{2 * MAX_DISTRUSTED - 1:064x}") in distrust
