"""systemd's notification protocol over its datagram socket (``sd_notify(3)``); silent when there is no systemd.

``READY=1`` once the node is joined and listens, ``STATUS=`` for ``systemctl status``, ``WATCHDOG=1`` at half of the
period that systemd asks for, ``STOPPING=1`` when a drain begins.
"""

import os
import socket
from collections.abc import Mapping

MAX_STATUS_CHARACTERS = 256


class SystemdNotifier:
    """Tells systemd how the service is. A lost message is not an error: systemd's watchdog is the judge."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        owner = environment.get("WATCHDOG_PID", "")
        mine = not owner or owner == str(os.getpid())
        period = environment.get("WATCHDOG_USEC", "")
        self._watchdog_us = int(period) // 2 if mine and period.isdecimal() and int(period) > 0 else None

    @property
    def listens(self) -> bool:
        """Whether systemd runs this process: else no status need be made up."""
        return bool(self._address)

    @property
    def watchdog_interval_us(self) -> int | None:
        """How often ``watchdog()`` is due: half of systemd's period; ``None`` = nobody watches."""
        return self._watchdog_us if self._address else None

    def ready(self, status: str) -> bool:
        """The service does its work from now on."""
        return self._send(f"READY=1\n{_status(status)}")

    def status(self, status: str) -> bool:
        """One line for people."""
        return self._send(_status(status))

    def watchdog(self) -> bool:
        """Still alive: call it from the event loop, so that a stuck loop is noticed."""
        return self._send("WATCHDOG=1")

    def stopping(self, status: str = "draining") -> bool:
        """A shutdown was asked for and goes on."""
        return self._send(f"STOPPING=1\n{_status(status)}")

    def _send(self, text: str) -> bool:
        """Whether the message left; never blocks and never raises."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto(text.encode(), self._address)
        except OSError:
            return False
        return True


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())[:MAX_STATUS_CHARACTERS]
