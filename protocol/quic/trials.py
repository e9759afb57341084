"""Paths tried beside a standing connection: measured side by side, and taken only when they are really better.

Theory of operation. A mesh that met over Wi-Fi must find the cable, so the membership core now and then names another
address of a connected peer. That address is dialled *beside* the connection that counts, with ``trial`` in both greetings,
so that neither end takes it for a double. The end that dialled then measures both, turn by turn, ``ROUNDS`` echoes each,
and compares minima: the new path must be ``TAKE_FACTOR`` times faster and by ``TAKE_FLOOR_US`` (host scheduling makes that
much). If it is, it says ``PathTake``; the other end moves and answers the same; the answer, or the old connection ending
as "replaced", moves the first end. Otherwise the trial ends and nothing has changed.

Both ends agree because one end decides. At most one trial per pair: of two begun at once the one of the smaller id goes
on. A trial compares with one standing connection; when that is replaced meanwhile, the trial ends. There is no way back
and forth: the way back would have to be twice as fast as the path that was twice as fast.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.ids import NodeId
from protocol.messages import Hello, PathEcho, PathTake
from protocol.quic.interface import Lane
from protocol.quic.session import Session, State

ROUNDS = 8
ANSWERS_MIN = 5
"""A path that loses more than three echoes of eight is not taken."""
TAKE_FACTOR = 2
TAKE_FLOOR_US = 1_000
PATIENCE_US = 1_000_000
"""How long after the last round the missing answers are waited for."""


class Comparison:
    """Echoes on two paths and what they say. ``fresh`` is the path on trial."""

    def __init__(self) -> None:
        self.rounds = 0
        self._sent: dict[int, tuple[bool, int]] = {}
        self._last_us = 0
        self._rtts: dict[bool, list[int]] = {True: [], False: []}

    def next_round(self, now_us: int) -> tuple[PathEcho, PathEcho] | None:
        """The echoes for the standing and for the fresh path; None when there were ``ROUNDS``."""
        if self.rounds >= ROUNDS:
            return None
        standing, fresh = PathEcho(seq=2 * self.rounds), PathEcho(seq=2 * self.rounds + 1)
        self.rounds += 1
        self._last_us = now_us
        self._sent[standing.seq], self._sent[fresh.seq] = (False, now_us), (True, now_us)
        return standing, fresh

    def answered(self, seq: int, now_us: int, *, fresh: bool) -> None:
        """An answer came by that path; one that was not asked there counts for nothing."""
        sent = self._sent.get(seq)
        if sent is not None and sent[0] is fresh:
            del self._sent[seq]
            self._rtts[fresh].append(max(0, now_us - sent[1]))

    def over(self, now_us: int) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.rounds >= ROUNDS and (not self._sent or now_us - self._last_us >= PATIENCE_US)

    def better(self) -> bool:
        """Whether the fresh path is to be taken. A standing path that answered nothing at all loses to any that works."""
        fresh, standing = self._rtts[True], self._rtts[False]
        if len(fresh) < ANSWERS_MIN:
            return False
        if not standing:
            return True
        gain_us = min(standing) - min(fresh)
        return min(fresh) * TAKE_FACTOR <= min(standing) and gain_us >= TAKE_FLOOR_US


@dataclass(slots=True)
class _Trial:
    session: Session
    standing: Session
    comparison: Comparison = field(default_factory=Comparison)
    asked: bool = False


class Trials:
    """The trials of one node: at most one per peer. ``standing`` is the session that counts, ``promote`` makes another count."""

    def __init__(
        self,
        own: NodeId,
        *,
        standing: Callable[[NodeId], Session | None],
        promote: Callable[[Session], None],
        clock_us: Callable[[], int],
    ) -> None:
        self._own = own
        self._standing = standing
        self._promote = promote
        self._clock_us = clock_us
        self._trials: dict[NodeId, _Trial] = {}

    def __contains__(self, peer: object) -> bool:
        """Whether a path to that peer is being tried, by either end."""
        return peer in self._trials

    def begin(self, peer: NodeId, session: Session) -> None:
        """This node dials ``session`` beside the standing one. The caller has checked that there is one, and no trial."""
        standing = self._standing(peer)
        assert standing is not None
        assert peer not in self._trials
        self._trials[peer] = _Trial(session, standing)

    def judge(self, session: Session, hello: Hello) -> str:
        """A greeting on a trial: the empty string lets it in."""
        peer = session.peer
        assert peer is not None
        standing = self._standing(peer)
        if standing is None or standing.hello is None or standing.hello.instance != hello.instance:
            return "unknown_connection"
        held = self._trials.get(peer)
        if session.dialled:
            return "" if held is not None and held.session is session else "duplicate"
        if held is not None:
            if not held.session.dialled or self._own < peer:
                return "duplicate"
            held.session.end("duplicate")
        self._trials[peer] = _Trial(session, standing)
        return ""

    def on_echo(self, session: Session, echo: PathEcho, lane: Lane) -> None:
        """Answer an echo, or take the answer to one."""
        if not echo.answer:
            session.send(PathEcho(seq=echo.seq, answer=True), lane)
            return
        held = None if session.peer is None else self._trials.get(session.peer)
        if held is not None and session in {held.session, held.standing}:
            held.comparison.answered(echo.seq, self._clock_us(), fresh=session is held.session)

    def on_take(self, session: Session) -> bool:
        """The other end wants this connection to count, or agrees that it does. False: nobody here spoke of that."""
        peer = session.peer
        held = None if peer is None else self._trials.get(peer)
        if peer is None or held is None or held.session is not session or (session.dialled and not held.asked):
            return False
        del self._trials[peer]
        if self._standing(peer) is not held.standing:
            session.end("duplicate")
            return True
        if not session.dialled:
            session.send(PathTake(), "stream")
        self._promote(session)
        return True

    def heir(self, peer: NodeId, reason: str) -> Session | None:
        """The standing session of ``peer`` ended: the trial that the other end has moved to before its answer came."""
        held = self._trials.get(peer)
        if held is None or not held.asked or reason != "replaced" or held.session.state is not State.TRIAL:
            return None
        del self._trials[peer]
        return held.session

    def ended(self, session: Session) -> None:
        """A session is gone; if it was a trial, that is over."""
        for peer, held in list(self._trials.items()):
            if held.session is session:
                del self._trials[peer]

    def sweep(self) -> None:
        """Send the next echoes, judge what is over, drop what compares with the past. Call several times a second."""
        now_us = self._clock_us()
        for peer, held in list(self._trials.items()):
            if self._standing(peer) is not held.standing:
                held.session.end("duplicate")
            elif held.session.dialled and held.session.state is State.TRIAL and not held.asked:
                self._measure(held, now_us)

    def _measure(self, held: _Trial, now_us: int) -> None:
        echoes = held.comparison.next_round(now_us)
        if echoes is not None:
            held.standing.send(echoes[0], "datagram")
            held.session.send(echoes[1], "datagram")
        elif held.comparison.over(now_us) and held.comparison.better():
            held.asked = held.session.send(PathTake(), "stream")
        elif held.comparison.over(now_us):
            held.session.end("not_better")
