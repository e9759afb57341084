"""Real agents in network namespaces: delay, loss, a small MTU, one-way drops, two networks, and no UDP at all."""

import time

import pytest

from tests.namespaces.lab import PORT, lab, wait, why_not, wire_ms

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces are there"),
    pytest.mark.timeout(300),
]
WAN = {"delay_ms": 10, "loss": 0.05, "mtu": 1_280}


def start(*hosts):
    """Start agents and wait until they answer: on a busy machine that takes long, and is not what these tests time."""
    for host in hosts:
        host.start()
    wait("the agents run", lambda: all(host.try_get("/api/v1/status") for host in hosts), 90)


def alive(host, *others):
    return all(state(host, other) == "alive" for other in others)


def met(*hosts):
    return all(alive(host, *(other for other in hosts if other is not host)) for host in hosts)


def settled(*hosts):
    pairs = [(one, two) for one in hosts for two in hosts if one is not two]
    return all(one.link(two).get("settled") for one, two in pairs)


def state(host, other):
    return host.peer(other).get("state", "unknown")


def at(host, other):
    return host.peer(other).get("address", "")


def blocked(host, other):
    return "datagrams_blocked" in host.peer(other).get("degraded", ["datagrams_blocked"])


def over_tcp(host, other):
    return host.link(other).get("over_tcp", True)


def doubted(host, other):
    return state(host, other) in {"suspect", "dead"}


def rtt_ms(source, target):
    return source.link(target).get("rtt_us", 10**9) / 1_000


def errors(pairs, wire, limit_ms):
    return [rtt_ms(*pair) - true_ms <= limit_ms for pair, true_ms in zip(pairs, wire, strict=True)]


def test_three_hosts_over_a_lossy_wan_meet_settle_measure_right_and_notice_a_host_that_nobody_hears(tmp_path):
    with lab(tmp_path, 3, mtu=1_280) as net:
        net.shape(WAN)
        one, two, three = net.hosts
        start(*net.hosts)
        wait("all three meet and settle", lambda: met(*net.hosts) and settled(*net.hosts), 30)
        pairs = ((one, two), (two, three), (three, one))
        wire = [wire_ms(*pair) for pair in pairs]
        # The bench holds 2 ms. A process that sleeps between probes is cold when it wakes: it sends late on an idle machine, too.
        limit_ms = 6
        wait("the minimum finds the true one", lambda: all(errors(pairs, wire, limit_ms)), 40)
        assert all(rtt_ms(*pair) >= 20 for pair in pairs)
        mute = {f"{three.addresses[0]} > {other.addresses[0]}": {"cut": True} for other in (one, two)}
        net.shape(WAN, **mute)
        wait("the mute host is noticed", lambda: doubted(one, three) and doubted(two, three), 25)
        assert alive(one, two), "the other two still hear each other"
        assert alive(two, one)
        net.shape(WAN)
        wait("all three are whole again", lambda: met(*net.hosts), 30)
        assert not [event for host in (one, two) for event in host.events("identity_conflict")]


def joined_without_udp(net):
    """The second host joins the first by the command line and runs; no UDP passes between them."""
    net.shape({"udp": False, "delay_ms": 1})
    inviter, newcomer = net.hosts
    start(inviter)
    directory = str(inviter.directory / "state")
    invited = inviter.command("invite", "--state-dir", directory, "--address", f"{inviter.addresses[0]}:7946")
    assert invited.returncode == 0, invited.stderr
    joined = newcomer.command("join", invited.stdout.split()[0], "--state-dir", str(newcomer.directory / "state"))
    assert joined.returncode == 0, joined.stderr
    start(newcomer)
    wait("both meet over TCP", lambda: met(*net.hosts), 15)
    wait("it shows in the rows", lambda: blocked(newcomer, inviter), 5)
    wait("it shows on both links", lambda: over_tcp(inviter, newcomer) and over_tcp(newcomer, inviter), 5)
    return inviter, newcomer


def steady(*hosts):
    for host in hosts:
        assert not host.events("peer_disconnected"), "degraded, not flapping"
        assert len(host.events("peer_connected")) == 1


def test_where_udp_does_not_pass_a_newcomer_joins_and_control_runs_over_tcp_without_flapping(tmp_path):
    with lab(tmp_path, 2, admitted=False) as net:
        inviter, newcomer = joined_without_udp(net)
        time.sleep(4)
        steady(inviter, newcomer)
        assert newcomer.events("udp_blocked")


