"""One stage's share of a step: which caches it continues, and which frames it refuses or drops."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protocol.stage_frame import FLAG_LAST_CHUNK, FLAG_RETRIABLE, FrameDtype, FrameKind, StageFrame
from stage_agent.runtimes.reference.decoder import StageDecoder
from stage_agent.runtimes.reference.weights import read_stage
from stage_agent.runtimes.reference.worker import Outgoing, StageWorker
from tests.unit.runtimes.conftest import WIDTH
from tests.unit.runtimes.stages import assignments

FIRST, MIDDLE, LAST = assignments([(0, 2), (2, 4), (4, 6)], context=64)


@pytest.fixture
def middle(model: Path) -> StageWorker:
    weights = read_stage(model, 2, 4, first=False, last=False, report=lambda _a, _b: None, stopped=lambda: False)
    return StageWorker(StageDecoder(weights), MIDDLE)


def frame(kind: FrameKind, start: int, tokens: int, **changes: object) -> StageFrame:
    payload = np.ones((tokens, WIDTH), dtype="<f4").tobytes()
    made = StageFrame(
        kind=kind,
        request_id=1,
        session_id=1,
        pos_start=start,
        token_count=tokens,
        dtype=FrameDtype.F32,
        payload=payload,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def refused(outgoing: list[Outgoing], *, retriable: bool) -> bool:
    (only,) = outgoing
    marks = FLAG_RETRIABLE if retriable else 0
    return (only.peer, only.frame.kind, only.frame.marks) == ("n0", FrameKind.REFUSED, marks)


def test_activations_go_on_to_the_next_stage_in_the_same_flow_and_at_the_same_positions(middle: StageWorker) -> None:
    (sent,) = middle.received(frame(FrameKind.PREFILL, 0, 3, marks=FLAG_LAST_CHUNK), 0)
    assert sent.peer == "n2"
    assert (sent.frame.pos_start, sent.frame.token_count, sent.frame.marks) == (0, 3, FLAG_LAST_CHUNK)
    assert sent.frame.source_stage_index == 1
    assert len(sent.frame.payload) == 3 * WIDTH * 4
    assert sent.frame.request_epoch == frame(FrameKind.PREFILL, 0, 3).request_epoch


def test_a_frame_behind_what_is_cached_is_refused_as_retriable(middle: StageWorker) -> None:
    middle.received(frame(FrameKind.PREFILL, 0, 3), 0)
    assert refused(middle.received(frame(FrameKind.DECODE, 4, 1), 0), retriable=True)
    assert refused(middle.received(frame(FrameKind.DECODE, 3, 1, session_id=2), 0), retriable=True)


def test_a_cache_that_the_stage_before_has_rebuilt_is_not_continued(middle: StageWorker) -> None:
    middle.received(frame(FrameKind.PREFILL, 0, 3), 7)
    assert middle.received(frame(FrameKind.DECODE, 3, 1), 7)[0].frame.kind is FrameKind.DECODE
    assert refused(middle.received(frame(FrameKind.DECODE, 4, 1), 8), retriable=True)
    assert middle.received(frame(FrameKind.PREFILL, 0, 3), 8)[0].frame.kind is FrameKind.PREFILL


def test_a_request_over_the_context_is_refused_for_good(middle: StageWorker) -> None:
    assert refused(middle.received(frame(FrameKind.PREFILL, 0, 65), 0), retriable=False)


def test_a_discard_is_passed_on_with_or_without_a_session(middle: StageWorker) -> None:
    notice = StageFrame(kind=FrameKind.DISCARD, request_id=1, session_id=1)
    assert middle.received(notice, 0) == [Outgoing("n2", notice)]
    middle.received(frame(FrameKind.PREFILL, 0, 3), 0)
    assert middle.received(notice, 0) == [Outgoing("n2", notice)]
    assert refused(middle.received(frame(FrameKind.DECODE, 3, 1), 0), retriable=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": b""},
        {"payload": b"1234" * (WIDTH - 1)},
        {"dtype": FrameDtype.F16},
        {"token_count": 2},
        {"token_count": 0, "payload": b""},
    ],
)
def test_activations_of_another_shape_or_type_are_dropped_and_counted(
    middle: StageWorker, changes: dict[str, object]
) -> None:
    assert middle.received(frame(FrameKind.DECODE, 0, 1, **changes), 0) == []
    assert middle.dropped["malformed_activation"] == 1
