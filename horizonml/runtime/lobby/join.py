"""Implements `horizonml join`: finds a run, takes part in it, and leaves when it is over or on request."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from dataclasses import replace
from enum import Enum, auto

from horizonml.errors import HorizonError, RendezvousError
from horizonml.files import scratch_folder
from horizonml.job.schema import Job
from horizonml.machine.host import NAME
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.client import Client, Endpoint, ServiceError
from horizonml.rendezvous.device_messages import (
    DeviceBeat,
    DeviceInfo,
    DeviceState,
    JobOffer,
    Phase,
    RunOutcome,
    RunStatus,
)
from horizonml.rendezvous.devices import DeviceHeartbeat, measure_link
from horizonml.rendezvous.discovery.diagnosis import diagnose_peer, explain_clocks
from horizonml.rendezvous.discovery.finding import ServiceAddress
from horizonml.rendezvous.discovery.records import STANDBY_PORT, this_device
from horizonml.rendezvous.relay import OPEN_PORTS
from horizonml.runtime.lobby.offer import CalledAway, JoinPreparation, JoinSettings, confinement, job_text, take_folder
from horizonml.runtime.lobby.rank import Child, Progress, secret
from horizonml.runtime.lobby.view import device_words
from horizonml.security.tls import client_context
from horizonml.text import count, printable

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0  # for a service that does not answer
_FIRST_SECONDS = 10.0  # for its first answer
_OVER = "the run is over"
_OVER_SECONDS = 10.0  # to learn that a run is over, once this device's rank has ended
_LAST_LOOK_SECONDS = 65.0  # the same where it has ended well: rank 0 may wait until Prometheus has asked once more


class Ending(Enum):
    """How this device's part in a run has ended."""

    OVER = auto()  # the run is
    LEFT = auto()  # as asked
    YIELDED = auto()  # to whoever uses this device
    AGAIN = auto()  # `horizonml up` was started anew


