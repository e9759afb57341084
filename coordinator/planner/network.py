"""What a hop costs, and which hops a sequence of nodes uses (DESIGN §5). The only place that knows chain from star.

``hop_us = rtt_multiplier · rtt + ⌈payload / bandwidth⌉ + per_hop``. The RTT comes from the link itself (``measured``),
else the opposite link (``reverse``), else the coordinator's RTT to either end (``coordinator``; of two known ones the
larger, since the smaller says nothing about the far end), else the hop is ``unknown`` and so is every sum with it.
Bandwidth is directed and never borrowed.

* **chain**: stage i sends to stage i+1; the last one replies to stage 0 over one return hop of ``return_bytes`` (one
  activation frame by default). Where that link refuses direct replies and falling back is allowed, the reply walks
  back down the chain and every step is a return hop.
* **star**: stage 0 is the head. Each other stage is one round trip from the head: its RTT once, the frame out and the
  frame (for the last stage the reply) back, one ``per_hop``. There is no separate return hop.
"""

from dataclasses import dataclass
from itertools import pairwise

from coordinator.model.package import ModelPackage
from coordinator.planner.memory import ceil_div
from coordinator.planner.plan import PlannedHop
from coordinator.planner.problem import Calibration, EdgeBasis, ReturnMode
from coordinator.planner.transfer import transfer_us
from coordinator.planner.trust import TrustedSignals


@dataclass(frozen=True)
class Network:
    """Prices of hops between the nodes of one problem."""

    signals: TrustedSignals
    calibration: Calibration
    frame_bytes: int
    """Bytes across a boundary: one activation frame with its sidebands."""
    reply_bytes: int
    return_mode: ReturnMode

    @property
    def star(self) -> bool:
        """Every activation passes through the head."""
        return self.calibration.topology == "star"

    def rtt(self, source: str, target: str) -> tuple[int | None, EdgeBasis]:
        """RTT in µs and where it comes from."""
        edge = self.signals.edges.get((source, target))
        if edge is not None and edge.rtt_us is not None:
            return edge.rtt_us, "measured"
        edge = self.signals.edges.get((target, source))
        if edge is not None and edge.rtt_us is not None:
            return edge.rtt_us, "reverse"
        ends = (self.signals.nodes[source].coordinator_rtt_us, self.signals.nodes[target].coordinator_rtt_us)
        known = [rtt for rtt in ends if rtt is not None]
        if known:
            return max(known), "coordinator"
        return None, "unknown"

    def transfer(self, source: str, target: str, payload_bytes: int) -> int:
        """Serialisation time of one payload on the directed link."""
        edge = self.signals.edges.get((source, target))
        return transfer_us(payload_bytes, None if edge is None else edge.large_frame_bytes_per_s)

    def priced_us(self, rtt_us: int, transfer: int) -> int:
        """The hop formula."""
        return ceil_div(self.calibration.rtt_multiplier_milli * rtt_us, 1_000) + transfer + self.calibration.per_hop_us

    def forward(self, source: str, target: str) -> PlannedHop:
        """One boundary frame from ``source`` to ``target``."""
        return self._hop(source, target, "forward", self.transfer(source, target, self.frame_bytes))

    def reply(self, source: str, target: str) -> PlannedHop:
        """One prediction from ``source`` to ``target``."""
        return self._hop(source, target, "return", self.transfer(source, target, self.reply_bytes))

    def round_trip(self, head: str, node: str, *, last: bool) -> PlannedHop:
        """Star: the head sends a frame to ``node`` and gets a frame, or from the last stage the reply, back."""
        back = self.reply_bytes if last else self.frame_bytes
        out = self.transfer(head, node, self.frame_bytes)
        return self._hop(head, node, "forward", out + self.transfer(node, head, back))

    def direct_return(self, last: str, first: str) -> bool:
        """Whether the return link may carry predictions. Only a link that says no refuses."""
        return (last, first) not in self.signals.return_refused

    def allowed(self, sequence: tuple[str, ...]) -> bool:
        """Mode ``require`` rejects a chain whose return link refuses direct replies."""
        if len(sequence) < 2 or self.star or self.return_mode == "allow_fallback":
            return True
        return self.direct_return(sequence[-1], sequence[0])

    def hops(self, sequence: tuple[str, ...]) -> tuple[PlannedHop, ...]:
        """Every hop of the plan, forward ones first in stage order, then the reply's; none for a single stage."""
        if len(sequence) < 2:
            return ()
        head, last = sequence[0], len(sequence) - 1
        if self.star:
            return tuple(
                self.round_trip(head, node, last=index == last) for index, node in enumerate(sequence) if index > 0
            )
        forward = tuple(self.forward(a, b) for a, b in pairwise(sequence))
        if self.direct_return(sequence[-1], head):
            return (*forward, self.reply(sequence[-1], head))
        backwards = sequence[::-1]
        return (*forward, *(self.reply(a, b) for a, b in pairwise(backwards)))

    def egress(self, stage_count: int, hops: tuple[PlannedHop, ...]) -> tuple[PlannedHop | None, ...]:
        """The hop each stage waits for in the pipelined period: the one that leaves it; in a star its own round trip.

        A reply that walks back occupies the last stage for its first step only.
        """
        if stage_count == 1:
            return (None,)
        if self.star:
            return (None, *hops)
        return hops[:stage_count]

    def chunk_us(self, sequence: tuple[str, ...], index: int, tokens: int) -> int:
        """What moving one prefill chunk costs stage ``index``: its egress; in a star, its round trip. Known hops only."""
        if self.star:
            if index == 0:
                return 0
            source, target, back = sequence[0], sequence[index], tokens * self.frame_bytes
            if index == len(sequence) - 1:
                back = 0  # the last stage keeps nothing to send until the first token is sampled
        else:
            if index == len(sequence) - 1:
                return 0
            source, target, back = sequence[index], sequence[index + 1], 0
        rtt_us, _ = self.rtt(source, target)
        assert rtt_us is not None
        out = self.transfer(source, target, tokens * self.frame_bytes)
        return self.priced_us(rtt_us, out + self.transfer(target, source, back))

    def _hop(self, source: str, target: str, kind: str, transfer: int) -> PlannedHop:
        rtt_us, basis = self.rtt(source, target)
        return PlannedHop(
            source=source,
            target=target,
            kind="return" if kind == "return" else "forward",
            rtt_us=rtt_us,
            transfer_us=transfer,
            hop_us=None if rtt_us is None else self.priced_us(rtt_us, transfer),
            basis=basis,
        )


def network_of(
    model: ModelPackage, signals: TrustedSignals, calibration: Calibration, return_mode: ReturnMode
) -> Network:
    """Build the price list of one problem."""
    frame = model.activation_frame_bytes + model.required_sideband_bytes
    reply = model.activation_frame_bytes if calibration.return_bytes is None else calibration.return_bytes
    return Network(signals, calibration, frame, reply, return_mode)


def network_us(hops: tuple[PlannedHop, ...]) -> int | None:
    """Σ ``hop_us``, or ``None`` as soon as one hop is unknown."""
    total = 0
    for hop in hops:
        if hop.hop_us is None:
            return None
        total += hop.hop_us
    return total
