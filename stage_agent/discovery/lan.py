"""mDNS through ``zeroconf`` (``pip install 'stagemesh[lan]'``): announce this node, hear others, dial the admitted ones.

Everything heard goes through ``hints``, which says what it is worth. A name is resolved only when it is an admitted
node's, and at most ``RESOLVING_MAX`` at a time.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from config.settings import DiscoverySettings
from protocol.errors import ConfigurationError
from protocol.quic.address import parse_address
from stage_agent.discovery.hints import SERVICE_TYPE, Dial, Hints, service_name, tag_from, usable_addresses
from stage_agent.journal import Journal

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

RESOLVING_MAX = 8
RESOLVE_MS = 3_000
REST_S = 60.0
"""Between attempts when multicast has gone with the network that this node had."""
LOOK_S = 5.0
"""How often nodes that are not connected are looked for among those heard."""


def require_zeroconf() -> None:
    """Raises ``ConfigurationError`` when the optional package is missing."""
    try:
        import zeroconf  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "discovery.lan needs the package zeroconf: `pip install 'stagemesh[lan]'`, or set discovery.lan = false"
        ) from None


class LanDiscovery:
    """Runs beside the transport until cancelled."""

    def __init__(
        self,
        settings: DiscoverySettings,
        *,
        tag: str,
        addresses: Callable[[], tuple[str, ...]],
        hints: Hints,
        dial: Dial,
        connected: Callable[[], Container[str]],
        clock_us: Callable[[], int],
        journal: Journal,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._settings = settings
        self._tag = tag
        self._addresses = addresses
        self._hints = hints
        self._dial = dial
        self._connected = connected
        self._clock_us = clock_us
        self._journal = journal
        self._tasks = tasks
        self._resolving: set[str] = set()

    async def run(self) -> None:
        """Announce, listen and dial, anew whenever this machine's addresses change. Without multicast it ends or rests."""
        begun = False
        while True:
            try:
                network = _open(self._settings)
            except OSError as error:
                self._journal.tell("lan_discovery_off", f"no multicast DNS here: {error.strerror or error}", "warning")
                if not begun:
                    return
                await asyncio.sleep(REST_S)
            else:
                begun = True
                await self._announce(network, self._addresses())

    async def _announce(self, network: "AsyncZeroconf", addresses: tuple[str, ...]) -> None:
        """Until other addresses are this node's. The network's interfaces are those of now, too."""
        from zeroconf import Error
        from zeroconf.asyncio import AsyncServiceBrowser

        try:
            try:
                for info in _announcements(self._tag, addresses):
                    await network.async_register_service(info)
            except Error as error:
                self._journal.tell(
                    "lan_not_announced", f"this node is not announced: {type(error).__name__}", "warning"
                )
            browser = AsyncServiceBrowser(network.zeroconf, SERVICE_TYPE, handlers=[self._changed])
            try:
                while self._addresses() == addresses:
                    await asyncio.sleep(LOOK_S)
                    self._look()
            finally:
                await browser.async_cancel()
        finally:
            await network.async_close()

    def _look(self) -> None:
        for hint in self._hints.due(self._connected(), self._clock_us()):
            self._journal.tell("lan_found", f"dialling {hint.address}, announced on this network", "debug")
            self._dial(hint.address, hint.node_id)

    def _changed(self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: "ServiceStateChange") -> None:
        from zeroconf import ServiceStateChange

        tag = tag_from(name)
        if tag is None or not self._hints.knows(tag):
            return
        if state_change is ServiceStateChange.Removed:
            self._hints.gone(tag)
        elif name not in self._resolving and len(self._resolving) < RESOLVING_MAX:
            self._resolving.add(name)
            self._tasks.create_task(self._resolve(zeroconf, service_type, name, tag), name="lan resolve")

    async def _resolve(self, zeroconf: "Zeroconf", service_type: str, name: str, tag: str) -> None:
        from zeroconf import Error
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(service_type, name)
        try:
            if await info.async_request(zeroconf, RESOLVE_MS):
                self._hints.heard(tag, _addresses_of(info))
                self._look()
        except Error:  # the network was closed meanwhile: it is heard of again on the next one
            return
        finally:
            self._resolving.discard(name)


async def find(settings: DiscoverySettings, tag: str, seconds: float) -> tuple[str, ...]:
    """Where a node with that tag announces itself, within ``seconds``; empty when nobody does or there is no multicast."""
    from zeroconf.asyncio import AsyncServiceInfo

    try:
        network = _open(settings)
    except OSError:
        return ()
    try:
        info = AsyncServiceInfo(SERVICE_TYPE, service_name(tag))
        found = await info.async_request(network.zeroconf, seconds * 1_000)
        return _addresses_of(info) if found else ()
    finally:
        await network.async_close()


def _open(settings: DiscoverySettings) -> "AsyncZeroconf":
    """Sockets on the interfaces of the settings. Raises ``OSError``."""
    from zeroconf import InterfaceChoice, IPVersion
    from zeroconf.asyncio import AsyncZeroconf

    if not settings.interfaces:
        return AsyncZeroconf(interfaces=InterfaceChoice.All)
    six = [ipaddress.ip_address(each).version == 6 for each in settings.interfaces]
    version = IPVersion.V6Only if all(six) else IPVersion.All if any(six) else IPVersion.V4Only
    return AsyncZeroconf(interfaces=list(settings.interfaces), ip_version=version)


def _announcements(tag: str, addresses: tuple[str, ...]) -> "list[AsyncServiceInfo]":
    """One service with the numeric addresses that share the port of the first; none when there are none."""
    from zeroconf.asyncio import AsyncServiceInfo

    parsed = [parse_address(address) for address in addresses]
    ports = [each.port for each in parsed if usable_addresses([each.host], each.port)]
    hosts = [each.host for each in parsed if usable_addresses([each.host], each.port) and each.port == ports[0]]
    if not hosts:
        return []
    name = service_name(tag)
    info = AsyncServiceInfo(
        SERVICE_TYPE, name, port=ports[0], properties={"v": "1"}, server=f"{tag}.local.", parsed_addresses=hosts
    )
    return [info]


def _addresses_of(info: "AsyncServiceInfo") -> tuple[str, ...]:
    return usable_addresses(info.parsed_addresses(), info.port or 0)
