"""Carries one connection in a thread of its own: an engine's socket on one side, TLS on the other, both directions.

OpenSSL and the sockets work outside of the interpreter's lock, so the node's event loop stays free while bytes flow. One
thread serves both directions, because OpenSSL's objects are not safe under two. Nothing here blocks but ``poll``.

Back-pressure is the sockets' own: nothing is read from one side before the other has taken what came before. Silence of
the peer is a fault only while this side listens: an engine that takes nothing for minutes is at work, and the peer's
signs of life stand behind what the engine has not taken.
"""

import contextlib
import math
import select
import socket
import ssl
import time
from dataclasses import dataclass

from protocol.errors import WireError
from protocol.quic.bulk import Observe
from protocol.quic.conditioner import ShapedLink
from stage_agent.tunnel.burst import Burst
from stage_agent.tunnel.inbound import Inbound
from stage_agent.tunnel.ledger import Fault
from stage_agent.tunnel.outbound import Outbound

_BROKEN = select.POLLERR | select.POLLNVAL
_FINE_S = 0.001
"""``poll``'s own grain: shorter waits are slept, a slice at a time, with a look at the sockets before each."""
_SLICE_S = 0.000_1


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a connection: times in seconds, the link's shape if it has one, who takes samples (any thread)."""

    keepalive_s: float
    idle_s: float
    link: ShapedLink | None
    observe: Observe


class Pump:
    """``run`` in a thread, ``stop`` from anywhere. The sockets stay open: whoever made the pump closes them after it."""

    def __init__(self, local: socket.socket, channel: ssl.SSLSocket, early: bytes, terms: Terms) -> None:
        self._local = local
        self._channel = channel
        self._early = early
        self._terms = terms
        self._bursts = Burst("send", terms.observe), Burst("receive", terms.observe)
        self._out = Outbound(local, channel, terms.link, self._bursts[0])
        self._in = Inbound(channel, local, self._bursts[1])
        self._stopped = False
        self._masks: dict[int, int] = {}
        self._poll = select.poll()

    @property
    def sent_bytes(self) -> int:
        """Bytes of the engine that the kernel has taken."""
        return self._out.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes that the engine's socket has taken."""
        return self._in.received_bytes

    def stop(self) -> None:
        """Break both sides; the thread ends at once. The sockets must still be open."""
        self._stopped = True
        for side in (self._local, self._channel):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(side, socket.SHUT_RDWR)

    def run(self) -> Fault | None:
        """Until both directions have ended (``None``), or the first fault."""
        try:
            self._carry()
        except TimeoutError:
            return "timeout"
        except WireError:
            return "protocol"
        except (OSError, EOFError):
            return "stopped" if self._stopped else "reset"
        finally:
            for burst in self._bursts:
                burst.end()
        return None

    def _carry(self) -> None:
        local, tls = self._local.fileno(), self._channel.fileno()
        out, into = self._out, self._in
        into.early(self._early)
        now_s = time.monotonic()
        while not (out.done and into.done):
            self._watch(local, select.POLLIN * out.takes(now_s) | select.POLLOUT * into.blocked)
            self._watch(tls, select.POLLIN * (not into.blocked and not into.ended) | select.POLLOUT * out.blocked)
            since_s, link_full = now_s, not (out.sealed or out.takes(now_s))
            ready = self._wait(now_s)
            now_s = time.monotonic()
            self._account(since_s, now_s, link_full=link_full)
            self._judge(ready, local, tls)
            if into.blocked:
                if ready.get(local, 0) & select.POLLOUT:
                    into.deliver()
                    into.heard_s = now_s  # what the peer said meanwhile stands behind what was just delivered
            elif ready.get(tls, 0) & (select.POLLIN | select.POLLHUP) and not into.ended:
                into.receive()
            out.push(now_s)
            if ready.get(local, 0) & (select.POLLIN | select.POLLHUP) and out.takes(now_s):
                out.take(now_s)
            self._keep_time(now_s)

    def _watch(self, descriptor: int, mask: int) -> None:
        if self._masks.get(descriptor) != mask:
            self._masks[descriptor] = mask
            self._poll.register(descriptor, mask)

    def _wait(self, now_s: float) -> dict[int, int]:
        terms, out = self._terms, self._out
        due_s = out.due_s(now_s)
        if due_s is not None:
            wait_s = max(0.0, due_s - now_s)
            ready = self._poll.poll(int(wait_s * 1_000))
            if not ready and wait_s < _FINE_S:
                time.sleep(min(wait_s, _SLICE_S))
            return dict(ready)
        wait_s = min(terms.keepalive_s, terms.idle_s) / 2
        silence_s = out.silence_s()
        if silence_s is not None:
            wait_s = min(wait_s, max(0.0, silence_s + terms.keepalive_s - now_s))
        return dict(self._poll.poll(math.ceil(wait_s * 1_000)))

    def _account(self, since_s: float, now_s: float, *, link_full: bool) -> None:
        waited_s = now_s - since_s
        self._bursts[0].waited(waited_s, now_s, for_link=link_full)
        self._bursts[1].waited(waited_s, now_s, for_link=self._in.mid_chunk and not self._in.blocked)

    def _judge(self, ready: dict[int, int], local: int, tls: int) -> None:
        """A side that is gone for good while nothing is asked of it would make ``poll`` return for ever."""
        if self._stopped or any(event & _BROKEN for event in ready.values()):
            raise ConnectionResetError
        if ready.get(tls, 0) & select.POLLHUP and not self._masks[tls] & select.POLLIN:
            raise ConnectionResetError
        if ready.get(local, 0) & select.POLLHUP and not self._masks[local]:
            self._poll.unregister(local)

    def _keep_time(self, now_s: float) -> None:
        terms, out, into = self._terms, self._out, self._in
        silence_s = out.silence_s()
        if silence_s is not None and now_s - silence_s >= terms.keepalive_s:
            out.keep_alive(now_s)
        if into.ended:
            if out.blocked and now_s - out.sent_s >= terms.idle_s:
                raise TimeoutError
        elif not into.blocked and now_s - into.heard_s >= terms.idle_s:
            raise TimeoutError
