"""Measured between hosts in network namespaces: round trips against what was set, bulk and heartbeats over bad links,
agents that meet, lose one another and meet again.

Results are appended to ``results/namespaces.jsonl``; needs root, skipped elsewhere.
"""

import json
import statistics
import subprocess
import sys
import time

import pytest

from tests.bench.awake import awake
from tests.bench.rows import append, percentile
from tests.namespaces.lab import lab, wait, why_not, wire_ms
from tests.namespaces.priority import SLICE_NS
from tests.namespaces.test_mesh import WAN, doubted, met, rtt_ms, settled, start

pytestmark = [
    pytest.mark.bench,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces are there"),
]
SECONDS = 8
NICENESS = -19
"""Of what is timed: others on this machine are not part of the link."""
ERROR_MAX_MS = 2.0
HEARTBEAT_OVER_RTT_MAX_MS = 20.0
BULK_MAX_MIB_PER_S, BULK_LOSSY_MIB_PER_S = 50.0, 10.0
BULK_WINDOW_MIB = 1.5
"""What a kernel's default windows carry in a round trip at the least; both hosts and the hub share this machine's cores."""


def bulk_bar_mib_per_s(shape):
    if shape.get("loss"):
        return BULK_LOSSY_MIB_PER_S
    rtt_s = 2 * shape.get("delay_ms", 0) / 1_000
    return min(BULK_MAX_MIB_PER_S, BULK_WINDOW_MIB / rtt_s) if rtt_s else BULK_MAX_MIB_PER_S


def talk(net):
    """What two transports see of the link between the first two hosts."""
    one, two = net.hosts[:2]
    program = (sys.executable, "-m", "tests.namespaces.talker")
    far = two.popen(
        *program, "far", str(two.directory / "state"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert far.stdout.readline() == "ready\n"
        near = one.popen(
            *program, "near", str(one.directory / "state"), two.addresses[0], two.id, str(SECONDS),
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        said, _ = near.communicate(timeout=120)
    finally:
        far.communicate("", timeout=20)
    return json.loads(said)


@pytest.mark.parametrize(
    "shape",
    [{"delay_ms": 2.5}, {"delay_ms": 10}, {"delay_ms": 25}, {"delay_ms": 75}, WAN, {}],
    ids=["5 ms", "20 ms", "50 ms", "150 ms", "20 ms, 5 % loss, MTU 1280", "unshaped"],
)
def test_round_trip_bulk_and_heartbeats_over_a_link(tmp_path, shape):
    with awake() as spins, lab(tmp_path, 2, mtu=shape.get("mtu", 1_500), niceness=NICENESS) as net:
        net.shape(shape)
        wire = wire_ms(*net.hosts[:2])
        seen = talk(net)
    idle = [value for value in seen["idle_ms"] if value is not None]
    busy = [value for value in seen["busy_ms"] if value is not None]
    true_ms = 2 * shape.get("delay_ms", 0)
    append(
        "namespaces", "link", awake=spins, niceness=NICENESS, slice_us=SLICE_NS // 1_000, set_rtt_ms=true_ms, loss=shape.get("loss", 0), mtu=shape.get("mtu", 1_500), bare_sockets_min_ms=wire,
        min_ms=min(idle), median_ms=statistics.median(idle), error_ms=min(idle) - true_ms,
        own_error_ms=min(idle) - wire, bulk_bar_mib_per_s=bulk_bar_mib_per_s(shape),
        bulk_mib_per_s=seen["bulk_mib_per_s"], heartbeat_p50_ms=percentile(busy, 0.5),
        heartbeat_p99_ms=percentile(busy, 0.99), lost_idle=len(seen["idle_ms"]) - len(idle),
        lost_busy=len(seen["busy_ms"]) - len(busy), samples=[len(idle), len(busy)],
    )  # fmt: skip
    assert min(idle) >= true_ms
    assert min(idle) - wire <= ERROR_MAX_MS
    assert percentile(busy, 0.99) <= true_ms + HEARTBEAT_OVER_RTT_MAX_MS
    assert seen["bulk_mib_per_s"] >= bulk_bar_mib_per_s(shape)


def test_three_agents_over_a_lossy_wan(tmp_path):
    with awake() as spins, lab(tmp_path, 3, mtu=1_280, niceness=NICENESS) as net:
        net.shape(WAN)
        one, two, three = net.hosts
        start(*net.hosts)
        settled_s = wait("they meet and settle", lambda: met(*net.hosts) and settled(*net.hosts), 60)
        time.sleep(30)
        assert not [event for host in net.hosts for event in host.events("peer_disconnected")]
        # After half a minute of one probe a second.
        errors = [rtt_ms(a, b) - 20 for a in net.hosts for b in net.hosts if a is not b]
        hub_ms = wire_ms(one, two) - 20
        mute = {f"{three.addresses[0]} > {other.addresses[0]}": {"cut": True} for other in (one, two)}
        net.shape(WAN, **mute)
        noticed_s = wait("the mute host is noticed", lambda: doubted(one, three) and doubted(two, three), 40)
        net.shape(WAN)
        healed_s = wait("whole again", lambda: met(*net.hosts), 60)
    append(
        "namespaces", "agents", awake=spins, niceness=NICENESS, slice_us=SLICE_NS // 1_000, settled_s=settled_s, rtt_error_max_ms=max(errors), rtt_error_median_ms=statistics.median(errors),
        hub_adds_ms=hub_ms, one_way_drop_noticed_s=noticed_s, healed_s=healed_s,
    )  # fmt: skip
    assert max(errors) - hub_ms <= ERROR_MAX_MS
