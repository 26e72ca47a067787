"""Runs a visit of this device to a lobby: prepares, waits for the start, trains, and leaves.

It also measures the link to the lobby: its delay, and its rates in both directions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto

from horizonml.errors import HorizonError, RendezvousError
from horizonml.files import scratch_folder
from horizonml.job.schema import Job
from horizonml.machine.host import NAME
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.checks import Fields
from horizonml.rendezvous.client import ServiceError
from horizonml.runtime.lobby.accept import confinement
from horizonml.runtime.lobby.child import Child, Progress
from horizonml.runtime.lobby.messages import (
    MOST_CHUNK,
    JoinSettings,
    Link,
    News,
    Outcome,
    Phase,
    Place,
    Standing,
    Voice,
    secret,
)
from horizonml.runtime.lobby.prepare import CalledAway, Preparation, take_folder
from horizonml.runtime.lobby.sharing import job_text
from horizonml.text import count, printable

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0  # for a lobby that does not answer
_FIRST_SECONDS = 10.0  # for its first answer
_OVER = "the run is over"
_OVER_SECONDS = 10.0  # for the news that a run is over, once this device's rank has ended
_LAST_LOOK_SECONDS = 65.0  # the same where it has ended well: rank 0 may wait until Prometheus has asked once more


class Ending(Enum):
    """How a visit to a lobby has ended."""

    OVER = auto()  # the run is
    LEFT = auto()  # as asked
    YIELDED = auto()  # to whoever uses this device
    AGAIN = auto()  # the lobby is another one by now: `horizonml up` was started anew


class Visit:
    """A visit to a lobby."""

    def __init__(self, settings: JoinSettings, stop: StopRequest, place: Place, voice: Voice, address: str) -> None:
        self._settings, self._stop, self._place, self._voice = settings, stop, place, voice
        self._address = address
        self._where = printable(place.name, 63)
        self._child: Child | None = None
        self._said = ""

    def run(self) -> Ending:
        """Prepare, wait for the start, train, and return how that ended. Raises HorizonError."""
        news = self._first_news()
        self._run = news.run
        print(f"{self._where} trains {printable(news.job)}; this device joins as the {_th(news.position)}", flush=True)
        with scratch_folder() as scratch:
            try:
                preparation = Preparation(self._settings, self._stop, self._voice, self._where)
                job, lineage = preparation.job()
                job = preparation.with_data(job)
                file = scratch / "job.yaml"
                file.write_text(job_text(job))
                self._child = Child(file, joins=True)
                self._voice.say(Standing.PREPARING, "loads PyTorch", link=measure(self._voice.ask))
                return self._stay(job, lineage)
            except CalledAway as away:
                return self._leave(str(away))
            except ServiceError as error:
                raise RendezvousError(f"{self._where} does not answer any more: {error}") from None
            except HorizonError as error:
                self._voice.say(Standing.UNABLE, str(error).splitlines()[0])
                time.sleep(1.0)  # so that it is seen there
                self._voice.leave(str(error).splitlines()[0])
                raise
            finally:
                if self._child is not None:
                    self._child.end(at_once=self._stop.at_once)

    def _first_news(self) -> News:
        """Return what the lobby says first. Raises RendezvousError."""
        deadline = time.monotonic() + _FIRST_SECONDS
        while self._voice.news is None and self._voice.lost_at is None and time.monotonic() < deadline:
            time.sleep(0.01)
        news = self._voice.news
        if news is None:
            raise RendezvousError(f"{self._where} does not let this device in: {self._voice.problem or 'no answer'}")
        if news.refused:
            raise RendezvousError(f"{self._where} does not let this device in: {news.words}")
        return news

    def _stay(self, job: Job, lineage: str) -> Ending:
        """Wait for the start and train. Raises HorizonError."""
        assert self._child is not None
        loaded = False
        while True:
            news, code = self._voice.news, self._child.poll()
            assert news is not None
            if code is not None:
                raise HorizonError(f"this device cannot train: {self._child.error()}")
            if not loaded and self._child.loaded:
                loaded = True
                self._voice.say(Standing.READY, run=self._run)
            if self._stop.wanted:
                return self._leave("")
            if reason := self._settings.busy():
                return self._leave(reason)
            if news.refused:
                raise RendezvousError(f"{self._where} does not let this device in: {news.words}")
            if news.run != self._run:
                return self._again()
            if news.phase is Phase.OVER:
                self._voice.leave(_OVER)
                return self._tell_end(news)
            if news.rank is not None and self._voice.lost_at is None:
                return self._train(job, lineage, news)
            self._say(self._lost() or (_waiting(news) if loaded else "loading PyTorch ..."))
            time.sleep(_LOOK_SECONDS)

    def _leave(self, reason: str) -> Ending:
        """Leave before the training: for a reason, or because this process was asked to stop."""
        self._voice.leave(reason or "was stopped")
        print(f"left, because {reason}" if reason else "left before the training began", flush=True)
        return Ending.YIELDED if reason else Ending.LEFT

    def _train(self, job: Job, lineage: str, news: News) -> Ending:
        """Train as a rank until the end. Raises HorizonError."""
        assert self._child is not None
        assert news.rank is not None
        take_folder(job, lineage)
        env = {"RANK": str(news.rank), "WORLD_SIZE": str(news.world_size), "HORIZONML_RENDEZVOUS": self._address}
        progress, name = Progress(job.run_folder, news.rank), self._settings.name
        env |= confinement(self._address, self._settings.allow_code) | ({NAME: name} if name else {})
        self._child.begin(env | secret(self._settings.token))
        self._voice.say(Standing.TRAINING, rank=news.rank)
        began = count(news.world_size or 0, "device")
        late = f"; the run began with {began}" if news.rank >= (news.world_size or 0) else f" of {news.world_size}"
        print(f"training begins: this device is rank {news.rank}{late}", flush=True)
        asked = ""
        while self._child.poll() is None:
            reason = "it was asked to" if self._stop.wanted else self._settings.busy()
            now = self._news_of_run()
            if reason and not asked:
                asked = reason
                print(f"this device leaves after the step, because {reason}", flush=True)
                self._child.ask_to_stop()
            over = now is None or (now.phase is Phase.OVER and now.outcome is not Outcome.COMPLETE)
            if over and not asked:  # or there is another run by now, and nobody will meet this one's ranks again
                asked = _OVER
                self._child.ask_to_stop()
            if self._stop.at_once:
                self._child.end(at_once=True)
            line = progress.look()
            if line is not None:
                print(line, flush=True)
            time.sleep(_LOOK_SECONDS)
        return self._after(asked, progress)

    def _after(self, asked: str, progress: Progress) -> Ending:
        """Return how a visit has ended whose rank has ended. Raises HorizonError."""
        assert self._child is not None
        code, lost = self._child.poll(), self._voice.lost_at is not None
        progress.look()
        done = f"after {count(progress.step, 'step')}" if progress.step else "before its first step"
        if asked and asked != _OVER:
            self._voice.leave(asked)
            print(f"this device has left the run {done}", flush=True)
            return Ending.LEFT if self._stop.wanted else Ending.YIELDED
        if code == 0:
            self._voice.say(Standing.DONE)
        deadline = time.monotonic() + (_LAST_LOOK_SECONDS if code == 0 else _OVER_SECONDS)
        while time.monotonic() < deadline and self._voice.lost_at is None and not self._stop.wanted:
            news = self._news_of_run()
            if news is None:
                return self._again()
            if news.phase is Phase.OVER:
                self._voice.leave(_OVER)
                return self._tell_end(news)
            time.sleep(_LOOK_SECONDS)
        if code == 0:
            print(f"this device's rank has ended {done}", flush=True)
            return Ending.OVER
        gone = f" ({self._where} does not answer any more)" if lost else ""
        raise HorizonError(f"this device's rank has failed{gone}: {self._child.error()}")

    def _news_of_run(self) -> News | None:
        """Return the latest news, or None if they are of another run than this device's."""
        news = self._voice.news
        return news if news is not None and news.run == self._run else None

    def _again(self) -> Ending:
        """Say that there is another run by now."""
        print(f"`horizonml up` was started anew on {self._where}", flush=True)
        return Ending.AGAIN

    def _tell_end(self, news: News) -> Ending:
        """Say how the run has ended. Raises HorizonError if it has failed."""
        match news.outcome:
            case Outcome.COMPLETE:
                print(f"{printable(news.job)} is trained to the end; {printable(news.words)}", flush=True)
            case Outcome.FAILED:
                raise HorizonError(f"the run has failed on {self._where}: {printable(news.words)}")
            case _:
                print(f"the run is over: {printable(news.words) or 'it was stopped'}", flush=True)
        return Ending.OVER

    def _say(self, text: str) -> None:
        """Say what is waited for, once."""
        if text != self._said:
            self._said = text
            print(text, flush=True)

    def _lost(self) -> str | None:
        """Return in words that the lobby does not answer, or None. Raises RendezvousError if it has not for long."""
        lost = self._voice.lost_at
        if lost is None:
            return None
        if time.monotonic() - lost > _PATIENCE_SECONDS:
            raise RendezvousError(
                f"{self._where} has not answered for {_PATIENCE_SECONDS:.0f} s: {self._voice.problem}"
            )
        return f"{self._where} does not answer any more; trying again for {_PATIENCE_SECONDS:.0f} s"


