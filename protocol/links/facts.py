"""From links to the facts of a row, and when a changed fact is worth a new row.

Facts carry ages, not times, and the settled question is answered from the fact alone: its ages are those at the moment
the owner wrote the row, and the owner writes a new row when the answer changes, so a reader adds nothing for the row's
own age. Noise must not make gossip: a fact counts as changed only when it settles or unsettles, degrades or recovers, or
a figure leaves a band of ± 20 % (RTT, and by > 500 µs) or ± 25 % (bandwidth) around what was *published*. An RTT that does
so and was not told twice too large can wait (``drift``): it is a minimum, and those of a young mesh fall for minutes.
"""

from typing import Literal

from config.settings import LinkSettings
from protocol.ids import NodeId
from protocol.links.bandwidth import merge_bytes_per_s
from protocol.links.link import LinkMark, LinkView
from protocol.rows import LinkFact

RTT_BAND_MILLI = 200
RTT_BAND_FLOOR_US = 500
"""Half a millisecond a hop decides no plan, and busy hosts make as much."""
BANDWIDTH_BAND_MILLI = 250
FAR_OFF = 2


def is_settled(fact: LinkFact, settings: LinkSettings) -> bool:
    """Whether the owner had settled this RTT when it wrote the row. Estimates never are."""
    return (
        not fact.estimated
        and fact.min_rtt_us is not None
        and fact.samples >= settings.settle_samples
        and fact.first_age_us - fact.last_age_us >= settings.settle_span_us
        and fact.last_age_us <= settings.settle_max_age_us
    )


def fact_of(target: NodeId, view: LinkView, now_us: int, *, shaped: bool = False) -> LinkFact | None:
    """The fact, or ``None`` when nothing was measured."""
    rtt, send, receive = view.rtt, view.send, view.receive
    if rtt is None and send is None and receive is None:
        return None
    bandwidth = min((side for side in (send, receive) if side is not None), key=lambda side: side.at_us, default=None)
    return LinkFact(
        target=target,
        min_rtt_us=None if rtt is None else rtt.min_rtt_us,
        samples=0 if rtt is None else rtt.samples,
        first_age_us=0 if rtt is None else now_us - rtt.first_us,
        last_age_us=0 if rtt is None else now_us - rtt.last_us,
        jitter_us=None if rtt is None else rtt.jitter_us,
        send_bytes_per_s=None if send is None else send.bytes_per_s,
        receive_bytes_per_s=None if receive is None else receive.bytes_per_s,
        bandwidth_age_us=None if bandwidth is None else now_us - bandwidth.at_us,
        bandwidth_limited_by=None if bandwidth is None else (send or bandwidth).limited_by,
        receive_limited_by=receive.limited_by if send and receive and receive.limited_by != send.limited_by else None,
        degraded=view.degraded,
        over_tcp=view.over_tcp,
        shaped=shaped,
    )


def frames_bytes_per_s(sender: LinkFact, receiver: LinkFact | None) -> int | None:
    """Large-frame bandwidth from the owner of ``sender`` to its target, as both ends saw it.

    ``receiver``: the target's own fact about the sender, if it has one. See ``merge_bytes_per_s``.
    """
    ends = []
    if sender.send_bytes_per_s is not None:
        ends.append((sender.send_bytes_per_s, sender.bandwidth_limited_by))
    if receiver is not None and receiver.receive_bytes_per_s is not None:
        ends.append((receiver.receive_bytes_per_s, receiver.receive_limited_by or receiver.bandwidth_limited_by))
    return merge_bytes_per_s(*ends)


Change = Literal["none", "drift", "material"]
"""No new row; a new row some time; a new row."""


def change_of(published: LinkMark | None, present: LinkMark, *, sampled: bool = False) -> Change:
    """What the present mark is worth, given what was published last.

    ``sampled``: measured so rarely (large meshes) that it settles with each sample and unsettles before the next, which
    says nothing.
    """
    if published is None:
        return "material" if (present.settled and not sampled) or has_bandwidth(present) else "none"
    if published.settled != present.settled and not sampled:
        return "material"
    if _standing(published) != _standing(present):
        return "material"
    if _left_band(published.send_bytes_per_s, present.send_bytes_per_s, BANDWIDTH_BAND_MILLI, 0) or _left_band(
        published.receive_bytes_per_s, present.receive_bytes_per_s, BANDWIDTH_BAND_MILLI, 0
    ):
        return "material"
    told_us, rtt_us = published.min_rtt_us, present.min_rtt_us
    if not present.settled or not _left_band(told_us, rtt_us, RTT_BAND_MILLI, RTT_BAND_FLOOR_US):
        return "none"
    return "drift" if told_us and rtt_us and told_us < FAR_OFF * rtt_us else "material"


def has_bandwidth(mark: LinkMark) -> bool:
    """Whether any direction is known."""
    return mark.send_bytes_per_s is not None or mark.receive_bytes_per_s is not None


def _standing(mark: LinkMark) -> tuple[bool, bool]:
    return mark.degraded, mark.over_tcp


def _left_band(published: int | None, present: int | None, band_milli: int, floor: int) -> bool:
    if published is None or present is None:
        return published is not present
    difference = abs(present - published)
    return difference * 1000 >= published * band_milli and difference > floor
