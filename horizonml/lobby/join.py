"""Implements `horizonml join`: finds a run, takes part in it, and leaves in peace."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

from horizonml.discovery.device import Device, this_device
from horizonml.discovery.peer import diagnose_peer
from horizonml.errors import DataError, HorizonError, JobError, RendezvousError
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.lobby import echo
from horizonml.lobby.accept import accept, check_lead, needed, with_data
from horizonml.lobby.child import Child
from horizonml.lobby.fetching import check_space, fetch, listing
from horizonml.lobby.messages import MOST_JOB, News, Outcome, Phase, Sign, Standing, identifier
from horizonml.lobby.offer import is_of, job_text, note_lineage
from horizonml.lobby.progress import Progress
from horizonml.lobby.up import secret
from horizonml.lobby.view import device_words
from horizonml.lobby.voice import Voice
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.checks import Fields, printable
from horizonml.rendezvous.client import Client, ServiceError, ServiceRefuses
from horizonml.security.tls import client_context
from horizonml.security.token import Token
from horizonml.state.runfolder import RunFolder, foreign, make_run_folder
from horizonml.text import count, human_bytes

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0  # for a lobby that does not answer
_FIRST_SECONDS = 10.0  # for its first answer
_OVER = "the run is over"
_OVER_SECONDS = 10.0  # for the news that a run is over, once this device's rank has ended well


@dataclass(frozen=True)
class Place:
    """Where a lobby is: what it is called, and the addresses to try."""

    name: str
    hosts: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Settings:
    """What `horizonml join` was asked for."""

    token: Token | None
    runs: Path = Path("runs")  # where this device keeps what runs leave
    accept_data: bool = False
    allow_code: bool = False
    name: str | None = None
    ask: Callable[[str], bool] = lambda question: False  # the person at the terminal, if there is one
    busy: Callable[[], str | None] = lambda: None  # why this device must not train now; None if it may


class Visit(Enum):
    """How a visit to a lobby has ended."""

    OVER = auto()  # the run is
    LEFT = auto()  # as asked
    YIELDED = auto()  # to whoever uses this device
    AGAIN = auto()  # the lobby is another one by now: `horizonml up` was started anew


class Joiner:
    """This device, as it joins runs."""

    def __init__(self, settings: Settings, stop: StopRequest) -> None:
        self._settings, self._stop = settings, stop
        self._id = secrets.token_hex(16)
        self._device: Device | None = None
        self._describing = threading.Thread(target=self._describe, name="description", daemon=True)
        self._describing.start()  # while the run is looked for

    def visit(self, place: Place) -> Visit:
        """Take part in the run of a lobby, and return how that ended. Raises HorizonError."""
        self._describing.join()
        assert self._device is not None
        sign = Sign(self._id, self._device)
        try:
            voice = Voice(lambda: self._connect(place), sign)
        except ServiceError as error:
            host, token = place.hosts[0], self._settings.token
            reason = diagnose_peer(host, place.port, token) or f"{place.name} at {host}:{place.port}: {error}"
            raise RendezvousError(reason.removesuffix(".")) from None
        with voice:
            visit = _Visit(self._settings, self._stop, place, voice, self._reached).run()
        return self.visit(place) if visit is Visit.AGAIN else visit

    def _describe(self) -> None:
        """Describe this device, which takes half a second."""
        own = this_device()
        self._device = replace(own, name=self._settings.name) if self._settings.name is not None else own
        print(f"this device gives {device_words(self._device)}", flush=True)

    def _connect(self, place: Place) -> Client:
        """Connect to the first address that answers. Raises ServiceError."""
        token, problem = self._settings.token, ServiceError("it has no address")
        for host in place.hosts:
            try:
                client = Client((host, place.port), client_context(token) if token is not None else None)
            except ServiceError as error:
                problem = error
            else:
                self._reached = f"[{host}]:{place.port}" if ":" in host else f"{host}:{place.port}"
                return client
        raise problem


class _Visit:
    """A visit to a lobby."""

    def __init__(self, settings: Settings, stop: StopRequest, place: Place, voice: Voice, address: str) -> None:
        self._settings, self._stop, self._place, self._voice = settings, stop, place, voice
        self._address = address
        self._where = printable(place.name, 63)
        self._child: Child | None = None
        self._said = ""

    def run(self) -> Visit:
        """Prepare, wait for the start, train, and return how that ended. Raises HorizonError."""
        news = self._first_news()
        self._run = news.run
        print(f"{self._where} trains {printable(news.job)}; this device is the {_th(news.position)} there", flush=True)
        with tempfile.TemporaryDirectory(prefix="horizonml-") as scratch:
            try:
                job, lineage = self._job()
                job = self._with_data(job)
                file = Path(scratch) / "job.yaml"
                file.write_text(job_text(job))
                self._child = Child(file, True)
                self._voice.say(Standing.PREPARING, "measures its link")
                self._voice.say(Standing.READY, run=self._run, link=echo.measure(self._voice.ask))
                return self._stay(job, lineage)
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

    def _job(self) -> tuple[Job, str]:
        """Return the job as this device runs it, and the lineage of the training. Raises JobError, ServiceError."""
        reply = self._voice.ask({"do": "job"})
        text, name = reply.get("job"), reply.get("name")
        if not isinstance(text, str) or len(text) > MOST_JOB or not isinstance(name, str):
            raise JobError(f"{self._where} sends no job")
        try:
            lineage = identifier(reply, "lineage")
        except ValueError as error:
            raise JobError(f"{self._where} sends no job: {error}") from None
        self._shared = reply.get("shared") is True
        source = f"the job of {self._where}"
        job = accept(text, source, self._settings.runs / "job", self._settings.allow_code)
        return accept(text, source, self._settings.runs / job.name, self._settings.allow_code), lineage

    def _with_data(self, job: Job) -> Job:
        """Return the job with its data where this device has it, fetched if need be. Raises HorizonError."""
        where = needed(job)
        if where is None:
            return job
        if where.path.exists():
            print(f"the data is here: {where.path.absolute()}", flush=True)
            return job
        if not self._shared:
            raise JobError(
                f"{where.field}: {where.path} is not on this device; copy the data to the same path here, or start "
                f"`horizonml up` with --share-data on {self._where}"
            )
        found = listing(self._ask, lambda done, size: self._wait(f"waits for the list of files ({_part(done, size)})"))
        folder = cache_folder() / "shared"
        check_space(found, folder)
        files = f"{count(len(found.items), 'file')} ({human_bytes(found.bytes)})"
        if not self._settings.accept_data and not self._settings.ask(
            f"{self._where} shares the data, {files}, which would be kept in {folder}. Fetch it?"
        ):
            raise JobError(
                f"{where.field}: {where.path} is not on this device; copy the data to the same path here, or say "
                f"`horizonml join --accept-data`, which fetches {files} from {self._where}"
            )
        print(f"fetching {files} from {self._where} ...", flush=True)

        def show(done: int) -> None:
            self._voice.say(Standing.PREPARING, f"fetches the data ({_part(done, found.bytes)})")
            if self._stop.wanted:
                raise JobError("stopped as asked, while the data was fetched")

        path = fetch(self._ask, found, folder, show)
        print(f"the data is in {path}", flush=True)
        return with_data(job, where, path)

    def _ask(self, request: Fields) -> Fields:
        """Ask for a part of the data. Raises DataError, ServiceError."""
        try:
            return self._voice.ask(request)
        except ServiceRefuses as error:
            raise DataError(f"{self._where} does not share the data: {error}") from None

    def _wait(self, words: str) -> None:
        """Wait a moment, and say for what. Raises JobError if this device is to leave."""
        self._voice.say(Standing.PREPARING, words)
        if self._stop.wanted:
            raise JobError("stopped as asked, while the data was awaited")
        time.sleep(0.2)

    def _stay(self, job: Job, lineage: str) -> Visit:
        """Wait for the start and train. Raises HorizonError."""
        assert self._child is not None
        while True:
            news, code = self._voice.news, self._child.poll()
            assert news is not None
            if code is not None:
                raise HorizonError(f"this device cannot train: {self._child.error()}")
            if self._stop.wanted:
                self._voice.leave("was stopped")
                print("left before the training began", flush=True)
                return Visit.LEFT
            if reason := self._settings.busy():
                self._voice.leave(reason)
                print(f"left, because {reason}", flush=True)
                return Visit.YIELDED
            if news.refused:
                raise RendezvousError(f"{self._where} does not let this device in: {news.words}")
            if news.run != self._run:
                return self._again()
            if news.phase is Phase.OVER:
                return self._tell_end(news)
            if news.rank is not None and self._voice.lost_at is None:
                return self._train(job, lineage, news)
            self._say(self._lost() or _waiting(news))
            time.sleep(_LOOK_SECONDS)

    def _train(self, job: Job, lineage: str, news: News) -> Visit:
        """Train as a rank until the end. Raises HorizonError."""
        assert self._child is not None
        assert news.rank is not None
        if news.rank == 0:
            check_lead(job)
        _take_folder(job, lineage)
        env = {"RANK": str(news.rank), "WORLD_SIZE": str(news.world_size), "HORIZONML_RENDEZVOUS": self._address}
        progress = Progress(job.run_folder, news.rank)
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

    def _after(self, asked: str, progress: Progress) -> Visit:
        """Return how a visit has ended whose rank has ended. Raises HorizonError."""
        assert self._child is not None
        code, lost = self._child.poll(), self._voice.lost_at is not None
        progress.look()
        done = f"after {count(progress.step, 'step')}" if progress.step else "before its first step"
        if asked and asked != _OVER:
            self._voice.leave(asked)
            print(f"this device has left the run {done}; the others go on", flush=True)
            return Visit.LEFT if self._stop.wanted else Visit.YIELDED
        if code == 0:
            self._voice.say(Standing.DONE)
        deadline = time.monotonic() + _OVER_SECONDS
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
            return Visit.OVER
        gone = f" ({self._where} does not answer any more)" if lost else ""
        raise HorizonError(f"this device's rank has failed{gone}: {self._child.error()}")

    def _news_of_run(self) -> News | None:
        """Return the latest news, or None if they are of another run than this device's."""
        news = self._voice.news
        return news if news is not None and news.run == self._run else None

    def _again(self) -> Visit:
        """Say that there is another run by now."""
        print(f"`horizonml up` was started anew on {self._where}", flush=True)
        return Visit.AGAIN

    def _tell_end(self, news: News) -> Visit:
        """Say how the run has ended. Raises HorizonError if it has failed."""
        match news.outcome:
            case Outcome.COMPLETE:
                print(f"{printable(news.job)} is trained to the end; {printable(news.words)}", flush=True)
            case Outcome.FAILED:
                raise HorizonError(f"the run has failed on {self._where}: {printable(news.words)}")
            case _:
                print(f"the run is over: {printable(news.words) or 'it was stopped'}", flush=True)
        return Visit.OVER

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


def _take_folder(job: Job, lineage: str) -> None:
    """Move away what an earlier training has left in a run's folder. Raises HorizonError."""
    folder = job.run_folder
    try:
        if not is_of(folder, lineage):
            if (problem := foreign(folder)) is not None:
                raise JobError(f"{problem.replace('--fresh', 'joining')} (--run-folder)")
            place = RunFolder(folder, 0, job.name, False)
            problem = place.set_aside()
            place.leave()
            if problem is not None:
                raise JobError(problem)
        make_run_folder(folder)
        note_lineage(folder, lineage)
    except OSError as error:
        raise JobError(f"cannot write to {folder.absolute()}: {error.strerror or error}; see --run-folder") from error


def _waiting(news: News) -> str:
    """Return what is waited for."""
    if news.words:
        return news.words
    if news.phase is Phase.STARTED:
        return "the others train already; waiting for a rank"
    wanted = f" of {news.wanted}" if news.wanted else ""
    return f"waiting for the start: {news.count}{wanted} devices are there"


def _part(done: int, size: int) -> str:
    return f"{100 * done / size:.0f}%" if size else "100%"


def _th(number: int) -> str:
    """Return a number as a place in a row."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"
