"""Serving the API inside the daemon's task group: own socket, no signal handlers, an end within seconds.

The socket is bound before anything else starts, so that a port in use is one clear error of ``stagemesh run``.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.applications import Starlette

from config.absent import absent
from config.settings import ApiSettings
from protocol.errors import AddressError, ConfigurationError

# the command line with click, worker processes, and logging by configuration files (`log_config` is None): 2.3 MB
with absent("uvicorn.main", "uvicorn.supervisors", "uvicorn._subprocess", "configparser", "logging.config"):
    from uvicorn.config import Config
    from uvicorn.server import Server

MAX_CONNECTIONS = 256
GRACE_S = 2
DATE_S = 1.0
"""How often the date in the answers moves on."""


@dataclass(frozen=True, slots=True)
class ApiListener:
    """A bound, listening socket and the address it really has (port 0 was replaced by the kernel's choice)."""

    socket: socket.socket
    host: str
    port: int

    @property
    def address(self) -> str:
        """``host:port`` for people and ``--node``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def reachable_address(self, node_addresses: tuple[str, ...]) -> str:
        """What other machines should ask, as ``host:port``; empty when only this machine can.

        Listening on all addresses, that is the host of the node's first own address (``host:port`` for peers).
        """
        here = ipaddress.ip_address(self.host.partition("%")[0])
        if here.is_loopback:
            return ""
        if not here.is_unspecified:
            return self.address
        return f"{node_addresses[0].rpartition(':')[0]}:{self.port}" if node_addresses else ""


def bind_api(settings: ApiSettings, *, token: str | None = None) -> ApiListener:
    """Bind ``api.host:api.port``.

    Raises ``AddressError`` when that is not possible, and ``ConfigurationError`` when others could reach the API and
    there is no token.
    """
    try:
        found = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise AddressError(f"api.host {settings.host!r} is not an address of this machine ({error}); mend it") from None
    family, kind, protocol, _, address = found[0]
    if token is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"api.host {settings.host} can be reached from other machines: set api.token_file "
            "(under systemd: the credential api-token), or bind 127.0.0.1"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1 if str(address[0]) != "::" else 0)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise AddressError(
            f"the HTTP API cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
            "stop what uses that port or set api.port (0 = any free port)"
        ) from None
    host, port = listener.getsockname()[:2]
    return ApiListener(listener, host, port)


class _Server(Server):
    """uvicorn without its signal handlers, which the daemon owns, and without looking ten times a second whether to end."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Stop taking requests and let ``serve`` return."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # keeps the date that answers carry
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_api(listener: ApiListener, app: Starlette) -> None:
    """Serve until cancelled; then stop taking requests, let open ones end for ``GRACE_S``, close the socket."""
    config = Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener.socket]), name="http")
            try:
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                app.state.streams.close()
                server.end()
                await serving
                raise
    finally:
        listener.socket.close()
