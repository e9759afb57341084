"""Greedy generation at stage 0: prefill in chunks, then one frame per token until the count or a stop token."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING

from protocol.stage_frame import FLAG_LAST_CHUNK, FrameKind, StageFrame
from stage_agent.runtimes.reference.requests import Generation, GenerationInterrupted

if TYPE_CHECKING:
    from stage_agent.runtimes.reference.runtime import ReferenceRuntime

PREFILL_CHUNK_TOKENS = 256
CONVERSATION_BIT = 1 << 63
"""Set in the session ids of conversations, so that they never meet those of single requests."""


class Generator:
    """Answers requests through one ``ReferenceRuntime`` that is stage 0; at most its lanes at a time, others wait.

    A conversation keeps its caches on all stages between requests, also across plans that change only neighbours: what a new
    prompt shares with it is not run again. Whether every stage still holds its part is found out by trying: a stage that
    does not, refuses, and the request is run from its beginning.
    """

    def __init__(self, runtime: "ReferenceRuntime") -> None:
        self._runtime = runtime
        self._lanes: asyncio.Semaphore | None = None
        self._last_request_id = 0
        self._cached: dict[int, tuple[int, ...]] = {}
        """Tokens that each conversation has run through the stages; the least recently used first."""

    async def generate(
        self,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        on_token: Callable[[int], None],
        conversation: int | None,
    ) -> Generation:
        """See ``ReferenceRuntime.generate``."""
        assignment, decoder = self._runtime.serving
        _check(prompt, max_new_tokens, decoder.vocabulary, assignment.context_length)
        if self._lanes is None:  # a runtime keeps its lanes for life
            self._lanes = asyncio.Semaphore(max(1, assignment.lanes))
        async with self._lanes:
            held = self._cached.pop(conversation, ()) if conversation is not None else ()
            request = self._request(prompt, conversation, _shared(held, prompt))
            try:
                try:
                    result = await request.run(max_new_tokens, stop_tokens, on_token)
                except GenerationInterrupted as interruption:
                    if interruption.reason != "refused" or not interruption.retriable or not request.start:
                        raise
                    request = self._request(prompt, conversation, 0)
                    result = await request.run(max_new_tokens, stop_tokens, on_token)
            except BaseException:
                await request.end()
                raise
            if conversation is None:
                await request.end()
            else:
                await self._keep(conversation, (*prompt, *result.tokens[:-1]))
            return result

    def _request(self, prompt: tuple[int, ...], conversation: int | None, start: int) -> "_Request":
        assignment, _ = self._runtime.serving
        self._last_request_id = max(self._last_request_id + 1, assignment.first_request_id)
        session = self._last_request_id if conversation is None else CONVERSATION_BIT | conversation
        return _Request(self._runtime, self._last_request_id, session, prompt, start)

    async def _keep(self, conversation: int, tokens: tuple[int, ...]) -> None:
        """Remember what is cached; one conversation fewer than lanes, so that a request always finds room."""
        self._cached[conversation] = tokens
        while len(self._cached) > max(1, self._runtime.serving[0].lanes - 1):
            oldest = next(iter(self._cached))
            del self._cached[oldest]
            await self._request((0,), oldest, 0).end()


class _Request:
    """One flow: a request within a session. ``start`` tokens of the prompt are already cached on every stage."""

    def __init__(
        self, runtime: "ReferenceRuntime", number: int, session: int, prompt: tuple[int, ...], start: int
    ) -> None:
        self._runtime = runtime
        self._number = number
        self._session = session
        self._prompt = prompt
        self._step = 0
        self.start = start

    async def run(
        self, max_new_tokens: int, stop_tokens: frozenset[int], on_token: Callable[[int], None]
    ) -> Generation:
        started_us = _now_us()
        token = await self._prefill()
        first_us = previous_us = _now_us()
        tokens, token_us, epochs = [token], [], {self._runtime.epoch}
        on_token(token)
        while len(tokens) < max_new_tokens and token not in stop_tokens:
            self._step += 1
            token = await self._predict([self._frame(FrameKind.DECODE, len(self._prompt) + self._step - 1, (token,))])
            now_us = _now_us()
            token_us.append(now_us - previous_us)
            previous_us = now_us
            tokens.append(token)
            epochs.add(self._runtime.epoch)
            on_token(token)
        plans = tuple(sorted(epoch for epoch in epochs if epoch is not None))
        return Generation(tuple(tokens), first_us - started_us, tuple(token_us), plans)

    async def end(self) -> None:
        """Free the caches, here and downstream, also when the request failed."""
        frame = self._frame(FrameKind.DISCARD, 0, ())
        self._runtime.requests.forget(frame.request_epoch)
        await self._runtime.discard(frame)

    async def _prefill(self) -> int:
        size, end = PREFILL_CHUNK_TOKENS, len(self._prompt)
        frames = [
            self._frame(FrameKind.PREFILL, at, self._prompt[at : at + size], FLAG_LAST_CHUNK if at + size >= end else 0)
            for at in range(self.start, end, size)
        ]
        return await self._predict(frames)

    async def _predict(self, frames: list[StageFrame]) -> int:
        """Run the frames, all of the present step, and wait for its prediction."""
        awaited = self._runtime.requests.expect(frames[0].request_epoch)
        try:
            async with asyncio.timeout(self._runtime.settings.token_timeout_us / 1e6):
                for frame in frames:
                    if awaited.done():
                        break
                    await self._runtime.run_own(frame)
                return await awaited
        except TimeoutError:
            message = "a stage did not answer in time; send the request again"
            raise GenerationInterrupted("timeout", message, retriable=True) from None
        finally:
            if awaited.done() and not awaited.cancelled():
                awaited.exception()  # retrieved, also when an earlier frame's error is the one that is raised
            awaited.cancel()

    def _frame(self, kind: FrameKind, start: int, tokens: tuple[int, ...], marks: int = 0) -> StageFrame:
        return StageFrame(
            kind=kind,
            request_id=self._number,
            session_id=self._session,
            pos_start=start,
            token_count=len(tokens),
            marks=marks,
            prompt_token_count=len(self._prompt),
            decode_step=self._step,
            current_token=tokens[-1] if tokens else -1,
            token_ids=tokens,
        )


def _shared(held: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """How many tokens need not be run again: the common beginning, but at least one token must run to predict the next."""
    limit = min(len(held), len(prompt) - 1)
    return next((index for index in range(limit) if held[index] != prompt[index]), limit)


def _check(prompt: tuple[int, ...], max_new_tokens: int, vocabulary: int, context_length: int) -> None:
    problem = ""
    if not prompt or max_new_tokens < 1:
        problem = "a prompt and at least one new token are needed"
    elif not vocabulary:
        problem = "this stage is not stage 0"
    elif not all(0 <= token < vocabulary for token in prompt):
        problem = f"token ids must be between 0 and {vocabulary - 1}"
    elif len(prompt) + max_new_tokens > context_length:
        problem = f"{len(prompt)} prompt and {max_new_tokens} new tokens are over the context of {context_length}"
    if problem:
        raise GenerationInterrupted("invalid_request", problem, retriable=False)


def _now_us() -> int:
    return monotonic_ns() // 1_000
