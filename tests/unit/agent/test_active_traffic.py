"""What an active bandwidth probe gives way to: frames, bytes of tunnels, stages that load, other programs' traffic."""

from dataclasses import dataclass

import pytest

from protocol.rows import StageFact
from stage_agent.active_traffic import WINDOW_US, ForeignTraffic, Moved, card_bytes, other_traffic, stages_load
from stage_agent.journal import Journal


@dataclass
class Carried:
    sent_bytes: int = 0
    received_bytes: int = 0


def test_a_frame_and_a_byte_in_a_tunnel_either_way_are_traffic_and_an_open_tunnel_alone_is_not() -> None:
    journal, tunnel = Journal(), Carried()
    seen = [other_traffic(journal)]
    journal.frames["frames_sent"] += 1
    seen.append(other_traffic(journal))
    journal.tunnels.begin("peer", tunnel)
    assert other_traffic(journal) == seen[-1]
    tunnel.sent_bytes += 1
    seen.append(other_traffic(journal))
    tunnel.received_bytes += 1
    seen.append(other_traffic(journal))
    assert len(set(seen)) == 4
    journal.tunnels.end(tunnel, None)
    assert other_traffic(journal) == seen[-1]


@pytest.mark.parametrize(("state", "loads"), [("loading", True), ("serving", False), ("idle", False)])
def test_only_a_stage_that_loads_is_traffic_by_itself(state: str, loads: bool) -> None:
    fact = StageFact.model_validate({"slot": "main", "state": state})
    assert stages_load([fact]) is loads


MIB = 1_048_576


class Machine:
    """Its cards, what its probes moved, and a clock."""

    def __init__(self) -> None:
        self.cards, self.probed, self.now_us = Moved(7, 9), Moved(0, 0), 5
        self.foreign = ForeignTraffic(lambda: self.cards, lambda: self.probed, self.now_us)

    def carries(self, *, sent: int = 0, received: int = 0, probe: Moved | None = None, for_us: int = WINDOW_US) -> bool:
        """Bytes that the cards count, those of a probe among them; whether that is foreign traffic."""
        self.cards = Moved(self.cards.sent + sent, self.cards.received + received)
        if probe is not None:
            self.probed = Moved(self.probed.sent + probe.sent, self.probed.received + probe.received)
        self.now_us += for_us
        return self.foreign.flows(self.now_us)


@pytest.mark.parametrize("way", ["sent", "received"])
def test_a_download_or_an_upload_of_another_program_is_traffic_while_it_lasts(way: str) -> None:
    machine = Machine()
    assert not machine.carries(**{way: MIB // 2})
    assert machine.carries(**{way: 2 * MIB})
    assert not machine.carries()


def test_gossip_of_hours_is_no_traffic() -> None:
    machine = Machine()
    assert not any(machine.carries(sent=20_000, received=20_000) for _ in range(1_000))


@pytest.mark.parametrize(("sent", "received"), [(64, 0), (0, 64)])
def test_a_probe_does_not_take_itself_for_traffic(sent: int, received: int) -> None:
    machine = Machine()
    for _ in range(64):
        probe = Moved(MIB * (sent > 0), MIB * (received > 0))
        assert not machine.carries(
            sent=probe.sent * 107 // 100 + probe.received // 30,
            received=probe.received * 107 // 100 + probe.sent // 30,
            probe=probe,
            for_us=20_000,
        )


def test_a_download_beside_a_probe_is_seen_while_the_probe_runs() -> None:
    machine = Machine()
    assert any(machine.carries(sent=MIB, received=MIB, probe=Moved(MIB, 0), for_us=20_000) for _ in range(8))


def test_what_a_probe_wrote_and_the_card_sends_later_is_no_traffic() -> None:
    machine = Machine()
    assert not machine.carries(probe=Moved(8 * MIB, 0), for_us=WINDOW_US - 1)
    assert not any(machine.carries(sent=2 * MIB) for _ in range(4))


def test_the_cards_of_this_machine_can_be_read() -> None:
    before = card_bytes()
    after = card_bytes()
    assert after.since(before).sent >= 0
    assert after.since(before).received >= 0
