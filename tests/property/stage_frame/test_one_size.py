"""One size: what is estimated, encoded, sealed, told, sent over the lane and priced differs by stated constants alone."""

import asyncio
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.model.package import Layer, ModelPackage
from coordinator.planner.network import network_of
from coordinator.planner.problem import Calibration, Participant, PlanningProblem
from coordinator.planner.trust import trusted_signals
from protocol.fencing import PlanEpoch
from protocol.frame_envelope import ENVELOPE_BYTES, FrameEnvelope, open_sealed
from protocol.ids import Instance, NodeId
from protocol.stage_frame import (
    FLAG_LAST_CHUNK,
    FLAG_RETRIABLE,
    HEADER_BYTES,
    MAX_LOGIT_BIASES,
    FrameDtype,
    FrameKind,
    LogitBias,
    Sampling,
    StageFrame,
)
from stage_agent.stage_link import LENGTH_BYTES, BulkStageLink
from tests.property.stage_frame.test_properties import FRAMES

ENVELOPE = FrameEnvelope(PlanEpoch(7, NodeId("n"), Instance("ab" * 16)), "default", 3)


class Lane:
    """A bulk stream that keeps what is written to it, and the transport that opens it."""

    def __init__(self) -> None:
        self.written = bytearray()

    async def open_bulk(self, _peer: NodeId, _kind: str, _header: bytes) -> tuple[None, "Lane"]:
        return None, self

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass


def shapes() -> list[StageFrame]:
    """Every kind with every section absent, empty where that is something, small, and as full as its count allows."""
    biases = tuple(LogitBias(token, 0.5) for token in range(MAX_LOGIT_BIASES))
    samplings = (None, Sampling(), Sampling(logit_biases=biases[:1]), Sampling(logit_biases=biases))
    sections = product(samplings, (None, b"", b"{}"), ((), (1,), (1, 2, 3)), ((), (0,), (0, 1, 2)))
    every = [
        dict(zip(("sampling", "chat_metadata", "token_ids", "position_ids"), each, strict=True)) for each in sections
    ]
    bare = [every[0]]
    return [
        StageFrame(kind=kind, request_id=2**64 - 1, session_id=1, marks=marks, dtype=dtype, payload=payload, **section)
        for kind in FrameKind
        for section in (bare if kind is FrameKind.STATE_IMPORT else every)
        for marks, dtype, payload in (
            (0, FrameDtype.NONE, b""),
            (FLAG_LAST_CHUNK, FrameDtype.F16, bytes(6)),
            (FLAG_RETRIABLE, FrameDtype.F32, bytes(257)),
        )
    ]


def test_every_shape_is_as_long_as_it_says_encoded_sealed_and_told() -> None:
    frames = shapes()
    assert len(frames) == 3 * (5 * 4 * 3 * 3 * 3 + 1)
    for frame in frames:
        size = frame.estimated_wire_bytes()
        assert size == len(frame.encode()) == sum(len(part) for part in frame.parts())
        sealed = ENVELOPE.seal(frame)
        assert len(sealed) == size + ENVELOPE_BYTES
        assert open_sealed(sealed) == (ENVELOPE, frame)
        told = frame.telemetry()
        assert told["llama_stage.message_wire_bytes"] == size
        assert told["skippy.activation_bytes"] == len(frame.payload)


@settings(max_examples=40)
@given(FRAMES)
def test_what_conditioner_and_bandwidth_see_is_the_frame_its_envelope_and_its_length(frame: StageFrame) -> None:
    """Both work on the bytes that the link writes to the lane."""
    lane = Lane()
    asyncio.run(BulkStageLink(lane, NodeId("a")).send("b", ENVELOPE.seal(frame)))  # type: ignore[arg-type]
    assert len(lane.written) == LENGTH_BYTES + ENVELOPE_BYTES + frame.estimated_wire_bytes()


@given(st.integers(1, 2**12), st.integers(0, 2**8), st.integers(1, 16))
def test_planner_and_simulator_price_what_a_frame_carries_behind_its_header(
    activation: int, sideband: int, tokens: int
) -> None:
    model = ModelPackage("m", "0" * 64, (Layer(1, 1, 1),), 0, 0, 4096, activation, required_sideband_bytes=sideband)
    problem = PlanningProblem(model, (Participant("n", 2**30),), (), Calibration())
    network = network_of(model, trusted_signals(problem), problem.calibration, "allow_fallback")
    payload = bytes((activation + sideband) * tokens)
    frame = StageFrame(kind=FrameKind.PREFILL, request_id=1, session_id=1, token_count=tokens, payload=payload)
    assert network.frame_bytes * tokens == frame.estimated_wire_bytes() - HEADER_BYTES
