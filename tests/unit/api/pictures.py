"""A mesh to look at, a source that shows it, and a sink that remembers what it was asked. Real doubles, no mocks."""

import asyncio
from dataclasses import dataclass, field, replace

import httpx

from protocol.rows import StageFact
from protocol.wire import Epoch
from stage_agent.api.app import build_app
from stage_agent.api.commands import Accepted, AnyCommand, Refused
from stage_agent.api.events import DurationHistogram, EventLog
from stage_agent.api.snapshot import CounterView, LinkView, MemberView, NodeSnapshot, SlotView, StageView

ALPHA = "alphaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
BETA = "betaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
GONE = "goneaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
EPOCH = Epoch(term=4, node_id=ALPHA, instance="0" * 32)

PLAN = {
    "plan_id": "0123456789abcdef",
    "schema_version": 1,
    "model": {"name": "demo", "digest": "d" * 64, "layer_count": 40},
    "participant_set_hash": "f" * 64,
    "context_length": 65_536,
    "parallel_lanes": 4,
    "objective": "interactive",
    "calibration": "skippy",
    "placement": "performance_aware",
    "stages": [
        {
            "stage_index": 0,
            "node_id": ALPHA,
            "layer_start": 0,
            "layer_end": 27,
            "roles": ["driver", "embedding"],
            "parameter_bytes": 2_000,
            "required_bytes": 3_000,
            "usable_bytes": 4_000,
            "stage_us": 11_000,
            "reason_codes": [],
        },
        {
            "stage_index": 1,
            "node_id": BETA,
            "layer_start": 27,
            "layer_end": 40,
            "roles": ["readout"],
            "parameter_bytes": 1_000,
            "required_bytes": 2_000,
            "usable_bytes": 4_000,
            "stage_us": 9_000,
            "reason_codes": [],
        },
    ],
    "hops": [
        {"source": ALPHA, "target": BETA, "kind": "forward", "rtt_us": 2_000, "transfer_us": 0, "hop_us": 15_000, "basis": "measured"},
        {"source": BETA, "target": ALPHA, "kind": "return", "rtt_us": None, "transfer_us": 0, "hop_us": None, "basis": "unknown"},
    ],
    "boundaries": [],
    "modeled": {"decode_tpot_us": 50_000, "network_us_per_token": 30_000, "pipelined_period_us": 26_000, "ttft_us": None, "tokens_per_s": 20.0},
    "target": {"decode_tpot_ms": 33, "met": False},
    "search": {"proven_optimal": True, "gap": 0.0, "expanded": 4, "elapsed_ms": 3},
    "diagnostics": [],
}  # fmt: skip

SLOT = SlotView(
    "default",
    "active",
    model="/models/demo.gguf",
    plan=PLAN,
    epoch="4/alphaaaa/00000000",
    term=4,
    routable=True,
    participant_set_hash="f" * 64,
    generation=2,
    measured_tpot_us=100_000,
)
MEMBERS = (
    MemberView(
        ALPHA,
        "alpha",
        "alive",
        plannable=True,
        api_address="10.0.0.1:7947",
        usable_memory_bytes=4_000,
        memory_bandwidth_bytes_per_s=100_000_000_000,
        bandwidth_source="shaped",
        device="cpu",
        is_self=True,
        is_coordinator=True,
    ),
    MemberView(
        BETA, "beta", "suspect", why_not_plannable="suspect", address="127.0.0.1:1", api_address="10.0.0.2:7947"
    ),
    MemberView(GONE, "gone", "dead", api_address="10.0.0.3:7947"),
)
LINKS = (
    LinkView(
        ALPHA,
        BETA,
        rtt_us=2_000,
        jitter_us=300,
        loaded_rtt_us=1_900,
        path_changes=2,
        path_changed_age_us=7_000_000,
        settled=True,
        samples=9,
        send_bytes_per_s=50_000_000,
        degraded=True,
        shaped=True,
    ),
    LinkView(BETA, ALPHA, rtt_us=3_000),
)
SERVING = StageFact(slot="default", state="serving", active=EPOCH, layer_start=0, layer_end=27)
COUNTERS = CounterView(
    gossip_bytes={"sent": 10, "received": 20},
    gossip_messages={("sent", "datagram"): 4, ("received", "stream"): 5},
    gossip_packets={"sent": 6, "received": 7},
    gossip_rejected={"oversized": 1},
    stale_frames={"decode": 2},
    stage_frames={"frames_sent": 3, "wire_bytes_sent": 3_300, "dropped_wrong_sender": 1},
    claims={"won": 3},
    assignments={"active": 4},
    replans={("node_lost", "replaced"): 5},
    tunnel_bytes={(BETA, "send"): 7},
    tunnel_errors={"busy": 1, "reset": 0},
    tunnels_open=2,
)


def picture(**changes) -> NodeSnapshot:
    """A joined node of a mesh of three that serves its stage; ``changes`` replace fields."""
    search = DurationHistogram()
    search.observe(3_000)
    counters = replace(COUNTERS, plan_search=search.view())
    fields = {
        "now_us": 90_000_000,
        "started_us": 30_000_000,
        "node_id": ALPHA,
        "name": "alpha",
        "version": "0.1.0",
        "mesh_id": "home-0123",
        "joined": True,
        "members": MEMBERS,
        "links": LINKS,
        "coordinator_id": ALPHA,
        "is_coordinator": True,
        "term": 4,
        "slots": (SLOT,),
        "stages": (StageView(ALPHA, "alpha", SERVING),),
        "counters": counters,
        "quic_connections": 2,
    }
    return NodeSnapshot(**{**fields, **changes})


@dataclass
class ShownMesh:
    """A ``NodeSnapshotSource`` whose picture a test may exchange."""

    now: NodeSnapshot = field(default_factory=picture)
    log: EventLog = field(default_factory=EventLog)

    def snapshot(self) -> NodeSnapshot:
        return self.now

    def events(self, after: int = 0):
        return self.log.after(after)

    def happens(self, kind: str, text: str = "", **fields) -> None:
        self.log.append(now_us=self.now.now_us, at="2026-01-01T00:00:00Z", kind=kind, text=text, **fields)


@dataclass
class Remembering:
    """A ``CommandSink`` that accepts and remembers, or answers what it was told to."""

    answer: Accepted | Refused = field(default_factory=lambda: Accepted({"done": True}))
    asked: list[AnyCommand] = field(default_factory=list)
    delay_s: float = 0.0

    async def submit(self, command: AnyCommand) -> Accepted | Refused:
        await asyncio.sleep(self.delay_s)
        self.asked.append(command)
        return self.answer


def ask(app, method: str, path: str, **request) -> httpx.Response:
    """One request through the whole application."""

    async def exchange() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7947") as client:
            return await client.request(method, path, **request)

    return asyncio.run(exchange())


def shown(**changes):
    """The application over one picture, without a token."""
    return build_app(ShownMesh(picture(**changes)), Remembering())
