"""Who may talk to the API, decided before any route sees the request.

* With a token: every path but health, readiness, console page and description needs ``Authorization: Bearer``.
* Without one (loopback only) a web page in the operator's browser is the attacker: a request must name an IP address,
  ``localhost`` or the configured host (DNS rebinding), and a writing one must come from no other origin and be JSON,
  which a browser does not send across origins without asking first.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stage_agent.api.problems import Problem, respond

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Gate:
    """ASGI middleware; refuses with a problem document."""

    def __init__(self, app: ASGIApp, *, token: str | None, host: str) -> None:
        self._app = app
        self._token = token
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry: refuse, or hand on unchanged."""
        if scope["type"] == "http" and (problem := self._refusal(scope)) is not None:
            await respond(problem, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if self._token is None and not self._known_host(headers.get("host", "")):
            return Problem(421, "wrong_host", "this API is for this machine; ask it by IP address or as localhost")
        if self._token is not None and scope["path"] not in OPEN_PATHS and not self._carries_token(headers):
            return Problem(
                401,
                "token_required",
                "send the token of api.token_file as Authorization: Bearer",
                headers={"www-authenticate": 'Bearer realm="stagemesh"'},
            )
        if scope["method"] in SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            return Problem(403, "foreign_origin", "commands are not taken from pages of other sites")
        if scope["method"] == "POST" and headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return Problem(415, "json_required", "send a JSON body with Content-Type: application/json")
        return None

    def _carries_token(self, headers: Headers) -> bool:
        assert self._token is not None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode(), self._token.encode())
        return scheme.lower() == "bearer" and matches

    def _known_host(self, header: str) -> bool:
        try:
            name = (urlsplit(f"//{header}").hostname or "").lower()
        except ValueError:
            return False
        if name in ("localhost", self._host):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