class JoinSession:
    """This device's part in one run."""

    def __init__(
        self, settings: JoinSettings, stop: StopRequest, heartbeat: DeviceHeartbeat, name: str, address: str
    ) -> None:
        """`name` is what the device that offers the run is called, and `address` is host:port of its service."""
        self._settings, self._stop, self._heartbeat, self._address = settings, stop, heartbeat, address
        self._where = printable(name, 63)
        self._child: Child | None = None
        self._offer: JobOffer | None = None
        self._said = ""

    def run(self) -> Ending:
        """Prepare, wait for the start, train, and return how that ended. Raises HorizonError."""
        status = self._first_status()
        self._run = status.run
        print(
            f"{self._where} trains {printable(status.job)}; this device joins as the {_th(status.position)}", flush=True
        )
        with scratch_folder() as scratch:
            try:
                preparation = JoinPreparation(self._settings, self._stop, self._heartbeat, self._where)
                job, lineage = preparation.job()
                OPEN_PORTS.update((job.security.port, job.security.port + 1))  # where this device uses a relay
                self._offer = preparation.offer
                job = preparation.with_data(job)
                file = scratch / "job.yaml"
                file.write_text(job_text(job))
                self._child = Child(file, joins=True)
                self._heartbeat.say(DeviceState.PREPARING, "loads PyTorch", measure_link(self._heartbeat.ask))
                return self._stay(job, lineage)
            except CalledAway as away:
                return self._leave(str(away))
            except ServiceError as error:
                raise RendezvousError(f"{self._where} does not answer any more: {error}") from None
            except HorizonError as error:
                self._heartbeat.say(DeviceState.UNABLE, str(error).splitlines()[0])
                time.sleep(1.0)  # so that it is seen there
                self._heartbeat.leave(str(error).splitlines()[0])
                raise
            finally:
                if self._child is not None:
                    self._child.end(at_once=self._stop.at_once)

    def _first_status(self) -> RunStatus:
        deadline = time.monotonic() + _FIRST_SECONDS
        while self._heartbeat.status is None and self._heartbeat.lost_at is None and time.monotonic() < deadline:
            time.sleep(0.01)
        status = self._heartbeat.status
        if status is None:
            raise RendezvousError(
                f"{self._where} does not let this device in: {self._heartbeat.problem or 'no answer'}"
            )
        if status.refused:
            raise RendezvousError(f"{self._where} does not let this device in: {status.words}")
        return status

    def _stay(self, job: Job, lineage: str) -> Ending:
        assert self._child is not None
        loaded = False
        while True:
            status, code = self._heartbeat.status, self._child.poll()
            assert status is not None
            if code is not None:
                raise HorizonError(f"this device cannot train: {self._child.error()}")
            if not loaded and self._child.loaded:
                loaded = True
                self._heartbeat.say(DeviceState.READY, run=self._run)
            if self._stop.wanted:
                return self._leave("")
            if reason := self._settings.busy():
                return self._leave(reason)
            if status.refused:
                raise RendezvousError(f"{self._where} does not let this device in: {status.words}")
            if status.run != self._run:
                return self._again()
            if status.phase is Phase.OVER:
                self._heartbeat.leave(_OVER)
                return self._tell_end(status)
            if status.rank is not None and self._heartbeat.lost_at is None:
                return self._train(job, lineage, status)
            self._say(self._lost() or (_waiting(status) if loaded else "loading PyTorch ..."))
            time.sleep(_LOOK_SECONDS)

    def _leave(self, reason: str) -> Ending:
        """Leave before the training: for a reason, or because this process was asked to stop."""
        self._heartbeat.leave(reason or "was stopped")
        print(f"left, because {reason}" if reason else "left before the training began", flush=True)
        return Ending.YIELDED if reason else Ending.LEFT

    def _train(self, job: Job, lineage: str, status: RunStatus) -> Ending:
        assert self._child is not None
        assert status.rank is not None
        take_folder(job, lineage)
        env = {"RANK": str(status.rank), "WORLD_SIZE": str(status.world_size), "HORIZONML_RENDEZVOUS": self._address}
        progress, name = Progress(job.run_folder, status.rank), self._settings.name
        env |= confinement(self._address, self._settings.allow_code) | ({NAME: name} if name else {})
        self._child.begin(env | secret(self._settings.token), self._offer)
        self._heartbeat.say(DeviceState.TRAINING, rank=status.rank)
        began = count(status.world_size or 0, "device")
        late = (
            f"; the run began with {began}" if status.rank >= (status.world_size or 0) else f" of {status.world_size}"
        )
        print(f"training begins: this device is rank {status.rank}{late}", flush=True)
        asked = ""
        while self._child.poll() is None:
            reason = "it was asked to" if self._stop.wanted else self._settings.busy()
            now = self._status_of_run()
            if reason and not asked:
                asked = reason
                print(f"this device leaves after the step, because {reason}", flush=True)
                self._child.ask_to_stop()
            over = now is None or (now.phase is Phase.OVER and now.outcome is not RunOutcome.COMPLETE)
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
        """Return how this device's part has ended, once its rank has. Raises HorizonError."""
        assert self._child is not None
        code, lost = self._child.poll(), self._heartbeat.lost_at is not None
        progress.look()
        done = f"after {count(progress.step, 'step')}" if progress.step else "before its first step"
        if asked and asked != _OVER:
            self._heartbeat.leave(asked)
            print(f"this device has left the run {done}", flush=True)
            return Ending.LEFT if self._stop.wanted else Ending.YIELDED
        if code == 0:
            self._heartbeat.say(DeviceState.DONE)
        deadline = time.monotonic() + (_LAST_LOOK_SECONDS if code == 0 else _OVER_SECONDS)
        while time.monotonic() < deadline and self._heartbeat.lost_at is None and not self._stop.wanted:
            status = self._status_of_run()
            if status is None:
                return self._again()
            if status.phase is Phase.OVER:
                self._heartbeat.leave(_OVER)
                return self._tell_end(status)
            time.sleep(_LOOK_SECONDS)
        if code == 0:
            print(f"this device's rank has ended {done}", flush=True)
            return Ending.OVER
        gone = f" ({self._where} does not answer any more)" if lost else ""
        raise HorizonError(f"this device's rank has failed{gone}: {self._child.error()}")

    def _status_of_run(self) -> RunStatus | None:
        """Return the latest status, or None if they are of another run than this device's."""
        status = self._heartbeat.status
        return status if status is not None and status.run == self._run else None

    def _again(self) -> Ending:
        print(f"`horizonml up` was started anew on {self._where}", flush=True)
        return Ending.AGAIN

    def _tell_end(self, status: RunStatus) -> Ending:
        match status.outcome:
            case RunOutcome.COMPLETE:
                print(f"{printable(status.job)} is trained to the end; {printable(status.words)}", flush=True)
            case RunOutcome.FAILED:
                raise HorizonError(f"the run has failed on {self._where}: {printable(status.words)}")
            case _:
                print(f"the run is over: {printable(status.words) or 'it was stopped'}", flush=True)
        return Ending.OVER

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            print(text, flush=True)

    def _lost(self) -> str | None:
        """Return in words that the service does not answer, or None. Raises RendezvousError if it has not for long."""
        lost = self._heartbeat.lost_at
        if lost is None:
            return None
        if time.monotonic() - lost > _PATIENCE_SECONDS:
            raise RendezvousError(
                f"{self._where} has not answered for {_PATIENCE_SECONDS:.0f} s: {self._heartbeat.problem}"
            )
        return f"{self._where} does not answer any more; trying again for {_PATIENCE_SECONDS:.0f} s"


