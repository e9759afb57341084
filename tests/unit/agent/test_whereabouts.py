"""Where a node says it is, while its machine's addresses come and go."""

import pytest

from stage_agent.whereabouts import LOOK_US, Whereabouts


class Machine:
    """The addresses it has now; None while its cards are being changed."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | None = addresses
        self.place = Whereabouts(self._read, lambda now: now[0].replace("7946", "7947"), 0)
        self.now_us = 0

    def _read(self) -> tuple[str, ...]:
        if self.addresses is None:
            raise OSError("no such device")
        return self.addresses

    def later(self, *addresses: str) -> tuple[str, ...] | None:
        self.addresses = addresses or None
        self.now_us += LOOK_US
        return self.place.look(self.now_us)


def test_a_new_lease_is_noticed_once_and_said_with_the_old_one() -> None:
    machine = Machine("192.0.2.1:7946")
    assert machine.later("192.0.2.1:7946") is None
    assert machine.later("192.0.2.9:7946", "10.0.0.1:7946") == ("192.0.2.1:7946",)
    assert machine.later("192.0.2.9:7946", "10.0.0.1:7946") is None
    assert machine.place.addresses == ("192.0.2.9:7946", "10.0.0.1:7946")
    assert machine.place.api_address == "192.0.2.9:7947"


@pytest.mark.parametrize("cut_off", [("127.0.0.1:7946",), ()])
def test_a_machine_without_a_network_keeps_saying_where_it_was(cut_off: tuple[str, ...]) -> None:
    machine = Machine("192.0.2.1:7946")
    assert machine.later(*cut_off) is None
    assert machine.place.addresses == ("192.0.2.1:7946",)
    assert machine.later("192.0.2.1:7946") is None


def test_a_machine_that_started_without_a_network_says_where_it_is_when_it_has_one() -> None:
    machine = Machine("127.0.0.1:7946")
    assert machine.later("192.0.2.1:7946") == ("127.0.0.1:7946",)


def test_the_cards_are_read_no_more_often_than_that() -> None:
    machine = Machine("192.0.2.1:7946")
    machine.addresses = ("192.0.2.2:7946",)
    assert machine.place.look(LOOK_US - 1) is None
    assert machine.place.look(LOOK_US) == ("192.0.2.1:7946",)
