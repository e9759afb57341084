"""The queueing core: requests wait for a lane, then their passes queue at the stages, first come first served.

Theory of operation. All passes visit all stages in the same order and every stage serves in order of arrival, so no
pass ever overtakes another. It is therefore exact to take passes in the order in which they reach stage 0 and to walk
each one through all its stages at once; the event heap holds one entry per active lane instead of one per stage.

Once only decoding lanes are left and one round of tokens has moved every clock by the same amount, all further rounds
are copies of it, until a request ends, a lane fills or the outside changes. ``_skip_rounds`` adds those copies up in one
step: integers shifted by a whole number of periods, so the result is the same as walking them (a test compares both).
A hundred thousand requests on four stages take seconds instead of minutes.

A prompt is prefilled in chunks; a chunk may enter stage 0 when the one before has left it, and other lanes' passes slip
in between. The first token leaves after one decode pass behind the last chunk. An interruption loses the pass in flight
and the cache: the request keeps its tokens and prefills prompt and tokens again.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

from coordinator.simulator.arrivals import Arrivals
from coordinator.simulator.pipeline import PassTimes, Pipeline

FOREVER = 2**62
MAX_SPANS = 4_000
"""Spans kept for the timeline; what happens later is counted, not drawn."""
MAX_DRAWN_S = 86_400
"""One day of tokens per second is kept for drawing."""


@dataclass(slots=True)
class Request:
    """One request on its way."""

    number: int
    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    to_prefill: int
    in_decode: bool = False
    """A decode pass is in flight: the next wake-up delivers its token."""
    done_tokens: int = 0
    first_token_us: int = 0
    last_token_us: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A stage at work for a request: computing in ``[start, computed)``, sending in ``[computed, end)``."""

    stage_index: int
    node_id: str
    request: int
    kind: Literal["prefill", "decode"]
    start_us: int
    computed_us: int
    end_us: int


@dataclass(slots=True)
class Tally:
    """What is counted while running; times in µs."""

    completed: int = 0
    failed: int = 0
    too_long: int = 0
    """Of the failed: longer than the context."""
    tokens: int = 0
    prefilled_again: int = 0
    interrupted: int = 0
    in_system_area: int = 0
    """∫ number of requests in the system dt."""
    last_token_us: int = 0
    ttft_us: "array[int]" = field(default_factory=lambda: array("q"))
    tpot_us: "array[int]" = field(default_factory=lambda: array("q"))
    latency_us: "array[int]" = field(default_factory=lambda: array("q"))
    busy_us: dict[str, int] = field(default_factory=dict)
    """Compute time by node."""
    spans: list[Span] = field(default_factory=list)
    tokens_by_second: dict[int, float] = field(default_factory=dict)
    """Only with ``draw``: rounds that were skipped are spread evenly. Nothing after ``MAX_DRAWN_S``."""


