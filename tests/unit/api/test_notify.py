"""What systemd hears, over a real datagram socket."""

import os
import socket

import pytest

from stage_agent.notify import MAX_STATUS_CHARACTERS, SystemdNotifier


@pytest.fixture
def systemd(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(tmp_path / "notify"))
        receiving.settimeout(2)
        yield receiving, {"NOTIFY_SOCKET": str(tmp_path / "notify")}


def test_ready_status_watchdog_and_stopping_arrive_as_systemd_wants_them(systemd):
    receiving, environment = systemd
    notifier = SystemdNotifier(environment)
    assert notifier.ready("joined home-0123")
    assert receiving.recv(4096) == b"READY=1\nSTATUS=joined home-0123"
    assert notifier.status("coordinator\nREADY=1")
    assert receiving.recv(4096) == b"STATUS=coordinator READY=1"
    assert notifier.watchdog()
    assert receiving.recv(4096) == b"WATCHDOG=1"
    assert notifier.stopping()
    assert receiving.recv(4096) == b"STOPPING=1\nSTATUS=draining"


def test_a_long_status_is_cut(systemd):
    receiving, environment = systemd
    SystemdNotifier(environment).status("x" * 10_000)
    assert len(receiving.recv(4096)) == len("STATUS=") + MAX_STATUS_CHARACTERS


def test_an_abstract_socket_is_reached_too():
    name = f"stagemesh-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind("\0" + name)
        receiving.settimeout(2)
        assert SystemdNotifier({"NOTIFY_SOCKET": "@" + name}).watchdog()
        assert receiving.recv(64) == b"WATCHDOG=1"


def test_without_systemd_everything_is_silent_and_nothing_fails(tmp_path):
    assert not SystemdNotifier({}).ready("x")
    assert not SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready("x")


@pytest.mark.parametrize(
    ("environment", "interval"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15_000_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15_000_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_due_at_half_of_systemds_period_and_only_for_this_process(environment, interval):
    assert SystemdNotifier({"NOTIFY_SOCKET": "/nowhere", **environment}).watchdog_interval_us == interval


def test_nobody_watches_when_there_is_no_socket():
    assert SystemdNotifier({"WATCHDOG_USEC": "30000000"}).watchdog_interval_us is None
