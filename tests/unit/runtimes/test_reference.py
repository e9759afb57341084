"""The reference engine: a split model says what the whole model says, and no request crosses plans."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from config.settings import RuntimeSettings
from protocol.ballots import CacheEpoch
from protocol.frame_envelope import FrameEnvelope, open_sealed, refusal_of
from protocol.stage_frame import FrameKind
from stage_agent.runtimes.interface import RuntimeFailure
from stage_agent.runtimes.reference.requests import Generation, GenerationInterrupted
from tests.unit.runtimes.conftest import write_model
from tests.unit.runtimes.stages import EPOCH, LATER, Chain, assignments

PROMPT = tuple(range(300, 340))
LONG_PROMPT = tuple(260 + (7 * index) % 250 for index in range(600))
NEW_TOKENS = 20


async def generated(
    model: Path, ranges: list[tuple[int, int]], prompt: tuple[int, ...] = PROMPT, context: int = 1024
) -> Generation:
    async with asyncio.TaskGroup() as tasks:
        chain = await Chain(tasks, model).start(assignments(ranges, context=context))
        result = await chain.driver.generate(prompt, NEW_TOKENS)
        await chain.stop()
    return result


@pytest.mark.parametrize(
    "ranges",
    [[(0, 2), (2, 4), (4, 6)], [(0, 1), (1, 6)], [(0, 5), (5, 6)], [(index, index + 1) for index in range(6)]],
)
def test_a_split_model_generates_the_tokens_of_the_whole_model(model: Path, ranges: list[tuple[int, int]]) -> None:
    whole = asyncio.run(generated(model, [(0, 6)]))
    split = asyncio.run(generated(model, ranges))
    assert split.tokens == whole.tokens
    assert len(set(whole.tokens)) > 5
    assert split.tpot_us is not None
    assert len(split.token_us) == NEW_TOKENS - 1


def test_a_prompt_longer_than_a_chunk_is_sent_in_chunks_and_gives_the_same_tokens(model: Path) -> None:
    whole = asyncio.run(generated(model, [(0, 6)], LONG_PROMPT))
    split = asyncio.run(generated(model, [(0, 3), (3, 6)], LONG_PROMPT))
    assert split.tokens == whole.tokens


def test_two_requests_at_once_do_not_mix(model: Path) -> None:
    async def run() -> tuple[Generation, Generation]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))
            both = await asyncio.gather(
                chain.driver.generate(PROMPT, NEW_TOKENS), chain.driver.generate(PROMPT[::-1], NEW_TOKENS)
            )
            await chain.stop()
        return both

    first, second = asyncio.run(run())
    assert first.tokens == asyncio.run(generated(model, [(0, 6)])).tokens
    assert second.tokens == asyncio.run(generated(model, [(0, 6)], PROMPT[::-1])).tokens


def test_frames_carry_the_plan_epoch_their_exact_size_and_the_prediction_goes_straight_to_stage_0(model: Path) -> None:
    async def run() -> Chain:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 2), (2, 4), (4, 6)]))
            await chain.driver.generate(PROMPT, 3)
            await chain.stop()
        return chain

    chain = asyncio.run(run())
    route = [(source, target, open_sealed(sealed)[1].kind) for source, target, sealed in chain.link.sent]
    assert route[:3] == [
        ("n0", "n1", FrameKind.PREFILL),
        ("n1", "n2", FrameKind.PREFILL),
        ("n2", "n0", FrameKind.PREDICTION),
    ]
    assert route[3:5] == [("n0", "n1", FrameKind.DECODE), ("n1", "n2", FrameKind.DECODE)]
    assert route[-1][2] is FrameKind.DISCARD
    assert {open_sealed(sealed)[0].epoch for _, _, sealed in chain.link.sent} == {EPOCH}
    sent = sum(len(sealed) - 128 for source, _, sealed in chain.link.sent if source == "n0")
    assert chain.runtimes[0].counters["wire_bytes_sent"] == sent
    assert open_sealed(chain.link.sent[0][2])[1].request_id == 100


def test_a_new_plan_ends_open_requests_as_retriable_and_the_retry_gives_the_same_tokens(model: Path) -> None:
    plan = assignments([(0, 3), (3, 6)])

    async def run() -> Generation:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(plan)
            seen: list[int] = []
            third = asyncio.Event()

            def on_token(token: int) -> None:
                seen.append(token)
                if len(seen) == 3:
                    third.set()

            request = tasks.create_task(_interrupted(chain.driver.generate(PROMPT, NEW_TOKENS, on_token=on_token)))
            await third.wait()
            await chain.activate(plan, LATER)
            interruption = await request
            assert interruption.reason == "plan_changed"
            assert interruption.retriable
            result = await chain.driver.generate(PROMPT, NEW_TOKENS)
            await chain.stop()
        return result

    assert asyncio.run(run()).tokens == asyncio.run(generated(model, [(0, 6)])).tokens


async def _interrupted(work: Awaitable[Generation]) -> GenerationInterrupted:
    with pytest.raises(GenerationInterrupted) as interrupted:
        await work
    return interrupted.value


def test_frames_of_another_plan_or_from_another_node_change_nothing(model: Path) -> None:
    async def run() -> tuple[Generation, Chain]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))
            last = chain.link.runtimes["n1"]

            def tamper(source: str, _target: str, sealed: bytes) -> bytes:
                envelope, frame = open_sealed(sealed)
                if frame.kind is FrameKind.DECODE:
                    garbled = replace(frame, payload=bytes(len(frame.payload)))
                    last.on_frame(source, FrameEnvelope(LATER, "default").seal(garbled))
                    last.on_frame("stranger", envelope.seal(garbled))
                    last.on_frame(source, sealed[:-1])
                    last.on_frame(source, b"noise")
                return sealed

            chain.link.tamper = tamper
            result = await chain.driver.generate(PROMPT, NEW_TOKENS)
            await chain.stop()
        return result, chain

    result, chain = asyncio.run(run())
    assert result.tokens == asyncio.run(generated(model, [(0, 6)])).tokens
    counters = chain.runtimes[1].counters
    assert counters["dropped_stale_epoch"] == counters["dropped_wrong_sender"] == counters["dropped_truncated"] == 19


def test_a_prediction_of_another_plan_or_of_an_earlier_step_is_not_taken(model: Path) -> None:
    async def run() -> tuple[Generation, Chain]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))

            def tamper(source: str, _target: str, sealed: bytes) -> bytes:
                envelope, frame = open_sealed(sealed)
                if frame.kind is FrameKind.PREDICTION:
                    wrong = replace(frame, current_token=1)
                    chain.driver.on_frame(source, FrameEnvelope(LATER, "default").seal(wrong))
                    chain.driver.on_frame(source, envelope.seal(replace(wrong, decode_step=frame.decode_step + 1)))
                    chain.driver.on_frame(source, envelope.seal(replace(wrong, session_id=frame.session_id + 1)))
                return sealed

            chain.link.tamper = tamper
            result = await chain.driver.generate(PROMPT, NEW_TOKENS)
            await chain.stop()
        return result, chain

    result, chain = asyncio.run(run())
    assert result.tokens == asyncio.run(generated(model, [(0, 6)])).tokens
    assert chain.driver.counters["dropped_unawaited"] == 2 * NEW_TOKENS
    assert chain.driver.counters["dropped_stale_epoch"] == NEW_TOKENS


def test_a_repeated_frame_is_harmless(model: Path) -> None:
    async def run() -> Generation:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))

            def twice(source: str, target: str, sealed: bytes) -> bytes:
                chain.link.runtimes[target].on_frame(source, sealed)
                return sealed

            chain.link.tamper = twice
            result = await chain.driver.generate(PROMPT, NEW_TOKENS)
            await chain.stop()
        return result

    assert asyncio.run(run()).tokens == asyncio.run(generated(model, [(0, 6)])).tokens


def test_a_lost_frame_ends_the_request_in_time_as_retriable(model: Path) -> None:
    async def run() -> GenerationInterrupted:
        settings = RuntimeSettings(kind="reference", token_timeout_us=200_000)
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model, settings).start(assignments([(0, 3), (3, 6)]))
            chain.link.tamper = lambda _source, _target, _sealed: None
            interruption = await _interrupted(chain.driver.generate(PROMPT, NEW_TOKENS))
            await chain.stop()
        return interruption

    interruption = asyncio.run(run())
    assert (interruption.reason, interruption.retriable) == ("timeout", True)


def test_an_unreachable_stage_ends_the_request_at_once(model: Path) -> None:
    async def run() -> GenerationInterrupted:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))
            chain.link.down.add("n1")
            interruption = await _interrupted(chain.driver.generate(PROMPT, NEW_TOKENS))
            await chain.stop()
        return interruption

    assert asyncio.run(run()).reason == "unreachable"


def test_a_stage_that_lost_its_cache_refuses_and_the_request_may_be_sent_again(model: Path) -> None:
    plan = assignments([(0, 2), (2, 4), (4, 6)])

    async def run() -> GenerationInterrupted:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(plan)
            middle = chain.link.runtimes["n1"]
            seen: list[int] = []

            def forget(_source: str, target: str, sealed: bytes) -> bytes:
                if target == "n1" and len(seen) == 3:
                    # what a restarted engine behind the same plan would be
                    middle._worker._sessions.clear()
                return sealed

            chain.link.tamper = forget
            interruption = await _interrupted(chain.driver.generate(PROMPT, NEW_TOKENS, on_token=seen.append))
            await chain.stop()
        return interruption

    interruption = asyncio.run(run())
    assert (interruption.reason, interruption.retriable) == ("refused", True)


def test_a_refusal_by_a_later_stages_fence_finds_its_way_to_stage_0(model: Path) -> None:
    async def run() -> GenerationInterrupted:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 2), (2, 4), (4, 6)]))

            def fenced(source: str, target: str, sealed: bytes) -> bytes | None:
                if target != "n2":
                    return sealed
                refusal = refusal_of(sealed, LATER)
                if refusal is not None:
                    chain.link.runtimes[source].on_frame(target, refusal)
                return None

            chain.link.tamper = fenced
            interruption = await _interrupted(chain.driver.generate(PROMPT, NEW_TOKENS))
            await chain.stop()
        return interruption

    interruption = asyncio.run(run())
    assert (interruption.reason, interruption.retriable) == ("refused", True)


def test_a_new_cache_epoch_forgets_what_was_cached_and_the_same_one_keeps_it(model: Path) -> None:
    plan = assignments([(0, 3), (3, 6)])
    rebuilt = [each.model_copy(update={"cache_epoch": CacheEpoch(value=1)}) for each in plan]

    async def run() -> list[int]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(plan)
            chain.link.tamper = lambda _source, _target, sealed: (
                None if open_sealed(sealed)[1].kind is FrameKind.DISCARD else sealed
            )
            await chain.driver.generate(PROMPT, 2)
            held = [len(chain.runtimes[1]._worker._sessions)]
            await chain.activate(plan, LATER)
            held.append(len(chain.runtimes[1]._worker._sessions))
            await chain.activate(rebuilt, LATER)
            held.append(len(chain.runtimes[1]._worker._sessions))
            await chain.stop()
        return held

    assert asyncio.run(run()) == [1, 1, 0]


def prefilled(chain: Chain) -> list[int]:
    """Prompt tokens sent from stage 0, request by request."""
    frames = [open_sealed(sealed)[1] for source, _, sealed in chain.link.sent if source == "n0"]
    return [frame.token_count for frame in frames if frame.kind is FrameKind.PREFILL]


def test_a_conversation_runs_only_what_is_new_also_after_a_plan_that_kept_the_caches(model: Path) -> None:
    plan = assignments([(0, 2), (2, 4), (4, 6)])

    async def run() -> tuple[list[tuple[int, ...]], Chain]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(plan)
            first = await chain.driver.generate(PROMPT, 5, conversation=1)
            longer = (*PROMPT, *first.tokens, 7, 8)
            second = await chain.driver.generate(longer, 5, conversation=1)
            await chain.activate(plan, LATER)
            third = await chain.driver.generate((*longer, *second.tokens, 9), 5, conversation=1)
            await chain.stop()
        return [second.tokens, third.tokens], chain

    (second, third), chain = asyncio.run(run())
    assert prefilled(chain) == [40, 3, 2]
    longer = (*PROMPT, *asyncio.run(generated(model, [(0, 6)])).tokens[:5], 7, 8)
    assert second == asyncio.run(generated(model, [(0, 6)], longer)).tokens[:5]
    assert third == asyncio.run(generated(model, [(0, 6)], (*longer, *second, 9))).tokens[:5]


@pytest.mark.parametrize("rebuilt", [0, 1, 2])
def test_a_conversation_starts_over_when_any_stages_cache_became_meaningless(model: Path, rebuilt: int) -> None:
    plan = assignments([(0, 2), (2, 4), (4, 6)])
    after = list(plan)
    after[rebuilt] = after[rebuilt].model_copy(update={"cache_epoch": CacheEpoch(value=1)})

    async def run() -> tuple[tuple[int, ...], tuple[int, ...], Chain]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(plan)
            first = await chain.driver.generate(PROMPT, 5, conversation=1)
            await chain.activate(after, LATER)
            longer = (*PROMPT, *first.tokens, 7)
            second = await chain.driver.generate(longer, 5, conversation=1)
            await chain.stop()
        return longer, second.tokens, chain

    longer, second, chain = asyncio.run(run())
    assert second == asyncio.run(generated(model, [(0, 6)], longer)).tokens[:5]
    assert prefilled(chain)[-1] == len(longer)


def test_conversations_beyond_the_lanes_are_forgotten_on_every_stage(model: Path) -> None:
    async def run() -> list[int]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)], lanes=3))
            for conversation in range(6):
                await chain.driver.generate(PROMPT, 3, conversation=conversation)
            await chain.driver.generate(PROMPT, 3)
            held = [0, 0]
            for _ in range(200):  # the last notice travels behind the answer
                held = [len(runtime._worker._sessions) for runtime in chain.runtimes]
                if held == [2, 2]:
                    break
                await asyncio.sleep(0.01)
            await chain.stop()
        return held

    assert asyncio.run(run()) == [2, 2]


def test_no_more_sessions_are_cached_than_there_are_lanes(model: Path) -> None:
    async def run() -> tuple[int, int]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)], lanes=2))
            chain.link.tamper = lambda _source, _target, sealed: (
                None if open_sealed(sealed)[1].kind is FrameKind.DISCARD else sealed
            )
            for _ in range(5):
                await chain.driver.generate(PROMPT, 2)
            last = chain.runtimes[1]._worker
            await chain.stop()
        return len(last._sessions), last.dropped["session_evicted"]

    assert asyncio.run(run()) == (2, 3)


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("gemma3", {}, "runs llama models, not gemma3"),
        ("llama", {"blk.0.attn_q.bias": (64,)}, "attn_q.bias is unknown"),
        ("llama", {"blk.0.ffn_gate_inp.weight": (4, 64)}, "ffn_gate_inp.weight is unknown"),
    ],
)
def test_a_model_it_would_compute_wrongly_is_refused_by_name(
    tmp_path: Path, architecture: str, extra: dict[str, tuple[int, ...]], message: str
) -> None:
    other = write_model(tmp_path / "other.gguf", architecture, extra)

    async def run() -> RuntimeFailure:
        async with asyncio.TaskGroup() as tasks:
            with pytest.raises(RuntimeFailure) as refused:
                await Chain(tasks, other).start(assignments([(0, 6)]))
        return refused.value

    failure = asyncio.run(run())
    assert failure.reason == "unsupported_model"
    assert message in failure.detail


def test_decode_timings_appear_after_the_warm_up(model: Path) -> None:
    async def run() -> list[object]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))
            before = chain.runtimes[0].timings()
            await chain.driver.generate(PROMPT, NEW_TOKENS)
            timings = [before, *(runtime.timings() for runtime in chain.runtimes)]
            await chain.stop()
        return timings

    before, first, last = asyncio.run(run())
    assert before is None
    for timing in (first, last):
        assert timing.samples == NEW_TOKENS - 1 - 8
        assert 0 < timing.us_per_layer < 1_000_000


@pytest.mark.parametrize(("prompt", "count"), [((), 5), (PROMPT, 0), ((512,), 5), ((-1,), 5), (tuple([300] * 500), 13)])
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(
    model: Path, prompt: tuple[int, ...], count: int
) -> None:
    async def run() -> tuple[GenerationInterrupted, int]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))
            interruption = await _interrupted(chain.driver.generate(prompt, count))
            await chain.stop()
        return interruption, len(chain.link.sent)

    interruption, sent = asyncio.run(run())
    assert (interruption.reason, interruption.retriable, sent) == ("invalid_request", False, 0)


def test_an_unloaded_stage_serves_nothing_and_unloading_twice_is_harmless(model: Path) -> None:
    async def run() -> GenerationInterrupted:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 6)]))
            await chain.stop()
            await chain.stop()
            return await _interrupted(chain.driver.generate(PROMPT, 2))

    assert asyncio.run(run()).reason == "not_serving"


def test_a_range_behind_the_last_layer_is_refused_by_name(model: Path) -> None:
    async def run() -> RuntimeFailure:
        async with asyncio.TaskGroup() as tasks:
            with pytest.raises(RuntimeFailure) as refused:
                await Chain(tasks, model).start(assignments([(0, 7)]))
        return refused.value

    assert asyncio.run(run()).reason == "range_invalid"


def test_progress_grows_to_the_total(model: Path) -> None:
    async def run() -> list[tuple[int, int]]:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 6)]))
            await chain.stop()
        return chain.reports

    reports = asyncio.run(run())
    assert reports == sorted(reports)
    assert reports[-1][0] == reports[-1][1] > 0
    assert len(reports) > 10


def test_every_frame_that_crosses_is_told_under_the_names_that_dashboards_know(model: Path) -> None:
    async def run() -> Chain:
        async with asyncio.TaskGroup() as tasks:
            chain = await Chain(tasks, model).start(assignments([(0, 3), (3, 6)]))
            await chain.driver.generate(PROMPT, 3)
            await chain.stop()
        return chain

    with capture_logs() as told:
        chain = asyncio.run(run())
    frames = [entry for entry in told if entry["event"] == "stage_frame"]
    sent = [entry["llama_stage.message_wire_bytes"] for entry in frames if entry["direction"] == "sent"]
    assert sum(sent) == sum(runtime.counters["wire_bytes_sent"] for runtime in chain.runtimes)
    assert sum(entry["direction"] == "received" for entry in frames) == len(sent)
    assert max(entry["skippy.decode_step"] for entry in frames) > 0
    assert {entry["skippy.prompt_token_count"] for entry in frames} >= {len(PROMPT)}
    assert {entry["skippy.checkpoint_generation"] for entry in frames} == {0}
    assert any(entry["skippy.activation_bytes"] for entry in frames)
