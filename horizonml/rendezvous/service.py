"""Serves the rendezvous, where the ranks of a job meet (see `meeting` for their side).

The service is its own process, so losing any rank loses no state. It alone judges who belongs together (see `roster`);
ranks only say what they are and ask for its verdict. Nothing but JSON travels, over TLS with the token's certificate on
both sides (see `security.tls`), and each request is checked before it changes anything. A rank names its join, a number
that it draws at random and that nobody else learns, and a connection speaks for one join only.

    join      {id, join: a fingerprint}    a rank asks to take part
    resume    {id, resume, beside}         a member of a group that runs reports on a new connection
    beat      {count, reached}             a sign of life; answered by the status, the verdict, and how the group ended
    withdraw  {}                           a rank that waits takes its join back
    leave     {leave: a farewell}          a member leaves its group, and says why
    unreached {ranks}                      a member does not reach these members of its group
    peers     {}                           what has become of the other members
    set, get  {key, value}, {keys}         the ranks of one generation exchange their addresses
    ask       {id, ask}                    a process without a rank number asks for one
    status    {}                           who is missing, how many run, and who was refused lately

Through `Keys`, the ranks of one generation exchange their addresses. Each key belongs to the rank that sets it first,
and no other may change it. What a rank can store is bounded.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from horizonml import __version__
from horizonml.rendezvous.members import Complete, Formed, Refused
from horizonml.rendezvous.messages import (
    MOST_KEY,
    Ask,
    Beat,
    BeatAnswer,
    Ended,
    Farewell,
    Fingerprint,
    GetKeys,
    GroupStatus,
    HeldBack,
    Join,
    JoinVerdict,
    Leave,
    Nothing,
    Number,
    Peers,
    Resume,
    Resumed,
    SetKey,
    Unreached,
)
from horizonml.rendezvous.roster import Over, Roster
from horizonml.rendezvous.roster import Verdict as Judgement
from horizonml.rendezvous.server import Answer, Peer, Server, Strangers
from horizonml.rendezvous.wire import MOST_ANSWER, Fields, fields_of, read
from horizonml.text import printable

MOST_VALUE = 190_000  # bytes, which fit a request in base64
_MOST_BYTES = 16 << 20  # of one rank's keys and values
_MOST_ALL = 128 << 20  # bytes of all ranks'
_OVERHEAD = 200  # bytes that a key takes beside its characters, of up to 4 bytes each, and its value


@dataclass
class Keys:
    """The keys of one generation."""

    _values: dict[str, tuple[int, bytes]] = field(default_factory=dict)  # each with its owner's join
    _bytes: dict[int, int] = field(default_factory=dict)  # of each owner
    _all: int = 0  # bytes

    def get(self, key: str) -> bytes | None:
        """Return a value, or None if nobody has set it."""
        found = self._values.get(key)
        return found[1] if found is not None else None

    def set(self, owner: int, key: str, value: bytes) -> None:
        """Set a key of this owner. Raises ValueError if it is another's, or if there is no room."""
        before = self._values.get(key)
        if before is not None and before[0] != owner:
            raise ValueError(f"the key {key!r} belongs to another rank")
        if len(key) > MOST_KEY or not key.isprintable():
            raise ValueError(f"a key has at most {MOST_KEY} printable characters")
        if len(value) > MOST_VALUE:
            raise ValueError(f"a value has at most {MOST_VALUE} bytes, not {len(value)}")
        more = len(value) - len(before[1]) if before is not None else len(value) + 4 * len(key) + _OVERHEAD
        size = self._bytes.get(owner, 0) + more
        if size > _MOST_BYTES or self._all + more > _MOST_ALL:
            raise ValueError(f"a rank's keys have at most {_MOST_BYTES} bytes, and those of all ranks {_MOST_ALL}")
        self._values[key], self._bytes[owner], self._all = (owner, value), size, self._all + more


_log = logging.getLogger(__name__)
_FIELDS = {one.name for one in dataclasses.fields(Fingerprint)}
_MOST_RELEASES = 16  # that are named
_LOOK_SECONDS = 0.25  # how often it is looked at who is silent
_TURN_SECONDS = 0.05
_AWAY_SECONDS = 1.0  # between two looks: the service was stopped, or its machine asleep, and no rank was silent
_MOST_REMEMBERED = 16384  # joins whose verdicts and farewells are kept
_MOST_GENERATIONS = 256  # whose members and ends are kept
_MOST_VALUES = MOST_ANSWER // 2  # bytes of the values that are asked for at once; base64 makes them longer
_GENERATIONS = 2  # whose keys are kept
_LONGEST_WAIT = 5.0  # seconds that a request for keys is held
SETTLE_SECONDS = 4.0  # in which a group that ran before the service was started anew reports


