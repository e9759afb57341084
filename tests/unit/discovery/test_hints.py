"""Announcements on the local network: what they are worth, and what a hostile one costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.load import load_settings
from protocol.admission import AdmissionBook
from protocol.errors import ConfigurationError
from stage_agent.discovery import lan
from stage_agent.discovery.hints import (
    ADDRESSES_PER_NODE,
    AGAIN_US,
    DIALS_AT_ONCE,
    DIALS_PER_S,
    Hint,
    Hints,
    service_name,
    tag_from,
    tag_of,
    usable_addresses,
)
from tests.integration.transport_mesh import identities

SECOND = 1_000_000


def heard(count: int = 3) -> tuple[Hints, list[str], list[str], AdmissionBook]:
    """Hints of the first of ``count`` admitted nodes, all ids and all tags."""
    people, books = identities(count)
    ids = [person.node_id for person in people]
    book = books[0]
    return Hints(book, ids[0]), ids, [tag_of(book.mesh_id, node) for node in ids], book


def test_an_announced_member_is_dialled_with_its_key_pinned_until_it_is_connected() -> None:
    hints, ids, tags, _ = heard()
    hints.heard(tags[1], ("192.168.1.5:7946",))
    assert hints.due(set(), SECOND) == [Hint(ids[1], "192.168.1.5:7946")]
    assert hints.due(set(), 2 * SECOND) == [], "each address once a minute"
    assert hints.due({ids[1]}, SECOND + AGAIN_US) == []
    assert hints.due(set(), SECOND + AGAIN_US) == [Hint(ids[1], "192.168.1.5:7946")]
    hints.gone(tags[1])
    assert hints.due(set(), 10 * AGAIN_US) == []


def test_strangers_this_node_itself_and_members_of_other_meshes_are_nobody() -> None:
    hints, ids, tags, book = heard()
    others = ["0" * 32, tags[0], tag_of("another.mesh", ids[1])]
    for tag in others:
        assert not hints.knows(tag)
        hints.heard(tag, ("192.168.1.5:7946",))
    assert hints.due(set(), SECOND) == []
    assert hints.knows(tags[1])
    book._admitted.discard(ids[1])
    book.version += 1
    assert not hints.knows(tags[1]), "nor is who was revoked"


def test_a_revoked_node_that_was_heard_before_is_not_dialled() -> None:
    hints, ids, tags, book = heard()
    hints.heard(tags[1], ("192.168.1.5:7946",))
    book._admitted.discard(ids[1])
    book.version += 1
    assert hints.due(set(), SECOND) == []


def test_a_liar_that_knows_the_tags_costs_one_dial_a_second() -> None:
    hints, _, tags, _ = heard(9)
    dialled = 0
    for second in range(1, 61):
        for number, tag in enumerate(tags):
            hints.heard(tag, tuple(f"10.{number}.{second}.{last}:1" for last in range(200)))
        dialled += len(hints.due(set(), second * SECOND))
    assert dialled <= 60 * DIALS_PER_S + DIALS_AT_ONCE
    assert len(hints._heard) == 8
    assert all(len(each) <= ADDRESSES_PER_NODE for each in hints._heard.values())


@pytest.mark.parametrize(
    ("hosts", "usable"),
    [
        (["192.168.1.5", "192.168.1.5", "fd00::1"], ("192.168.1.5:7946", "[fd00::1]:7946")),
        (["224.0.0.1", "0.0.0.0", "::", "fe80::1", "fe80::1%eth0", "ff02::1", "240.0.0.1", "evil.example"], ()),
        ([f"10.0.0.{last}" for last in range(1, 99)], tuple(f"10.0.0.{last}:7946" for last in range(1, 5))),
    ],
)
def test_only_a_few_plain_addresses_are_taken(hosts: list[str], usable: tuple[str, ...]) -> None:
    assert usable_addresses(hosts, 7946) == usable


@pytest.mark.parametrize("port", [0, -1, 65_536])
def test_an_impossible_port_is_no_address(port: int) -> None:
    assert usable_addresses(["10.0.0.1"], port) == ()


@given(st.text(max_size=80))
def test_any_name_is_ours_or_nothing(name: str) -> None:
    tag = tag_from(name)
    assert tag is None or service_name(tag) == name
    assert tag_from(service_name(tag_of("mesh", name))) == tag_of("mesh", name)


def test_a_tag_tells_nothing_to_who_does_not_know_mesh_and_node() -> None:
    tag = tag_of("home.abc", "node")
    assert len(tag) == 32
    assert len({tag, tag_of("home.abd", "node"), tag_of("home.abc", "nodf"), tag_of("home.ab", "cnode")}) == 4


def test_without_the_package_it_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zeroconf", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'stagemesh\[lan\]'"):
        lan.require_zeroconf()


def test_it_is_off_unless_asked_for_and_interfaces_are_addresses() -> None:
    assert not load_settings(None, environment={}).discovery.lan
    with pytest.raises(ConfigurationError, match=r"eth0.* is not an IP address"):
        load_settings(None, environment={"STAGEMESH_DISCOVERY__INTERFACES": '["eth0"]'})