def _waiting(status: RunStatus) -> str:
    if status.words:
        return status.words
    if status.phase is Phase.STARTED:
        return "the others train already; waiting for a rank"
    wanted = f" of {status.wanted}" if status.wanted else ""
    return f"waiting for the start: {status.count}{wanted} devices are there"


def _th(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{ending}"


class Joiner:
    """This device, as it joins runs."""

    def __init__(self, settings: JoinSettings, stop: StopRequest) -> None:
        self._settings, self._stop = settings, stop
        self._id = secrets.token_hex(16)
        self._device: DeviceInfo | None = None
        self._compared = False  # the clocks
        self._describing = threading.Thread(target=self._describe, name="description", daemon=True)
        self._describing.start()  # while the run is looked for

    def join(self, place: ServiceAddress) -> Ending:
        """Take part in the run of a service, and return how that ended. Raises HorizonError."""
        self._describing.join()
        assert self._device is not None
        beat = DeviceBeat(self._id, self._device)
        try:
            heartbeat = DeviceHeartbeat(lambda: self._connect(place), beat)
        except ServiceError as error:
            host, token = place.hosts[0], self._settings.token
            reason = diagnose_peer(host, place.port, token) or f"{place.name} at {host}:{place.port}: {error}"
            raise RendezvousError(reason.removesuffix(".")) from None
        with heartbeat:
            ending = JoinSession(self._settings, self._stop, heartbeat, place.name, self._reached).run()
        return self.join(place) if ending is Ending.AGAIN else ending

    def _describe(self) -> None:
        own = this_device()
        self._device = replace(own, name=self._settings.name) if self._settings.name is not None else own
        print(f"this device offers {device_words(self._device)}", flush=True)

    def _connect(self, place: ServiceAddress) -> Client:
        """Connect to the first address that answers. Raises ServiceError."""
        token, problem = self._settings.token, None
        # Where no service listens, a rank may know where the others meet.
        for host, port in [(host, port) for port in (place.port, STANDBY_PORT) for host in place.hosts]:
            try:
                client = Endpoint(host, port, client_context(token) if token is not None else None).connect()
            except ServiceError as error:
                problem = problem or error
            else:
                self._reached = client.address
                self._compare_clocks(client)
                return client
        raise problem or ServiceError("it has no address")

    def _compare_clocks(self, client: Client) -> None:
        """Say once if the clock of this device or that of the service is wrong."""
        wrong = explain_clocks(client.clock_ahead)
        if wrong is not None and not self._compared:
            print(wrong, file=sys.stderr, flush=True)
        self._compared = True