Handlers = Mapping[str, tuple[type[Any], Callable[[Peer, Any], Answer]]]  # with the message that each of them takes


def at_once(answer: Any = None) -> Answer:
    """Return what gives an answer that is known already: a message, fields, or nothing."""
    found = {} if answer is None else answer if isinstance(answer, dict) else fields_of(answer)
    return lambda: found


class Service:
    """Judges joins until it is stopped."""

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext | None = None, settle: float = 0.0,
        handlers: Handlers | None = None, roster: Roster | None = None, files: str = "",
        greeting: Callable[[], Fields] = dict, strangers: Strangers | None = None,
    ) -> None:  # fmt: skip
        """Serve on a listening socket, which the service takes over; `handlers` answer further kinds of requests.

        No first meeting is held for `settle` seconds: a group may run here that met at the service before this one.
        A service that was started with a job's `files` serves no rank that was started with others: those files have
        been replaced, so such a rank is refused, and a group that runs with them is asked to stop. Whoever connects is
        told what the `greeting` says, and those who show no token are answered by `strangers`, if that is given.
        """
        self._files = files
        self.moves = False  # whether the ranks go to another service, so that nothing is judged here any more
        self.port = int(listener.getsockname()[1])
        self._server = Server(listener, tls, self._handle, greeting, strangers)
        self._roster = roster or Roster(time.monotonic() + settle)
        self._over = 0  # the generation whose end was logged last
        self._releases = set[str]()  # with whose ranks not everything is shared
        self._status, self._held = GroupStatus(), dict[int, HeldBack]()
        self._changed = True
        self._verdicts: dict[int, Judgement] = {}
        self._farewells: dict[int, Farewell] = {}
        self._generation: dict[int, int] = {}  # that a join is, or was, a member of
        self._groups: dict[int, dict[int, int]] = {}  # the joins of a generation, as far as they are known, by rank
        self._beats: dict[int, int] = {}
        self._endings: dict[int, Ended] = {}
        self._keys: dict[int, Keys] = {}
        of_ranks: Handlers = {
            "join": (Join, self._join),
            "resume": (Resume, self._resume),
            "beat": (Beat, self._beat),
            "withdraw": (Nothing, self._withdraw),
            "leave": (Leave, self._leave),
            "unreached": (Unreached, self._unreached),
            "peers": (Nothing, self._peers),
            "set": (SetKey, self._set),
            "get": (GetKeys, self._get),
            "ask": (Ask, self._ask),
            "status": (Nothing, lambda peer, request: at_once(self._status_of(None))),
        }
        self._handlers = {**(handlers or {}), **of_ranks}

    @property
    def idle(self) -> bool:
        """Return whether nobody is connected."""
        return self._server.idle

    def run(self, stop: Callable[[], bool]) -> None:
        """Serve until `stop` says so."""
        looked = time.monotonic()
        try:
            while not stop():
                self._server.turn(_LOOK_SECONDS if self._server.idle else _TURN_SECONDS)
                now = time.monotonic()
                if self._changed or now - looked >= _LOOK_SECONDS:
                    if now - looked > _AWAY_SECONDS:
                        self._roster.slept(now - looked, now)
                    looked, self._changed = now, False
                    if not self.moves:
                        with self._roster.lock:
                            self._announce(now)
        finally:
            self._server.close()

    def _handle(self, peer: Peer, fields: Fields) -> Answer:
        found = self._handlers.get(str(fields.get("do")))
        if found is None:
            raise ValueError(f"the service knows no request {str(fields.get('do'))[:40]!r}")
        kind, handler = found
        self._check_release(fields.get("join", fields.get("resume")))
        with self._roster.lock:
            give = handler(peer, read(kind, fields))

        def answer() -> Fields | None:
            with self._roster.lock:
                return give()

        return answer

    def _check_release(self, said: object) -> None:
        """Say what a fingerprint of another release and this one do not share; raise ValueError if it is of this one.

        What is left out has its default then, and what is not known here is ignored.
        """
        if not isinstance(said, dict) or said.keys() == _FIELDS:
            return
        odd = ", ".join(printable(str(name), 40) for name in sorted(map(str, said.keys() ^ _FIELDS))[:20])
        code = printable(str(said.get("code")), 40)
        if code == __version__:
            raise ValueError(f"a rank of this release says all of what it is, and nothing else; see {odd}")
        if code not in self._releases and len(self._releases) < _MOST_RELEASES:
            self._releases.add(code)
            words = "a rank has HorizonML %s, and this service has %s: only one of them knows %s"
            _log.warning(words, code, __version__, odd)

    def _join(self, peer: Peer, request: Join) -> Answer:
        if "join" in peer.state:
            raise ValueError("this connection speaks for another join")
        one = request.join
        if self._is_replaced(one):
            self._bind(peer, request.id)
            words = "another job has replaced the one that this rank was started for, or is about to be replaced by it"
            self._keep(Refused([request.id], words, replaced=True))
            return at_once()
        self._roster.join(request.id, one, time.monotonic())
        self._bind(peer, request.id)
        _log.info("rank %d of %d joined from %s", one.rank, one.world_size, one.place)
        return at_once()

    def _resume(self, peer: Peer, request: Resume) -> Answer:
        number, one = request.id, request.resume
        if peer.state.get("join", number) != number:
            raise ValueError("this connection speaks for another join")
        if self._generation.get(number, one.generation) != one.generation:
            raise ValueError(f"its join is a member of generation {self._generation[number]}")
        if self._is_replaced(one):
            self._bind(peer, number)
            return at_once(Resumed(replaced=True))
        if number in self._farewells:  # it has left, or was declared lost; its next heartbeat is told so
            self._bind(peer, number)
            return at_once()
        try:
            taken = self._roster.resume(number, one, request.beside, time.monotonic())
        except Over as error:
            _log.warning("%s", error)  # the answer to its next heartbeat says so
            self._bind(peer, number)
            self._generation[number] = one.generation
            return at_once()
        self._bind(peer, number)
        if taken:
            self._generation[number] = one.generation
            self._groups.setdefault(one.generation, {})[one.rank] = number
            _log.info("rank %d runs in generation %d", one.rank, one.generation)
        return at_once()

    def _is_replaced(self, one: Fingerprint) -> bool:
        return bool(self._files and one.files) and self._files != one.files

    def _bind(self, peer: Peer, number: int) -> None:
        peer.state["join"], peer.stays, self._changed = number, True, True

    def _beat(self, peer: Peer, request: Beat) -> Answer:
        number, asked = _own(peer), time.monotonic()
        held = min(_LONGEST_WAIT, request.seconds) if request.verdict else 0.0
        self._beats[number] = request.count
        self._roster.beat(number, request.count, asked, request.dead)
        if request.reached:
            self._roster.reached(number)

        def answer() -> Fields | None:
            verdict = self._verdicts.get(number)
            if verdict is None and time.monotonic() - asked < held:
                return None
            told = _verdict_for(number, verdict) if verdict is not None and request.verdict else None
            found = fields_of(BeatAnswer(self._status_of(number), told, self._ended(number)))
            return {name: value for name, value in found.items() if value is not None}

        return answer

    def _status_of(self, number: int | None) -> GroupStatus:
        held = [
            replace(one, own=True) if join == number else replace(one, probe=()) for join, one in self._held.items()
        ]
        return replace(self._status, member=number in self._roster.running(), held=held, moves=self.moves)

    def _ended(self, number: int) -> Ended | None:
        ended = self._endings.get(self._generation.get(number, 0))
        return replace(ended, evicted=number in self._farewells) if ended is not None else None

    def _withdraw(self, peer: Peer, request: Nothing) -> Answer:
        number = _own(peer)
        if self._roster.withdraw(number):
            self._keep(Refused([number], "it has withdrawn"))
        return at_once()

    def _leave(self, peer: Peer, request: Leave) -> Answer:
        number = _own(peer)
        if self._roster.leave(number, request.leave, time.monotonic()):
            self._farewells[number] = request.leave
        self._changed = True
        return at_once()

    def _unreached(self, peer: Peer, request: Unreached) -> Answer:
        self._roster.unreached(_own(peer), request.ranks, time.monotonic())
        return at_once()

    def _peers(self, peer: Peer, request: Nothing) -> Answer:
        number = _own(peer)
        group = self._groups.get(self._generation.get(number, 0), {})
        gone = {rank: self._farewells[join] for rank, join in group.items() if join in self._farewells}
        return at_once(
            Peers(
                self._ended(number),
                gone,
                {rank: self._beats[join] for rank, join in group.items() if join in self._beats},
            )
        )

    def _set(self, peer: Peer, request: SetKey) -> Answer:
        try:
            self._keys_of(peer).set(_own(peer), request.key, base64.b64decode(request.value, validate=True))
        except binascii.Error:
            raise ValueError("a value must be in base64") from None
        return at_once()

    def _get(self, peer: Peer, request: GetKeys) -> Answer:
        keys, asked = self._keys_of(peer), time.monotonic()

        def answer() -> Fields | None:
            found = [keys.get(name) for name in request.keys]
            if sum(len(value) for value in found if value is not None) > _MOST_VALUES:
                raise ValueError(f"the values that are asked for have more than {_MOST_VALUES} bytes; ask for fewer")
            if None in found and time.monotonic() - asked < min(_LONGEST_WAIT, request.seconds):
                return None
            if request.check:
                return {"there": [value is not None for value in found]}
            return {"values": [base64.b64encode(value).decode() if value is not None else None for value in found]}

        return answer

    def _keys_of(self, peer: Peer) -> Keys:
        """Return the keys of the generation that a connection's join is a member of. Raises ValueError."""
        generation = self._generation.get(_own(peer))
        if generation is None:
            raise ValueError("only the members of a group that has formed exchange keys")
        if generation not in self._keys:
            if generation != self._roster.generation:
                raise ValueError(f"generation {generation} is over")
            self._keys[generation] = Keys()
            for older in list(self._keys)[:-_GENERATIONS]:
                del self._keys[older]
        return self._keys[generation]

    def _ask(self, peer: Peer, request: Ask) -> Answer:
        return at_once(Number(self._roster.give_number(request.ask, time.monotonic())))

    def _announce(self, now: float) -> None:
        """Decide what can be decided, keep it for those whom it concerns, and make the status."""
        roster = self._roster
        verdicts = roster.decide(now)
        self._farewells |= roster.farewells()
        for generation, ended in roster.endings().items():
            if generation in self._endings and not ended.lost:
                continue  # how it ended is known better
            known = "; ".join(map(str, ended.lost)) if generation == self._over else ended.reason
            _log.warning("generation %d is over: %s", generation, known)
            self._over = generation
            self._endings[generation] = ended
        for verdict in verdicts:
            if isinstance(verdict, Formed):
                _log.info("generation %d: %d ranks", verdict.generation, len(verdict.members))
            elif isinstance(verdict, Complete):
                _log.info("told %d late ranks that the job is complete", len(verdict.joins))
            else:
                _log.warning("refused: %s", verdict.reason)
            self._keep(verdict)
        self._held = roster.held_back(now)
        self._status = GroupStatus(
            roster.missing(),
            len(roster.running()),
            newcomers=roster.newcomers(now),
            refused=roster.refused(now),
            short=roster.short(now),
        )
        for kept in (self._verdicts, self._farewells, self._generation, self._beats):
            _forget(kept, _MOST_REMEMBERED)
        for kept_by_generation in (self._groups, self._endings):
            _forget(kept_by_generation, _MOST_GENERATIONS)

    def _keep(self, verdict: Judgement) -> None:
        for rank, number in enumerate(verdict.joins):
            self._verdicts[number] = verdict
            if isinstance(verdict, Formed):
                self._generation[number] = verdict.generation
                self._groups.setdefault(verdict.generation, {})[verdict.members[rank].rank] = number


def _verdict_for(number: int, verdict: Judgement) -> JoinVerdict:
    if isinstance(verdict, Formed):
        return JoinVerdict(verdict.generation, verdict.joins.index(number), verdict.members)
    if isinstance(verdict, Complete):
        return JoinVerdict(complete=True)
    return JoinVerdict(refused=verdict.reason, replaced=verdict.replaced)


def _own(peer: Peer) -> int:
    number = peer.state.get("join")
    if not isinstance(number, int):
        raise ValueError("this connection speaks for no rank; it has to join first")
    return number


def _forget(kept: dict[int, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
