"""The newcomer's side of joining: reach the inviter, pin it, prove the token, take the admission."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from protocol.codec import decode, encode
from protocol.errors import AddressError, JoinError, WireError
from protocol.ids import MeshId, node_id_of
from protocol.join_token import JoinToken, join_proof, verifier_of
from protocol.messages import JoinAccepted, JoinRefused, JoinRequest
from protocol.quic.address import SocketAddress, for_socket, parse_address
from protocol.quic.carrier import QuicCarrier
from protocol.quic.identity import Identity
from protocol.quic.interface import Lane, TransportCounters
from protocol.quic.limits import HandshakeGate
from protocol.quic.mesh_files import MAX_SEEDS, Membership
from protocol.quic.mutual import MutualQuicConnection, quic_configuration, self_test
from protocol.quic.router import Router
from protocol.quic.tcp_tunnel import open_tunnel
from protocol.quic.udp_socket import bind_udp

CONNECT_S = 3.0
TCP_AFTER_S = 1.0
"""UDP has this long for itself; then the same is tried through TCP as well (``tcp_tunnel``)."""
ANSWER_S = 5.0
LOOK_S = 0.1
"""How often a new attempt is looked for."""

_REFUSALS = {
    "unknown_or_used_token": "the inviter does not know this token, or it was used already: ask for a new one",
    "expired": "the token has expired: ask for a new one (`stagemesh invite`)",
    "bad_proof": "the inviter does not accept this token: copy it again, or ask for a new one",
    "busy": "the inviter cannot admit anybody now (its disk or its mesh is full): look at its log, then try again",
}


class InviterUnreachable(JoinError):  # noqa: N818 - it names the situation
    """Nobody answered at the token's addresses."""


