"""The command line's way to a running daemon: HTTP on loopback, or ``--node HOST:PORT``.

A daemon that does not answer is ``DaemonUnreachable`` (exit 5); one that refuses is ``ApiRefused`` with the exit code
that the refusal stands for. Answers are bounded. Proxies of the environment are never used: the daemon is a neighbour.
"""

import ipaddress
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from config.load import load_settings
from config.secrets import api_token
from config.settings import Settings
from protocol.errors import AddressError, DaemonUnreachable, StagemeshError

DEFAULT_PORT = 7947
CONNECT_S = 3.0
READ_S = 30.0
MAX_ANSWER_BYTES = 16_777_216

_EXIT_CODES = {"target_missed": 4}
_PLACEMENT_CODES = frozenset(
    {
        "no_valid_topology",
        "context_exceeds_native",
        "context_below_minimum",
        "zero_parallel_lanes",
        "missing_layers",
        "missing_weights",
        "missing_kv",
        "missing_native_context",
        "missing_nodes",
    }
)


class ApiRefused(StagemeshError):  # noqa: N818 - a refusal, named like DaemonUnreachable
    """The daemon answered with a problem document; nothing changed. ``code`` and ``details`` come from it."""

    def __init__(self, message: str, *, status: int, code: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.details = details
        placement = code in _PLACEMENT_CODES or code.startswith("locked_")
        self.exit_code = _EXIT_CODES.get(code, 3 if placement else 1)

    def document(self) -> dict[str, Any]:
        """The refusal as ``--json`` shows it."""
        return {"error": {"code": self.code, "message": str(self), "details": self.details}}


def get_json(
    node: str | None, path: str, *, parameters: dict[str, str] | None = None, settings: Settings | None = None
) -> Any:
    """The JSON document at ``path`` (like ``/api/v1/status``) of ``node`` (``None`` = the configured local daemon).

    ``settings`` = the configuration that says where that is and which token it wants; by default this machine's.
    """
    return _exchange("GET", node, path, None, parameters, settings)


def post_json(node: str | None, path: str, body: dict[str, Any]) -> Any:
    """Send a command; the answer's document."""
    return _exchange("POST", node, path, body)


def delete_json(node: str | None, path: str) -> Any:
    """Remove what ``path`` names; the answer's document."""
    return _exchange("DELETE", node, path, None)


def path_segment(name: str) -> str:
    """A name made safe for use as one part of a path."""
    return quote(name, safe="")


def stream_events(node: str | None, *, after: int = 0) -> Iterator[dict[str, Any]]:
    """Events newer than ``after`` as they happen, for ever; ends with ``DaemonUnreachable`` when the daemon does."""
    settings = load_settings(None)
    base = base_url(node, settings)
    timeout = httpx.Timeout(CONNECT_S, read=60.0)
    with (
        _reaching(base),
        httpx.Client(base_url=base, headers=_headers(settings), timeout=timeout, trust_env=False) as client,
        client.stream("GET", "/api/v1/events/stream", params={"after": str(after)}) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            answer.read()
            raise _refusal(answer, base)
        for line in answer.iter_lines():
            if line.startswith("data:"):
                yield json.loads(line.removeprefix("data:"))
    raise DaemonUnreachable(f"the daemon at {base} closed the event stream; see `systemctl status stagemesh`")


def base_url(node: str | None, settings: Settings) -> str:
    """``http://host:port`` of ``node``, or of the daemon that the local configuration describes."""
    if node is None:
        host = settings.api.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 - compared, not bound
        return _url(host, settings.api.port or DEFAULT_PORT)
    text = node.removeprefix("http://").rstrip("/")
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if (
        (":" in host and not _is_ipv6(host))
        or not host
        or "/" in host
        or "@" in host
        or not port.isdecimal()
        or not 0 < int(port) < 65_536
    ):
        raise AddressError(f"--node {node}: is not an address; write HOST:PORT, for example 127.0.0.1:{DEFAULT_PORT}")
    return _url(host, int(port))


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _headers(settings: Settings) -> dict[str, str]:
    token = api_token(settings)
    return {"authorization": f"Bearer {token}"} if token else {}


def _exchange(
    method: str,
    node: str | None,
    path: str,
    body: dict[str, Any] | None,
    parameters: dict[str, str] | None = None,
    settings: Settings | None = None,
) -> Any:
    settings = settings or load_settings(None)
    base = base_url(node, settings)
    timeout = httpx.Timeout(CONNECT_S, read=READ_S)
    with (
        _reaching(base),
        httpx.Client(base_url=base, headers=_headers(settings), timeout=timeout, trust_env=False) as client,
        client.stream(method, path, json=body, params=parameters) as answer,
    ):
        raw = bytearray()
        for piece in answer.iter_bytes():
            raw += piece
            if len(raw) > MAX_ANSWER_BYTES:
                raise StagemeshError(f"{base}{path} answered more than {MAX_ANSWER_BYTES} bytes; is it stagemesh?")
        if answer.is_success:
            return _document(bytes(raw), base, path)
        raise _refusal(httpx.Response(answer.status_code, content=bytes(raw)), base)


@contextmanager
def _reaching(base: str) -> Iterator[None]:
    """Transport trouble as one line that says what to do."""
    try:
        yield
    except httpx.ConnectError:
        raise DaemonUnreachable(
            f"no daemon answers at {base}; start it (`stagemesh run` or `systemctl start stagemesh`) "
            "or name another one with --node HOST:PORT"
        ) from None
    except httpx.TimeoutException:
        raise DaemonUnreachable(
            f"the daemon at {base} does not answer in time; it may be stalled, see its log or try again"
        ) from None
    except (httpx.TransportError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise DaemonUnreachable(f"the daemon at {base} broke off ({reason}); is that a stagemesh API port?") from None


def _document(raw: bytes, base: str, path: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        raise StagemeshError(f"{base}{path} did not answer with JSON; is that a stagemesh API port?") from None


def _refusal(answer: httpx.Response, base: str) -> StagemeshError:
    try:
        problem = json.loads(answer.content)
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or "status" not in problem:
        return StagemeshError(f"{base} answered with HTTP {answer.status_code}; is that a stagemesh API port?")
    message = str(problem.get("detail") or problem.get("title") or answer.status_code)
    details = problem.get("details")
    return ApiRefused(
        message,
        status=answer.status_code,
        code=str(problem.get("code", "")),
        details=details if isinstance(details, dict) else {},
    )