def _waiting(news: News) -> str:
    """Return what is waited for."""
    if news.words:
        return news.words
    if news.phase is Phase.STARTED:
        return "the others train already; waiting for a rank"
    wanted = f" of {news.wanted}" if news.wanted else ""
    return f"waiting for the start: {news.count}{wanted} devices are there"


def _th(number: int) -> str:
    """Return a number as a place in a row."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


_ROUNDS, _SECONDS = 8, 0.5  # of messages in each direction, and how long they take at most


def measure(ask: Callable[[Fields], Fields]) -> Link:
    """Return what messages to the lobby and back have shown.

    On a fast link that is what TLS and the two processors manage, so it is a lower bound; on a slow one it is the link.
    """
    delay = min(_timed(ask, "", 0) for _ in range(4))
    return Link(_rate(ask, "0" * MOST_CHUNK, 0, delay), _rate(ask, "", MOST_CHUNK, delay), delay)


def _rate(ask: Callable[[Fields], Fields], payload: str, back: int, delay: float) -> float:
    """Return the bytes per second of some messages, less the delay that each of them has anyway."""
    size = seconds = 0.0
    for _ in range(_ROUNDS):
        taken = _timed(ask, payload, back)
        size, seconds = size + MOST_CHUNK, seconds + max(taken - delay, taken / 10)
        if seconds > _SECONDS:
            break
    return size / seconds


def _timed(ask: Callable[[Fields], Fields], payload: str, back: int) -> float:
    """Return the seconds of one message and its reply."""
    begin = time.perf_counter()
    ask({"do": "echo", "payload": payload, "back": back})
    return time.perf_counter() - begin
