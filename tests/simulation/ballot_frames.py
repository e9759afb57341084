"""Requests of a simulated mesh, byte for byte: real frames in real envelopes, through the agent's fence to real workers.

A request is a prompt of two tokens and, for every third one, a decode step. What travels is what ``StageFrame`` encodes;
what arrives is judged by ``judge_sealed`` as in the daemon, and run by the verification engine's own ``StageWorker``. Only
the arithmetic is another: a stage's output is a number that names the *path* of the activation so far, one ``Step`` for
each stage that ran it, and the last stage's prediction is that number. So stage 0 learns from the answer's bytes alone
which nodes, plans and layers it came from.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from protocol.ballots import StageAssignment
from protocol.errors import WireError
from protocol.fencing import NO_EPOCH, PlanEpoch
from protocol.frame_envelope import FrameEnvelope, open_sealed, refusal_of
from protocol.ids import NodeId, Slot
from protocol.stage_frame import FLAG_LAST_CHUNK, FrameKind, RequestEpoch, StageFrame
from stage_agent.runtimes.reference.worker import Outgoing, StageWorker
from stage_agent.stage.agent import StageAgent
from stage_agent.stage.sealed import judge_sealed

PROMPT = (1, 2)
DECODES_EVERY = 3
OPEN_MAX = 64
"""Requests whose answer a stage 0 waits for; the oldest is forgotten."""


class Step(NamedTuple):
    """One stage that ran an activation: its node, its engine's plan and layers."""

    node_id: NodeId
    ballot: PlanEpoch
    plan_hash: str
    layer_start: int
    layer_end: int


class Paths:
    """Every path that an activation has taken, by number. Numbers are small enough to be exact as single precision."""

    def __init__(self) -> None:
        self._paths: list[tuple[Step, ...]] = [()]
        self._numbers: dict[tuple[Step, ...], int] = {(): 0}

    def longer(self, number: int, step: Step) -> int:
        """The number of the path that goes on with ``step``."""
        path = (*self._paths[number], step)
        if path not in self._numbers:
            self._numbers[path] = len(self._paths)
            self._paths.append(path)
            assert len(self._paths) < 2**24
        return self._numbers[path]

    def __getitem__(self, number: int) -> tuple[Step, ...]:
        return self._paths[number]


class _Cache:
    def __init__(self, sender_cache_epoch: int) -> None:
        self.length = 0
        self.sender_cache_epoch = sender_cache_epoch


class PathDecoder:
    """What a ``StageWorker`` needs of a decoder, one value wide."""

    width = 1

    def __init__(self, paths: Paths, layer_count: int) -> None:
        self.layer_count = layer_count
        self.step: Step | None = None
        self._paths = paths

    def new_cache(self, sender_cache_epoch: int) -> _Cache:
        return _Cache(sender_cache_epoch)

    def embed(self, tokens: tuple[int, ...]) -> Any:
        return np.zeros((len(tokens), 1), np.float32)

    def run(self, hidden: Any, start: int, cache: _Cache) -> Any:
        assert self.step is not None
        cache.length = start + len(hidden)
        return np.full_like(hidden, self._paths.longer(int(hidden[-1, 0]), self.step))

    def predict(self, hidden: Any) -> int:
        return int(hidden[-1, 0])


class _Stage(NamedTuple):
    """An engine that serves."""

    ballot: PlanEpoch
    assignment: StageAssignment
    load: int
    decoder: PathDecoder
    worker: StageWorker
    envelope: FrameEnvelope


class _Open(NamedTuple):
    """A request that waits for an answer: at which step, and what answered the steps before."""

    slot: Slot
    epoch: RequestEpoch
    answers: tuple[int, ...]


