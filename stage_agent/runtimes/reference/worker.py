"""One stage's share of a step: a frame in, frames out. Synchronous; the runtime calls it from one thread only.

Sessions are kept up to the assignment's lanes; a new one beyond that takes the place of the least recently used, whose
request is then refused as retriable at its next frame. A frame that starts inside what is cached rewinds the session, so
a repeated frame is harmless; one that starts behind it, or that continues a cache which the previous stage has rebuilt,
is refused: the request must start over.
"""

import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from protocol.ballots import StageAssignment
from protocol.stage_frame import FLAG_LAST_CHUNK, FLAG_RETRIABLE, FrameDtype, FrameKind, StageFrame
from stage_agent.runtimes.reference.decoder import SessionCache, StageDecoder
from stage_agent.runtimes.reference.dequantise import Floats
from stage_agent.runtimes.timing import DecodeMeter


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A frame for node ``peer``, which may be this node."""

    peer: str
    frame: StageFrame


class StageWorker:
    """The decoder, its sessions and its timings under one assignment. ``dropped`` counts frames by reason."""

    def __init__(
        self, decoder: StageDecoder, assignment: StageAssignment, shaped_bytes_per_s: int | None = None
    ) -> None:
        self._decoder = decoder
        self._floor_ns = 0
        if shaped_bytes_per_s:
            # Pretended hardware: a decoded token streams the stage's weights once at the pretended bandwidth.
            self._floor_ns = assignment.parameter_bytes * 1_000_000_000 // shaped_bytes_per_s
        self._assignment = assignment
        self._sessions: dict[int, SessionCache] = {}
        self.meter = DecodeMeter(decoder.layer_count)
        self.dropped: Counter[str] = Counter()

    def adopt(self, assignment: StageAssignment) -> None:
        """Serve under a new plan: neighbours may differ, caches are kept iff the cache epoch is the same."""
        if assignment.cache_epoch != self._assignment.cache_epoch:
            self._sessions.clear()
        self._assignment = assignment

    def own(self, frame: StageFrame) -> list[Outgoing]:
        """Stage 0: embed ``frame.token_ids`` and run them."""
        hidden = self._decoder.embed(frame.token_ids)
        return self._advance(replace(frame, token_ids=()), hidden, self._assignment.cache_epoch.value)

    def received(self, frame: StageFrame, sender_cache_epoch: int) -> list[Outgoing]:
        """A frame of the active plan from another stage."""
        match frame.kind:
            case FrameKind.PREFILL | FrameKind.DECODE:
                size = frame.token_count * self._decoder.width * 4
                if frame.dtype is not FrameDtype.F32 or len(frame.payload) != size or not frame.token_count:
                    return self._drop("malformed_activation")
                hidden = np.frombuffer(frame.payload, dtype="<f4").reshape(frame.token_count, self._decoder.width)
                return self._advance(frame, hidden, sender_cache_epoch)
            case FrameKind.DISCARD:
                return self.discard(frame)
            case FrameKind.REFUSED:
                return [Outgoing(self._assignment.driver, frame)]
            case FrameKind.PREDICTION | FrameKind.STATE_IMPORT:
                return self._drop("unexpected_kind")

    def discard(self, frame: StageFrame) -> list[Outgoing]:
        """Forget the session, and pass the notice on whether or not there was one."""
        self._sessions.pop(frame.session_id, None)
        return [Outgoing(self._assignment.next, frame)] if self._assignment.next else []

    def _advance(self, frame: StageFrame, hidden: Floats, sender_cache_epoch: int) -> list[Outgoing]:
        if frame.pos_start + len(hidden) > self._assignment.context_length:
            return self._refuse(frame, "over_context", retriable=False)
        cache = self._session(frame, sender_cache_epoch)
        if cache is None:
            return self._refuse(frame, "cache_missing", retriable=True)
        started_ns = time.perf_counter_ns()
        hidden = self._decoder.run(hidden, frame.pos_start, cache)
        if frame.kind is FrameKind.DECODE:
            spent_ns = time.perf_counter_ns() - started_ns
            if spent_ns < self._floor_ns:
                time.sleep((self._floor_ns - spent_ns) / 1e9)
            self.meter.record(time.perf_counter_ns() - started_ns, time.monotonic_ns() // 1_000)
        if self._assignment.next:
            moved = replace(
                frame, source_stage_index=self._assignment.stage_index, dtype=FrameDtype.F32, payload=hidden.tobytes()
            )
            return [Outgoing(self._assignment.next, moved)]
        if frame.kind is FrameKind.PREFILL and not frame.marks & FLAG_LAST_CHUNK:
            return []
        return [
            Outgoing(self._assignment.driver, self._reply(frame, FrameKind.PREDICTION, self._decoder.predict(hidden)))
        ]

    def _session(self, frame: StageFrame, sender_cache_epoch: int) -> SessionCache | None:
        """The cache to extend at ``pos_start``, most recently used from now on; ``None`` when it is not there."""
        cache = self._sessions.pop(frame.session_id, None)
        if frame.pos_start == 0:
            cache = self._decoder.new_cache(sender_cache_epoch)
        if cache is None or cache.length < frame.pos_start or cache.sender_cache_epoch != sender_cache_epoch:
            return None
        self._sessions[frame.session_id] = cache
        while len(self._sessions) > max(1, self._assignment.lanes):
            del self._sessions[next(iter(self._sessions))]
            self.dropped["session_evicted"] += 1
        return cache

    def _reply(self, frame: StageFrame, kind: FrameKind, token: int, marks: int = 0) -> StageFrame:
        return StageFrame(
            kind=kind,
            request_id=frame.request_id,
            session_id=frame.session_id,
            pos_start=frame.pos_start,
            seq_id=frame.seq_id,
            marks=marks,
            checkpoint_generation=frame.checkpoint_generation,
            prompt_token_count=frame.prompt_token_count,
            decode_step=frame.decode_step,
            current_token=token,
            source_stage_index=self._assignment.stage_index,
        )

    def _refuse(self, frame: StageFrame, reason: str, *, retriable: bool) -> list[Outgoing]:
        self.dropped[reason] += 1
        marks = FLAG_RETRIABLE if retriable else 0
        return [Outgoing(self._assignment.driver, self._reply(frame, FrameKind.REFUSED, -1, marks))]

    def _drop(self, reason: str) -> list[Outgoing]:
        self.dropped[reason] += 1
        return []
