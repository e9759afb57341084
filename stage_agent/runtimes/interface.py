"""What every engine behind a stage looks like to the driver, and how it fails.

Order of calls: ``load`` once, then ``activate`` for each epoch that keeps the assignment's model and range, then
``unload``. ``unload`` may come at any time, also during ``load`` (which then raises ``RuntimeFailure('cancelled')``).
A runtime serves one range of layers; when ``keeps`` says no, the driver makes a new one.

Everything runs on the loop that built the runtime; what blocks (disk, arithmetic, processes) runs in threads or
children. Background work belongs to the ``asyncio.TaskGroup`` given to the factory, so nothing outlives the daemon.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from protocol.ballots import StageAssignment
from protocol.errors import StagemeshError
from protocol.fencing import PlanEpoch

if TYPE_CHECKING:
    from stage_agent.runtimes.reference.requests import Generation

FailureReason = Literal[
    "cancelled",
    "engine_exited",
    "engine_mismatch",
    "engine_not_ready",
    "insufficient_memory",
    "model_mismatch",
    "model_unavailable",
    "range_invalid",
    "restart_budget_exhausted",
    "stage_lost",
    "unsupported_model",
]
MAX_DETAIL_CHARACTERS = 512

Report = Callable[[int, int], None]
"""``report(loaded_bytes, total_bytes)``: never goes back, called at least once, ends with ``loaded == total``."""


class RuntimeFailure(StagemeshError):  # noqa: N818 - it is also a value: what ``wait_failed`` returns
    """The engine cannot load or run the stage. ``reason`` is a constant label, ``detail`` one line for people."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason: FailureReason = reason
        self.detail = " ".join(detail.split())[:MAX_DETAIL_CHARACTERS]
        super().__init__(f"{reason}: {self.detail}")


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """Steady decode speed of this stage's layers (DESIGN §7)."""

    us_per_layer: int | None
    """``None`` for an engine that only times the whole pipeline."""
    samples: int
    """Since the layer range was loaded, warm-up not counted."""
    age_us: int
    """Since the newest sample."""
    tpot_us: int | None = None
    """Stage 0 only: mean time per output token under the present plan, hops included."""
    tpot_tokens: int = 0
    """Tokens behind ``tpot_us``."""


class StageRuntime(Protocol):
    """One stage's engine."""

    async def load(self, assignment: StageAssignment, report: Report) -> None:
        """Hold ``assignment``'s layers. Raises ``RuntimeFailure``; nothing stays behind then."""

    def keeps(self, assignment: StageAssignment) -> bool:
        """Whether what is loaded can serve ``assignment`` as it is, so that ``activate`` needs no new ``load``."""

    async def activate(self, epoch: PlanEpoch, assignment: StageAssignment) -> None:
        """Serve under ``epoch``: requests of older epochs end, caches survive iff ``cache_epoch`` is unchanged."""

    async def unload(self) -> None:
        """Stop and free everything; idempotent; leaves no process and no task."""

    async def wait_failed(self) -> RuntimeFailure:
        """Returns when a loaded engine dies by itself; never after ``unload``. Cancel it freely."""

    def timings(self) -> DecodeTiming | None:
        """``None`` until something was decoded, or for engines that do not say."""


@runtime_checkable
class Generating(Protocol):
    """A runtime that answers requests itself when it is stage 0."""

    async def generate(self, prompt: tuple[int, ...], max_new_tokens: int) -> "Generation":
        """Greedy tokens after ``prompt``. Raises ``GenerationInterrupted``."""


def same_layers(held: StageAssignment, wanted: StageAssignment) -> bool:
    """Whether both name the same layers of the same model with the same context, lanes and cache type."""
    return all(
        getattr(held, field) == getattr(wanted, field)
        for field in ("model_digest", "layer_start", "layer_end", "roles", "context_length", "lanes", "cache_type")
    )


class StageLink(Protocol):
    """How frames leave a runtime. The driver connects it to the bulk lane; a sealed frame is envelope and frame."""

    def send(self, peer: str, sealed: bytes) -> Awaitable[None]:
        """Hand ``sealed`` to node ``peer``, in order per peer; waits while the peer's queue is full.

        Raises ``ConnectionError`` when the peer cannot be reached now. ``peer`` may be this node itself.
        """


class FrameReceiver(Protocol):
    """A runtime that takes stage frames. The driver calls it for frames that the stage's fence accepted."""

    def on_frame(self, peer: str, sealed: bytes | memoryview) -> None:
        """Take one sealed frame; never blocks. Frames over the queue's bound are dropped and counted."""
