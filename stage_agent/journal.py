"""What happened, told three ways at once: the log, the ring of events that the API shows, and the counters."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, get_args

import structlog

from protocol.quic.interface import REASONS, Direction, Lane, TransportCounters
from stage_agent.api.events import DurationHistogram, EventLog
from stage_agent.api.snapshot import CounterView, Event
from stage_agent.clock import monotonic_us, wall_text
from stage_agent.stage.effects import CountKind
from stage_agent.stage.frames import FrameOutcome
from stage_agent.tunnel.ledger import FAULTS, Ledger

REFUSED_FRAMES = sorted({*get_args(FrameOutcome), *get_args(CountKind)} - {"accept"})
"""A counter must be there, at zero, before the first event: a rate over a series that begins at one sees nothing."""

_SAID: Mapping[Direction, str] = {"send": "sent", "receive": "received"}
_LANES: tuple[Lane, ...] = get_args(Lane)

Severity = Literal["debug", "info", "warning", "error"]


class Journal:
    """The only writer of events and counters in the process. Kinds and labels are constants of the code."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("stagemesh")
        self._events = EventLog()
        self.rejected: Counter[str] = Counter()
        self.stale_frames: Counter[str] = Counter()
        self.frames: Counter[str] = Counter()
        """Of the verification engine: ``frames_sent``, ``wire_bytes_received`` …, ``dropped_<reason>``."""
        self.claims: Counter[str] = Counter()
        self.assignments: Counter[str] = Counter()
        self.replans: Counter[tuple[str, str]] = Counter()
        self.search = DurationHistogram()
        self.tunnels = Ledger()
        self.probe_bytes: Counter[str] = Counter()
        """``sent``, ``received``: of active bandwidth probes."""

    def tell(self, kind: str, text: str, severity: Severity = "info", **fields: Any) -> None:
        """Log ``kind`` with ``fields`` and remember it with ``text`` for people. Fields must be ready for JSON."""
        getattr(self._log, severity)(kind, text=text, **fields)
        if severity != "debug":
            self._events.append(now_us=monotonic_us(), at=wall_text(), kind=kind, text=text, **fields)

    def events(self, after: int) -> tuple[Event, ...]:
        """Remembered events newer than ``after``."""
        return self._events.after(after)

    def counters(self, transport: TransportCounters) -> CounterView:
        """All totals, with those of the transport."""
        return CounterView(
            gossip_bytes={said: transport.bytes[way] for way, said in _SAID.items()},
            gossip_messages={(_SAID[way], lane): transport.lanes[way, lane] for way in _SAID for lane in _LANES},
            gossip_packets={said: transport.packets[way] for way, said in _SAID.items()},
            gossip_rejected=dict.fromkeys(REASONS, 0) | dict(self.rejected + transport.rejected + transport.dropped),
            stale_frames=dict.fromkeys(REFUSED_FRAMES, 0) | dict(self.stale_frames),
            stage_frames=dict(self.frames),
            claims=dict(self.claims),
            assignments=dict(self.assignments),
            replans=dict(self.replans),
            plan_search=self.search.view(),
            tunnel_bytes=self.tunnels.bytes_by_peer(),
            tunnel_errors={fault: self.tunnels.errors[fault] for fault in FAULTS},
            tunnels_open=self.tunnels.active,
            probe_bytes=dict.fromkeys(_SAID.values(), 0) | dict(self.probe_bytes),
        )
