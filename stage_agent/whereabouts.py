"""Where others find this node now: a lease ends, a cable is plugged in, and the addresses of the start are history.

Read again every ``LOOK_US``; who asks in between gets what was read last.
"""

from collections.abc import Callable

from stage_agent.addresses import NOWHERE

LOOK_US = 10_000_000


class Whereabouts:
    """``read`` says where peers can dial this node, ``api`` where others ask its API if it has those addresses.

    A machine that is cut off for a moment has no address at all; then those before stay true, since nobody could be told.
    """

    def __init__(self, read: Callable[[], tuple[str, ...]], api: Callable[[tuple[str, ...]], str], now_us: int) -> None:
        self._read = read
        self._api = api
        self._looked_us = now_us
        self.addresses = read()

    @property
    def api_address(self) -> str:
        """``host:port``; empty when only this machine can ask."""
        return self._api(self.addresses)

    def look(self, now_us: int) -> tuple[str, ...] | None:
        """Read again if it is time. The addresses before, when they are others now."""
        if now_us - self._looked_us < LOOK_US:
            return None
        self._looked_us = now_us
        before = self.addresses
        try:
            now = self._read()
        except OSError:  # the cards are changing right now
            return None
        if now == before or all(address.rpartition(":")[0] == NOWHERE for address in now):
            return None
        self.addresses = now
        return before