class Joining:
    """One attempt over one address (a ``Conversation``). Ends with an answer or a reason in ``outcome``."""

    def __init__(self, carrier: QuicCarrier, token: JoinToken, identity: Identity, name: str) -> None:
        self.outcome: asyncio.Future[JoinAccepted | JoinRefused | str] = asyncio.get_running_loop().create_future()
        self._carrier = carrier
        self._token = token
        self._identity = identity
        self._name = name
        self.met = False
        """Whether the inviter itself answered (its key was pinned)."""

    def established(self, public_key: bytes | None) -> None:
        """Only the inviter named in the token hears the proof."""
        if public_key is None or node_id_of(public_key) != self._token.inviter:
            self._end("wrong_identity")
            return
        self.met = True
        self._carrier.trust()  # the inviter, named by the token: its answer lists the mesh
        proof = join_proof(
            verifier_of(self._token.secret),
            mesh_id=self._token.mesh_id,
            token_id=self._token.token_id,
            joiner=self._identity.node_id,
            inviter=self._token.inviter,
        )
        request = JoinRequest(
            token_id=self._token.token_id, proof=proof, name=self._name, successor=self._identity.successor
        )
        self._carrier.write(encode(request))

    def frame(self, raw: bytes, lane: Lane) -> None:
        """The answer; anything else ends the attempt."""
        try:
            message = decode(raw) if lane == "stream" else None
        except WireError as error:
            self._end(error.reason)
            return
        if isinstance(message, JoinAccepted | JoinRefused) and not self.outcome.done():
            self.outcome.set_result(message)
            self._carrier.shut("closed")
        else:
            self._end("unexpected_message")

    def broken(self, reason: str) -> None:
        """Not what this node speaks."""
        self._end(reason)

    def closed(self, reason: str) -> None:
        """Without an answer."""
        self._end(reason)

    def _end(self, reason: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(reason)
        self._carrier.shut("closed")


async def join(identity: Identity, token: JoinToken, name: str) -> Membership:
    """Redeem ``token`` for ``identity``. Raises ``JoinError`` in one line; nothing is stored here.

    All addresses of the token are tried at once, by UDP and a little later by TCP too; the inviter is known by its key
    whatever answers.
    """
    self_test()
    counters = TransportCounters()
    bound = _any_udp()
    router = Router(
        configuration=quic_configuration(identity, is_client=False, idle_timeout_s=ANSWER_S),
        accept=None,
        strangers=lambda: 0,
        strangers_max=1,
        gate=HandshakeGate(1),
        counters=counters,
        now_us=_now_us,
    )
    router.attach(bound)
    attempts: list[Joining] = []

    def attempt(where: SocketAddress) -> None:
        attempts.append(_attempt(router, where, token, identity, name))

    try:
        async with asyncio.TaskGroup() as tasks:
            detours: dict[SocketAddress, asyncio.Task[None]] = {}
            for address in token.addresses:
                for where in await _resolve(address, bound.family):
                    if where not in detours:
                        attempt(where)
                        detours[where] = tasks.create_task(_by_tcp(router, where, attempt), name=f"tcp to {address}")
            answer = await _first_answer(attempts, list(detours.values()))
            for attempted in attempts:
                attempted.closed("closed")
            await asyncio.sleep(0)
            for detour in detours.values():
                detour.cancel()
    finally:
        router.close()
    return _judge(answer, token, identity)


async def _by_tcp(router: Router, where: SocketAddress, attempt: Callable[[SocketAddress], None]) -> None:
    """The same attempt through TCP, after UDP had its time."""
    await asyncio.sleep(TCP_AFTER_S)
    try:
        tunnel = await open_tunnel(
            where[0].removeprefix("::ffff:") if "." in where[0] else where[0], where[1], CONNECT_S
        )
    except OSError:
        return
    attempt(tunnel.address)
    await router.serve_tunnel(tunnel)


def _attempt(router: Router, where: SocketAddress, token: JoinToken, identity: Identity, name: str) -> Joining:
    quic = MutualQuicConnection(configuration=quic_configuration(identity, is_client=True, idle_timeout_s=ANSWER_S))
    carrier = QuicCarrier(quic, send=router.send, shape=router.shape, now_us=_now_us, dialled=True)
    attempt = Joining(carrier, token, identity, name)
    carrier.conversation = attempt
    router.register(carrier, quic.host_cid)
    carrier.connect(where)
    return attempt


async def _first_answer(attempts: list[Joining], detours: list[asyncio.Task[None]]) -> JoinAccepted | JoinRefused | str:
    """The first real answer; else the most telling failure. ``attempts`` may grow while ``detours`` are under way."""
    deadline = time.monotonic() + CONNECT_S
    failures: set[str] = set()
    judged: set[Joining] = set()
    while len(judged) < len(attempts) or (not failures and not all(detour.done() for detour in detours)):
        if any(attempt.met for attempt in attempts):
            deadline = max(deadline, time.monotonic() + ANSWER_S - CONNECT_S)
        rest_s = deadline - time.monotonic()
        if rest_s <= 0:
            break
        waiting: list[asyncio.Future[Any]] = [each.outcome for each in attempts if each not in judged]
        waiting += [detour for detour in detours if not detour.done()]
        await asyncio.wait(waiting, timeout=min(rest_s, LOOK_S), return_when=asyncio.FIRST_COMPLETED)
        for attempt in attempts:
            if attempt.outcome.done() and attempt not in judged:
                judged.add(attempt)
                result = attempt.outcome.result()
                if not isinstance(result, str):
                    return result
                failures.add(result)
    return next((reason for reason in ("wrong_identity", "version") if reason in failures), "timeout")


def _judge(answer: JoinAccepted | JoinRefused | str, token: JoinToken, identity: Identity) -> Membership:
    where = ", ".join(token.addresses)
    if isinstance(answer, JoinRefused):
        raise JoinError(_REFUSALS[answer.reason])
    if answer == "wrong_identity":
        raise JoinError(
            f"the node at {where} is not the one that made this token: check the address, ask for a new token"
        )
    if answer == "version":
        raise JoinError(f"the node at {where} speaks a newer protocol: upgrade stagemesh on this machine")
    if isinstance(answer, str):
        raise InviterUnreachable(
            f"cannot reach the inviter at {where} within {CONNECT_S:.0f} s: check that `stagemesh run` runs there and that"
            " UDP or TCP passes (or invite again with --address host:port)"
        )
    membership = Membership(
        mesh_id=_mesh_of(answer, token),
        admissions=answer.admissions,
        seeds=tuple(dict.fromkeys(token.addresses + answer.seeds))[:MAX_SEEDS],
    )
    if identity.node_id not in membership.book():
        raise JoinError("the inviter's answer does not prove this node's admission: the inviter may be revoked itself")
    return membership


def _mesh_of(answer: JoinAccepted, token: JoinToken) -> MeshId:
    """The mesh that was joined: the token's, or nothing."""
    if answer.mesh_id != token.mesh_id:
        raise JoinError("the inviter answered for another mesh than the token's: ask for a new token")
    return MeshId(answer.mesh_id)


def _any_udp() -> socket.socket:
    """An ephemeral socket that reaches IPv4 and IPv6 where the machine has it."""
    try:
        return bind_udp("::", 0)
    except AddressError:
        return bind_udp("0.0.0.0", 0)  # noqa: S104 - an ephemeral port that accepts nothing


async def _resolve(address: str, family: socket.AddressFamily) -> list[SocketAddress]:
    """Every way to reach ``address`` from a socket of ``family``; empty when it is not known."""
    target = parse_address(address)
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)
    except (OSError, TimeoutError):
        return []
    ways = [for_socket(str(entry[4][0]), target.port, family) for entry in found]
    return list(dict.fromkeys(way for way in ways if way is not None))[:4]


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