@pytest.mark.nightly
def test_a_mesh_without_udp_stays_steady_and_finds_udp_when_it_is_let_through(tmp_path):
    with lab(tmp_path, 2, admitted=False, udp_retry_us=20_000_000) as net:
        inviter, newcomer = joined_without_udp(net)
        time.sleep(45)  # two rounds of looking for UDP
        steady(inviter, newcomer)
        net.shape({"delay_ms": 1})
        wait("UDP is found again", lambda: not over_tcp(inviter, newcomer), 30)
        wait("the rows say so", lambda: not blocked(newcomer, inviter), 15)
        assert inviter.events("path_changed")[-1]["fields"]["path"] == "quic"
        steady(inviter, newcomer)


@pytest.mark.nightly
def test_a_cable_beside_wifi_is_found_used_named_and_missed_when_it_is_gone(tmp_path):
    with lab(tmp_path, 2, networks=2) as net:
        one, two = net.hosts
        pairs = [(one, two), (two, one)]
        wifi = {f"{a.addresses[0]} > {b.addresses[0]}": {"delay_ms": 30} for a, b in pairs}
        net.shape({}, **wifi)
        start(*net.hosts)
        wait("they meet over Wi-Fi", lambda: met(*net.hosts), 15)
        assert at(one, two).startswith("10.77.")
        wait("both move to the cable", lambda: all(at(*pair).startswith("10.78.") for pair in pairs), 30)
        wait("the cable settles", lambda: settled(*net.hosts), 15)
        wait("the cable is fast", lambda: rtt_ms(one, two) < 10, 20)
        for host in net.hosts:
            event = host.events("path_changed")[-1]
            assert event["fields"]["interface"] == "net1"
            assert event["fields"]["was_interface"] == "net0"
            assert event["fields"]["was_rtt_us"] >= 60_000
            assert not host.events("peer_disconnected")
        wait("the cable has been seen for a while", lambda: one.link(two).get("samples", 0) >= 20, 30)
        unplugged = {f"{a.addresses[1]} > {b.addresses[1]}": {"cut": True} for a, b in pairs}
        net.shape({}, **wifi, **unplugged)
        wait("they meet over Wi-Fi again", lambda: all(at(*pair).startswith("10.77.") for pair in pairs), 30)
        wait("what was lost is named", lambda: one.events("link_degraded"), 60)
        fields = one.events("link_degraded")[-1]["fields"]
        assert (fields["interface"], fields["best_interface"]) == ("net0", "net1")
        assert fields["best_host"] == two.addresses[1]


@pytest.mark.nightly
@pytest.mark.parametrize("mover", [0, 1])
def test_a_host_that_gets_another_address_stays_in_the_mesh(tmp_path, mover):
    with lab(tmp_path, 2) as net:
        net.shape({"delay_ms": 1})
        start(*net.hosts)
        wait("they meet", lambda: met(*net.hosts), 15)
        moving, staying = net.hosts[mover], net.hosts[1 - mover]
        fresh = moving.readdress()
        wait("it is reached at its new address", lambda: at(staying, moving).startswith(f"{fresh}:"), 90)
        wait("both see each other alive", lambda: met(*net.hosts), 30)
        assert not [event for event in staying.events("member_changed") if event["fields"]["state"] == "left"]


@pytest.mark.nightly
def test_a_host_that_found_its_address_itself_tells_the_mesh_when_it_has_another(tmp_path):
    with lab(tmp_path, 3, advertise=False) as net:
        net.shape({"delay_ms": 1})
        one, moving, late = net.hosts
        start(one, moving)
        wait("they meet", lambda: met(one, moving), 15)
        old, fresh = moving.addresses[0], moving.readdress()
        wait("it notices", lambda: moving.events("addresses_changed"), 30)
        fields = moving.events("addresses_changed")[-1]["fields"]
        assert (fields["was_addresses"], fields["addresses"]) == ([f"{old}:{PORT}"], [f"{fresh}:{PORT}"])
        wait("it is reached at its new address", lambda: at(one, moving).startswith(f"{fresh}:"), 90)
        start(late)
        wait("who knows nothing but the seed finds it there", lambda: at(late, moving).startswith(f"{fresh}:"), 60)
        wait("all see all", lambda: met(*net.hosts), 30)