class FrameStages:
    """The engines of one process that serve, the requests that began here, and the frames between them."""

    def __init__(
        self, process: Any, agent: StageAgent, paths: Paths, counts: Counter[str], send: Callable[[NodeId, bytes], None]
    ) -> None:
        """``process``: for the checkers. ``send``: to another node; nobody says whether it arrives."""
        self._process = process
        self._agent = agent
        self._paths = paths
        self._counts = counts
        self._send = send
        self._stages: dict[Slot, _Stage] = {}
        self._open: dict[tuple[int, int], _Open] = {}
        self._last_request = 0

    def activate(self, slot: Slot, ballot: PlanEpoch, assignment: StageAssignment, load: int) -> None:
        """The engine serves ``ballot`` from now on; ``load`` numbers its memory. Requests of the plan before end."""
        self._interrupt(slot)
        former, held = self._stages.get(slot), self._agent.record(slot).active
        if former is not None and former.load == load:
            decoder, worker = former.decoder, former.worker
            worker.adopt(assignment)
        else:
            decoder = PathDecoder(self._paths, assignment.layer_end - assignment.layer_start)
            worker = StageWorker(decoder, assignment)  # type: ignore[arg-type]
        assert held is not None
        decoder.step = Step(
            self._process.node_id, ballot, held.plan_hash, assignment.layer_start, assignment.layer_end
        )  # fmt: skip
        envelope = FrameEnvelope(ballot, slot, assignment.cache_epoch.value)
        self._stages[slot] = _Stage(ballot, assignment, load, decoder, worker, envelope)

    def gone(self, load: int) -> None:
        """The engine died or was unloaded."""
        for slot in [slot for slot, stage in self._stages.items() if stage.load == load]:
            self._interrupt(slot)
            del self._stages[slot]

    def begin(self, slot: Slot) -> None:
        """A client's request, if this node is stage 0."""
        stage, record = self._serving(slot), self._agent.record(slot)
        if stage is None or stage.assignment.stage_index != 0:
            return
        self._last_request = number = max(self._last_request + 1, record.first_request_id)
        self._run_own(stage, _frame(FrameKind.PREFILL, number, 0, PROMPT, 0, FLAG_LAST_CHUNK), ())

    def receive(self, peer: NodeId, sealed: bytes) -> None:
        """Bytes from the bulk lane: first the fence, then the engine. A refused frame is counted and answered."""
        try:
            judged = judge_sealed(self._agent, sealed, self._process.now_us)
        except WireError as error:
            self._counts[f"frame refused: {error.reason}"] += 1
            return
        verdict, stage = judged.verdict, self._stages.get(judged.slot)
        if not verdict.accepted or stage is None or stage.ballot != verdict.active:
            self._counts[f"frame refused: {verdict.outcome if not verdict.accepted else 'not_serving'}"] += 1
            answer = refusal_of(sealed, verdict.active or NO_EPOCH)
            if answer is not None:
                self._send(peer, answer)
            return
        envelope, frame = open_sealed(sealed)
        if frame.kind in {FrameKind.PREDICTION, FrameKind.REFUSED} and stage.assignment.stage_index == 0:
            self._applies(stage, envelope.epoch, None)
            self._answered(stage, frame)
        else:
            self._applies(stage, envelope.epoch, frame.request_epoch)
            self._pass_on(stage, stage.worker.received(frame, envelope.cache_epoch))

    def _serving(self, slot: Slot) -> _Stage | None:
        held, stage = self._agent.record(slot).active, self._stages.get(slot)
        return stage if held is not None and stage is not None and held.ballot == stage.ballot else None

    def _run_own(self, stage: _Stage, frame: StageFrame, answers: tuple[int, ...]) -> None:
        self._open[frame.request_id, frame.session_id] = _Open(Slot(stage.envelope.slot), frame.request_epoch, answers)
        while len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]
        self._applies(stage, stage.ballot, frame.request_epoch)
        self._pass_on(stage, stage.worker.own(frame))

    def _applies(self, stage: _Stage, epoch: PlanEpoch, request: RequestEpoch | None) -> None:
        slot = Slot(stage.envelope.slot)
        self._process.mesh.checkers.frame(self._process, slot, epoch, stage.assignment, request)

    def _pass_on(self, stage: _Stage, outgoing: list[Outgoing]) -> None:
        for item in outgoing:
            if item.peer == self._process.node_id:
                self._answered(stage, item.frame)
                continue
            sealed = stage.envelope.seal(item.frame)
            assert len(sealed) == len(stage.envelope.encode()) + item.frame.estimated_wire_bytes()
            self._send(NodeId(item.peer), sealed)

    def _answered(self, stage: _Stage, frame: StageFrame) -> None:
        waiting = self._open.get((frame.request_id, frame.session_id))
        if waiting is None or waiting.epoch != frame.request_epoch:
            self._counts["answer to nothing that is awaited"] += 1
            return
        if frame.kind is FrameKind.REFUSED:
            self._counts["request refused"] += 1
            del self._open[frame.request_id, frame.session_id]
            return
        answers, step = (*waiting.answers, frame.current_token), len(waiting.answers)
        if step == 0 and frame.request_id % DECODES_EVERY == 0:
            token = (frame.current_token,)
            self._run_own(stage, _frame(FrameKind.DECODE, frame.request_id, len(PROMPT), token, 1), answers)
            return
        del self._open[frame.request_id, frame.session_id]
        self._process.mesh.checkers.completed(waiting.slot, *(self._paths[answer] for answer in answers))
        if step:
            self._pass_on(stage, stage.worker.discard(_frame(FrameKind.DISCARD, frame.request_id, 0, (), 1)))

    def _interrupt(self, slot: Slot) -> None:
        for flow in [flow for flow, request in self._open.items() if request.slot == slot]:
            del self._open[flow]


def _frame(kind: FrameKind, number: int, start: int, tokens: tuple[int, ...], step: int, marks: int = 0) -> StageFrame:
    """As the verification engine makes them, one session a request."""
    return StageFrame(
        kind=kind,
        request_id=number,
        session_id=number,
        pos_start=start,
        token_count=len(tokens),
        marks=marks,
        prompt_token_count=len(PROMPT),
        decode_step=step,
        current_token=tokens[-1] if tokens else -1,
        token_ids=tokens,
    )
