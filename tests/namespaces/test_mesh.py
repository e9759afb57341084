"""Real agents in network namespaces: delay, loss, a small MTU, one-way drops, two networks, and no UDP at all."""

import time

import pytest

from tests.namespaces.lab import lab, wait, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces are there"),
    pytest.mark.timeout(120),
]
WAN = {"delay_ms": 10, "loss": 0.05, "mtu": 1_280}


def alive(host, *others):
    return all(host.peer(other).get("state") == "alive" for other in others)


def met(*hosts):
    return all(alive(host, *(other for other in hosts if other is not host)) for host in hosts)


def settled(*hosts):
    pairs = [(one, two) for one in hosts for two in hosts if one is not two]
    return all(one.link(two).get("settled") for one, two in pairs)


def error_ms(source, target):
    return source.link(target)["rtt_us"] / 1_000 - 20


def test_three_hosts_over_a_lossy_wan_meet_settle_measure_right_and_notice_a_host_that_nobody_hears(tmp_path):
    with lab(tmp_path, 3, mtu=1_280) as net:
        net.shape(WAN)
        one, two, three = net.hosts
        for host in net.hosts:
            host.start()
        wait("all three meet and settle", lambda: met(*net.hosts) and settled(*net.hosts), 30)
        pairs = ((one, two), (two, three), (three, one))
        wait("the minimum finds the true 20 ms", lambda: all(error_ms(*pair) <= 2 for pair in pairs), 20)
        assert all(error_ms(*pair) >= 0 for pair in pairs)
        mute = {f"{three.addresses[0]} > {other.addresses[0]}": {"cut": True} for other in (one, two)}
        net.shape(WAN, **mute)
        wait("the mute host is noticed", lambda: one.peer(three)["state"] != "alive" != two.peer(three)["state"], 25)
        assert alive(one, two), "the other two still hear each other"
        assert alive(two, one)
        net.shape(WAN)
        wait("all three are whole again", lambda: met(*net.hosts), 30)
        assert not [event for host in (one, two) for event in host.events("identity_conflict")]


def test_where_udp_does_not_pass_a_newcomer_joins_and_control_runs_over_tcp_without_flapping(tmp_path):
    with lab(tmp_path, 2, admitted=False, udp_retry_us=4_000_000) as net:
        net.shape({"udp": False, "delay_ms": 1})
        inviter, newcomer = net.hosts
        inviter.start()
        wait("the inviter runs", lambda: inviter.try_get("/api/v1/status"), 15)
        state = str(inviter.directory / "state")
        invited = inviter.command("invite", "--state-dir", state, "--address", f"{inviter.addresses[0]}:7946")
        assert invited.returncode == 0, invited.stderr
        joined = newcomer.command("join", invited.stdout.split()[0], "--state-dir", str(newcomer.directory / "state"))
        assert joined.returncode == 0, joined.stderr
        newcomer.start()
        took_s = wait("both meet over TCP", lambda: met(*net.hosts), 15)
        wait("it shows in the rows", lambda: "datagrams_blocked" in newcomer.peer(inviter)["degraded"], 5)
        wait("it shows on both links", lambda: inviter.link(newcomer)["over_tcp"] and newcomer.link(inviter)["over_tcp"], 5)
        assert newcomer.events("udp_blocked")
        time.sleep(6)
        for host in net.hosts:
            assert not host.events("peer_disconnected"), f"met after {took_s:.1f} s, then flapped"
            assert len(host.events("peer_connected")) == 1
        net.shape({"delay_ms": 1})
        wait("UDP is found again", lambda: not inviter.link(newcomer)["over_tcp"], 15)
        wait("the rows say so", lambda: "datagrams_blocked" not in newcomer.peer(inviter)["degraded"], 15)
        assert inviter.events("path_changed")[-1]["fields"]["path"] == "quic"
        assert not inviter.events("peer_disconnected")


def test_a_cable_beside_wifi_is_found_used_named_and_missed_when_it_is_gone(tmp_path):
    with lab(tmp_path, 2, networks=2) as net:
        one, two = net.hosts
        pairs = [(one, two), (two, one)]
        wifi = {f"{a.addresses[0]} > {b.addresses[0]}": {"delay_ms": 9} for a, b in pairs}
        net.shape({}, **wifi)
        for host in net.hosts:
            host.start()
        wait("they meet over Wi-Fi", lambda: met(*net.hosts), 15)
        assert one.peer(two)["address"].startswith("10.77.")
        wait("both move to the cable", lambda: all(a.peer(b)["address"].startswith("10.78.") for a, b in pairs), 30)
        wait("the cable settles", lambda: settled(*net.hosts), 15)
        wait("the cable is fast", lambda: one.link(two)["rtt_us"] < 5_000, 20)
        for host in net.hosts:
            (event,) = host.events("path_changed")
            assert event["fields"]["interface"] == "net1"
            assert event["fields"]["was_interface"] == "net0"
            assert event["fields"]["was_rtt_us"] >= 18_000
            assert not host.events("peer_disconnected")
        wait("the cable has been seen for a while", lambda: one.link(two)["samples"] >= 20, 30)
        unplugged = {f"{a.addresses[1]} > {b.addresses[1]}": {"cut": True} for a, b in pairs}
        net.shape({}, **wifi, **unplugged)
        wait("they meet over Wi-Fi again", lambda: all(a.peer(b)["address"].startswith("10.77.") for a, b in pairs), 30)
        wait("what was lost is named", lambda: one.events("link_degraded"), 60)
        fields = one.events("link_degraded")[-1]["fields"]
        assert (fields["interface"], fields["best_interface"]) == ("net0", "net1")
        assert fields["best_host"] == two.addresses[1]
