"""What arrives on the bulk lane, judged by the stage's fence before anything else looks at it (PROTOCOL §4 and §6).

The plan epoch is the envelope's, the request epoch comes from the frame's header alone: a frame that is refused is never
decoded further, and never applied.
"""

from dataclasses import dataclass

from protocol.fencing import PlanEpoch
from protocol.frame_envelope import open_envelope
from protocol.ids import Slot
from protocol.stage_frame import request_epoch_of
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.frames import FrameVerdict


@dataclass(frozen=True, slots=True)
class JudgedFrame:
    """Whom the frame is for, and whether it may be applied."""

    slot: Slot
    epoch: PlanEpoch
    verdict: FrameVerdict


def judge_sealed(agent: StageAgent, sealed: bytes | memoryview, now_us: int) -> JudgedFrame:
    """``agent``'s verdict on the bytes of one sealed frame. Raises ``WireError`` for bytes that are not a frame."""
    envelope, raw = open_envelope(sealed)
    slot, flow = Slot(envelope.slot), request_epoch_of(raw)
    return JudgedFrame(slot, envelope.epoch, agent.accept_frame(slot, envelope.epoch, flow.request_id, flow, now_us))