class Engine:
    """Runs requests through one pipeline at a time. ``serve``, ``retime`` and ``interrupt`` change the outside."""

    def __init__(
        self,
        arrivals: Arrivals,
        on_finished: Callable[[int], None] | None = None,
        *,
        skip: bool = True,
        draw: bool = False,
    ) -> None:
        self.tally = Tally()
        self.now_us = 0
        self._arrivals = arrivals
        self._on_finished = on_finished
        self._skip = skip
        self._drawing = draw
        self._pipeline: Pipeline | None = None
        self._hold: tuple[int, ...] = ()
        self._lanes = 0
        self._context = 0
        self._free: list[int] = []
        self._busy: list[int] = []
        self._waiting: deque[Request] = deque()
        self._active: list[tuple[int, int, Request]] = []
        self._sequence = 0
        self._numbered = 0
        self._in_system = 0
        self.serving_us = 0
        self._prefilling = 0
        self._leader = -1
        self._last_round: tuple[int, object, tuple[int, ...]] | None = None

    def serve(self, pipeline: Pipeline, lanes: int, context_length: int) -> None:
        """Start serving on ``pipeline`` now; nothing may be in service."""
        assert not self._active
        self._settle_busy()
        self._pipeline, self._lanes, self._context = pipeline, lanes, context_length
        self._hold = pipeline.decode.hold_us
        self._free = [self.now_us] * len(self._hold)
        self._busy = [0] * len(self._hold)
        while self._waiting and len(self._active) < self._lanes:
            self._begin(self._waiting.popleft())

    def retime(self, pipeline: Pipeline) -> None:
        """Same stages, other times, from the next pass on."""
        assert self._pipeline is not None
        assert pipeline.node_ids == self._pipeline.node_ids
        self._pipeline, self._hold = pipeline, pipeline.decode.hold_us
        self._last_round = None

    def interrupt(self) -> int:
        """Stop serving now: passes in flight and caches are lost. How many requests were hit."""
        hit = [request for _, _, request in sorted(self._active, key=lambda entry: entry[2].number)]
        for request in hit:
            request.in_decode = False
            request.to_prefill = request.prompt_tokens + request.done_tokens
            self.tally.prefilled_again += request.to_prefill
        self._waiting.extendleft(reversed(hit))
        self.tally.interrupted += len(hit)
        for index, free in enumerate(self._free):
            booked = max(0, free - self.now_us)
            self._busy[index] = max(0, self._busy[index] - booked)
        self._settle_busy()
        self._active, self._pipeline, self._prefilling, self._last_round = [], None, 0, None
        return len(hit)

    def fail_waiting(self) -> int:
        """Nothing will ever serve again: every request still here, and every one still to come, has failed."""
        self._drop_waiting()
        # a failed request of a closed loop sends its user's next one
        while self._arrivals.next_us is not None:
            self._advance(max(self.now_us, self._arrivals.next_us))
            self._arrive()
            self._drop_waiting()
        return self.tally.failed

    def _drop_waiting(self) -> None:
        while self._waiting:
            self._waiting.popleft()
            self._ended(failed=True)

    @property
    def idle(self) -> bool:
        """No request is here and none will come."""
        return self._in_system == 0 and self._arrivals.next_us is None

    def run_until(self, limit_us: int) -> None:
        """Advance to ``limit_us``, or to the end of the last request when that is earlier."""
        while not self.idle:
            arrival = self._arrivals.next_us
            wake = self._active[0][0] if self._active else FOREVER
            at = min(FOREVER if arrival is None else arrival, wake)
            if at >= limit_us:
                break
            self._advance(max(at, self.now_us))
            if arrival is not None and arrival <= wake:
                self._arrive()
            else:
                self._wake(limit_us)
        if limit_us < FOREVER and not self.idle:
            self._advance(max(limit_us, self.now_us))

    def _advance(self, at_us: int) -> None:
        self.tally.in_system_area += self._in_system * (at_us - self.now_us)
        if self._active:
            self.serving_us += at_us - self.now_us
        self.now_us = at_us

    def _arrive(self) -> None:
        at_us, prompt, output = self._arrivals.take()
        # an arrival that only joins the queue may have been passed over by a skip: it was in the system meanwhile
        self.tally.in_system_area += self.now_us - at_us
        request = Request(self._numbered, at_us, prompt, output, to_prefill=prompt)
        self._numbered += 1
        self._in_system += 1
        if self._pipeline is not None and prompt + output > self._context:
            self.tally.too_long += 1
            self._ended(failed=True)
        elif self._pipeline is not None and len(self._active) < self._lanes:
            self._begin(request)
        else:
            self._waiting.append(request)

    def _begin(self, request: Request) -> None:
        if request.prompt_tokens + request.output_tokens > self._context:
            self.tally.too_long += 1
            self._ended(failed=True)
            return
        self._prefilling += 1
        self._last_round = None
        self._schedule(self.now_us, request)

    def _schedule(self, at_us: int, request: Request) -> None:
        self._sequence += 1
        heappush(self._active, (at_us, self._sequence, request))

    def _wake(self, limit_us: int) -> None:
        assert self._pipeline is not None
        _, _, request = heappop(self._active)
        if request.to_prefill:
            chunk = min(request.to_prefill, self._pipeline.chunk_tokens)
            times = self._pipeline.prefill(chunk)
            end = self._walk(times, times.hold_us, request.number, "prefill")
            request.to_prefill -= chunk
            if request.to_prefill:
                end = self._free[0]
            else:
                self._prefilling -= 1
            self._schedule(end, request)
            return
        if request.in_decode and self._token(request):
            return
        request.in_decode = True
        end = self._walk(self._pipeline.decode, self._hold, request.number, "decode")
        self._schedule(end, request)
        if self._skip and not self._prefilling:
            self._skip_rounds(limit_us, request)

    def _walk(self, times: PassTimes, hold: tuple[int, ...], number: int, kind: Literal["prefill", "decode"]) -> int:
        """Book every stage for one pass that reaches stage 0 now; when its result is back at stage 0."""
        at, free = self.now_us, self._free
        recording = len(self.tally.spans) < MAX_SPANS
        for index, held in enumerate(hold):
            at = max(free[index], at)
            if recording:
                self._record(index, number, kind, at, times.compute_us[index], held)
            at += held
            free[index] = at
            self._busy[index] += times.compute_us[index]
        return at + times.tail_us

    def _record(
        self, index: int, number: int, kind: Literal["prefill", "decode"], at: int, compute_us: int, held: int
    ) -> None:
        assert self._pipeline is not None
        node = self._pipeline.node_ids[index]
        self.tally.spans.append(Span(index, node, number, kind, at, at + compute_us, at + held))

    def _token(self, request: Request) -> bool:
        """Deliver the token of the pass that ends now; whether the request is finished."""
        request.done_tokens += 1
        self.tally.tokens += 1
        if self._drawing:
            self._draw(self.now_us, self.now_us, 1)
        if request.done_tokens == 1:
            request.first_token_us = self.now_us
        if request.done_tokens < request.output_tokens:
            return False
        tally = self.tally
        tally.last_token_us = self.now_us
        tally.ttft_us.append(request.first_token_us - request.arrival_us)
        tally.latency_us.append(self.now_us - request.arrival_us)
        if request.output_tokens > 1:
            gaps = request.output_tokens - 1
            tally.tpot_us.append((self.now_us - request.first_token_us + gaps // 2) // gaps)
        self._last_round = None
        self._ended(failed=False)
        while self._waiting and len(self._active) < self._lanes:
            self._begin(self._waiting.popleft())
        return True

    def _ended(self, *, failed: bool) -> None:
        self._in_system -= 1
        if failed:
            self.tally.failed += 1
        else:
            self.tally.completed += 1
        self._arrivals.finished(self.now_us)
        if self._on_finished is not None:
            self._on_finished(self.tally.completed + self.tally.failed)

    def _skip_rounds(self, limit_us: int, request: Request) -> None:
        """Add up identical rounds. Called after a decode pass was booked while no lane prefills."""
        if self._last_round is None:
            self._leader = request.number
        elif request.number != self._leader:
            return
        if len(self.tally.spans) < MAX_SPANS and self._sequence < MAX_SPANS:
            return
        now = self.now_us
        lanes = sorted(self._active)
        state = (
            tuple((at - now, one.number) for at, _, one in lanes),
            tuple(max(free - now, 0) for free in self._free),
        )
        tokens = tuple(one.done_tokens for _, _, one in lanes)
        before, self._last_round = self._last_round, (now, state, tokens)
        if before is None or before[1] != state or any(b - a != 1 for a, b in zip(before[2], tokens, strict=True)):
            return
        period = now - before[0]
        until = limit_us
        if len(lanes) < self._lanes and self._arrivals.next_us is not None:
            until = min(until, self._arrivals.next_us)
        left = min(one.output_tokens - one.done_tokens for _, _, one in lanes)
        rounds = min(left - 2, (until - lanes[-1][0]) // period - 1)
        if rounds <= 0:
            return
        shift = rounds * period
        self._active = [(at + shift, sequence, one) for at, sequence, one in lanes]
        heapify(self._active)
        for _, _, one in lanes:
            assert one.done_tokens > 0
            one.done_tokens += rounds
        self._free = [free + shift for free in self._free]
        assert self._pipeline is not None
        for index, compute in enumerate(self._pipeline.decode.compute_us):
            self._busy[index] += rounds * len(lanes) * compute
        self.tally.tokens += rounds * len(lanes)
        if self._drawing:
            self._draw(now, now + shift, rounds * len(lanes))
        self._advance(now + shift)
        self._last_round = None

    def _draw(self, start_us: int, end_us: int, tokens: int) -> None:
        """Spread ``tokens`` evenly over the seconds from ``start_us`` to ``end_us``."""
        first, last = start_us // 1_000_000, min(end_us // 1_000_000, MAX_DRAWN_S)
        drawn, length = self.tally.tokens_by_second, max(1, end_us - start_us)
        for second in range(first, last + 1):
            inside = min(end_us, (second + 1) * 1_000_000) - max(start_us, second * 1_000_000)
            drawn[second] = drawn.get(second, 0.0) + (tokens if first == last else tokens * inside / length)

    def _settle_busy(self) -> None:
        if self._pipeline is not None:
            for node, busy in zip(self._pipeline.node_ids, self._busy, strict=True):
                self.tally.busy_us[node] = self.tally.busy_us.get(node, 0) + busy
        self._busy = [0] * len(self._busy)

    def finish(self) -> Tally:
        """The counts, with the stages that still serve."""
        self._settle_busy()
        return self.tally
