"""Stage 0's open requests: who waits for which prediction, and how a request ends early."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from protocol.errors import StagemeshError
from protocol.fencing import PlanEpoch
from protocol.stage_frame import FLAG_RETRIABLE, RequestEpoch, StageFrame

InterruptReason = Literal[
    "plan_changed", "refused", "timeout", "unreachable", "not_serving", "invalid_request", "engine_failed"
]


class GenerationInterrupted(StagemeshError):  # noqa: N818 - names what happened to the request
    """A request ended without its tokens. ``retriable``: sent again it may succeed, under the plan active by then."""

    def __init__(self, reason: InterruptReason, message: str, *, retriable: bool) -> None:
        super().__init__(message)
        self.reason: InterruptReason = reason
        self.retriable = retriable


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. Times as the driver saw them, hops included."""

    tokens: tuple[int, ...]
    ttft_us: int
    """From the request to its first token."""
    token_us: tuple[int, ...]
    """Of each token after the first."""
    epochs: tuple[PlanEpoch, ...] = ()
    """Plans that the tokens came from: one, or a request was answered from two plans."""

    @property
    def tpot_us(self) -> int | None:
        """Mean time per output token after the first, rounded up; ``None`` with fewer than two tokens."""
        return -(-sum(self.token_us) // len(self.token_us)) if self.token_us else None


class OpenRequests:
    """At most one awaited prediction per flow."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], tuple[RequestEpoch, asyncio.Future[int]]] = {}

    def expect(self, epoch: RequestEpoch) -> asyncio.Future[int]:
        """A future for the prediction of exactly ``epoch``."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[epoch.request_id, epoch.session_id] = (epoch, future)
        return future

    def forget(self, epoch: RequestEpoch) -> None:
        """Nobody waits for this flow any more."""
        self._waiting.pop((epoch.request_id, epoch.session_id), None)

    def predicted(self, frame: StageFrame) -> bool:
        """Hand a prediction to who waits for it; false when it answers nothing that is awaited."""
        waiting = self._waiting.get((frame.request_id, frame.session_id))
        if waiting is None or waiting[0] != frame.request_epoch or waiting[1].done():
            return False
        waiting[1].set_result(frame.current_token)
        return True

    def refused(self, frame: StageFrame) -> bool:
        """End the refused request; false when it is not open."""
        waiting = self._waiting.get((frame.request_id, frame.session_id))
        if waiting is None or waiting[1].done():
            return False
        retriable = bool(frame.marks & FLAG_RETRIABLE)
        message = f"stage {frame.source_stage_index} refused the request" + ("; send it again" if retriable else "")
        waiting[1].set_exception(GenerationInterrupted("refused", message, retriable=retriable))
        return True

    def interrupt(self, reason: InterruptReason, message: str) -> None:
        """End every open request as retriable."""
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(GenerationInterrupted(reason, message, retriable=True))
