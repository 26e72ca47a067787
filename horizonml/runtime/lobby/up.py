"""Implements `horizonml up`: gathers devices at an address that they reach, and lets them train a job together."""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from horizonml.errors import HorizonError, JobError
from horizonml.files import scratch_folder
from horizonml.job.schema import Job
from horizonml.machine.host import NAME, seconds_up
from horizonml.machine.network import listen, route_to
from horizonml.machine.relay import PAIRING_ROOM, address_in, used
from horizonml.machine.signals import StopRequest, handling
from horizonml.rendezvous.device_messages import DeviceState, RunOutcome
from horizonml.rendezvous.devices import Device
from horizonml.rendezvous.discovery.multicast import usable
from horizonml.rendezvous.discovery.records import measure_gflops, this_device
from horizonml.rendezvous.pairing import Pairing
from horizonml.rendezvous.relay import OPEN_PORTS, Registration, registered, room_of
from horizonml.rendezvous.service import Service
from horizonml.rendezvous.shared_files import FileServer
from horizonml.runtime.lobby import terminal
from horizonml.runtime.lobby.offer import check_wanted, is_known, job_text, lineage_of, needed, note_lineage, offer
from horizonml.runtime.lobby.rank import Child, Progress, secret
from horizonml.runtime.lobby.view import View, rows, view
from horizonml.security.tls import server_context
from horizonml.security.token import Token
from horizonml.state.runfolder import foreign, in_use, make_run_folder
from horizonml.text import count, human_bytes, printable


def own_address(devices: list[Device], host: str) -> str:
    """Return the address of this device by which most of the others reach it."""
    if host not in ("", "0.0.0.0", "::"):  # noqa: S104
        return host
    found: Counter[str] = Counter()
    for device in devices:
        with suppress(OSError):
            found[route_to(device.host, 9)[0]] += 1
    if found:
        return found.most_common(1)[0][0]
    return next((address for interface in usable() for address in interface.ipv4), "127.0.0.1")


_LOOK_SECONDS = 0.1
_TOLD_SECONDS = 3.0  # in which the devices learn that the run is over
_BYE_SECONDS = 10.0  # in which they end


@dataclass(frozen=True)
class UpSettings:
    """What `horizonml up` was asked for."""

    job: Job
    token: Token | None  # None: whoever reaches the port may take part
    wanted: int | None = None  # devices with which training starts; None: it starts on Enter
    name: str | None = None  # of this device
    host: str = "0.0.0.0"  # noqa: S104  (the service is for other machines, and asks for the token)
    port: int = 29400
    take_part: bool = True
    share_data: bool = False
    fresh: bool = False
    page: bool = False  # whether somebody can start the run on its page
    relay: tuple[str, int] | None = None  # by which devices in other networks come


class Up:
    """One run of `horizonml up`."""

    def __init__(self, settings: UpSettings) -> None:
        """Check what can be checked before anybody comes. Raises HorizonError."""
        self._settings = settings
        self._folder = settings.job.run_folder
        self._lineage = lineage_of(self._folder, settings.fresh)
        self._offer = offer(settings.job, self._lineage)
        check_wanted(self._offer, settings.wanted)
        if settings.wanted is None and not settings.page and not terminal.is_there():
            raise JobError(
                "--workers: say with how many devices training starts, because nobody can press Enter here (with a "
                "token, --page lets you start it on its page)"
            )
        problem = in_use(self._folder, 0) if settings.take_part else None
        if problem is None and settings.fresh:
            problem = foreign(self._folder)
        if problem is not None:
            raise JobError(problem)
        files = _shared_files(settings)
        wanted = settings.wanted or self._offer.exactly
        self._own = this_device(measure=False)
        if settings.name is not None:
            self._own = replace(self._own, name=settings.name)
        self._devices = self._offer.devices(settings.take_part, wanted, files, self._own.torch.partition("+")[0])
        self._pairing = Pairing(settings.token) if settings.token is not None and not settings.token.is_own else None
        self._stop = StopRequest()
        self._child: Child | None = None
        self._measuring = threading.Thread(target=self._measure, name="speed", daemon=True)
        self._measuring.start()
        self._started = False

    def devices(self) -> list[dict[str, str]]:
        """Return who is there, as rows for people."""
        return rows(self._own, self._own_state(), self._devices.present())

    def start_now(self) -> str:
        """Start with the devices that are ready, as Enter does; return in words what happens."""
        self._started = True
        return f"training starts on {count(self._devices.ready(), 'device')}"

    def stop_now(self) -> str:
        """Stop as Ctrl-C does; return in words what happens."""
        self._stop.wanted = True
        return "the run is being stopped: all devices finish their step and save a checkpoint"

    def run(self) -> RunOutcome:
        """Gather devices, train, and return how it ended. Raises HorizonError."""
        settings = self._settings
        with ExitStack() as stack:
            stack.enter_context(handling(self._stop.note))
            scratch = stack.enter_context(scratch_folder())
            self._check_not_going_on()
            listener = stack.enter_context(listen(settings.host, settings.port))
            self._host, self._port = listener.getsockname()[:2]
            if settings.relay is not None:
                self._use_relay(stack, settings.relay)
            stack.enter_context(self._serving(listener))
            stack.enter_context(self._announced())
            self._measuring.join()  # the child would take the processor from it
            if settings.take_part:
                file = scratch / "job.yaml"
                file.write_text(job_text(self._offer.job))
                self._child = Child(file, settings.fresh)
                stack.callback(self._child.end)
            if not self._gather():
                self._end(RunOutcome.STOPPED, "it was stopped before the training began")
                return RunOutcome.STOPPED
            return self._train()

    def _use_relay(self, stack: ExitStack, at: tuple[str, int]) -> None:
        """Let devices come through a relay. Raises RendezvousError."""
        assert self._settings.token is not None
        OPEN_PORTS.update((self._settings.job.security.port, self._settings.job.security.port + 1))
        stack.enter_context(registered(at, room_of(self._settings.token)))
        if self._pairing is not None:
            stack.enter_context(Registration(at, PAIRING_ROOM, address_in(self._pairing.offer.number)))

    def _check_not_going_on(self) -> None:
        """Raise JobError if the training that this run would continue goes on on the other devices."""
        from horizonml.rendezvous.discovery.finding import going_on

        if not is_known(self._folder, self._lineage):
            return
        there = going_on(self._settings.token, self._lineage)
        if there is not None:
            raise JobError(
                f"{self._offer.name} goes on without this device, which had begun it: {printable(there.name)} at "
                f"{there.host}:{there.port} takes devices in. `horizonml join` here takes part in it again; to start "
                "over, stop it on the other devices first, or use --fresh"
            )

    @contextmanager
    def _serving(self, listener: socket.socket) -> Iterator[None]:
        token, over = self._settings.token, threading.Event()
        tls: ssl.SSLContext | None = server_context(token) if token is not None else None
        devices = self._devices
        service = Service(listener, tls, roster=devices.roster, handlers=devices.handlers(), strangers=self._pairing)
        thread = threading.Thread(target=service.run, args=(over.is_set,), name="rendezvous", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(5.0)

    @contextmanager
    def _announced(self) -> Iterator[None]:
        from horizonml.rendezvous.discovery.service import Announcement

        token, name = self._settings.token, self._settings.name
        token_id = token.id if token is not None else ""
        number = self._pairing.offer.number if self._pairing is not None else 0
        with Announcement(self._port, token_id, self._offer.name, name, host=self._host, pairing=number) as announced:
            if announced.problem is not None:
                where = f"horizonml join --peer ADDRESS:{self._port}"
                print(f"devices cannot find this one by themselves ({announced.problem}); use `{where}` there")
            yield

    def _gather(self) -> bool:
        """Wait for the devices, and return whether training is to start. Raises HorizonError."""
        wanted, files = self._devices.wanted, self._devices.files
        shown = view(self._own_state())
        shown.say(f"{self._offer.name}: `horizonml join` on other devices lets them take part (port {self._port})")
        if files is not None:
            left_out = f"; {count(files.left_out, 'link')} left out" if files.left_out else ""
            words = f"{count(files.files, 'file')} of data ({human_bytes(files.bytes)})"
            shown.say(f"{words} go to devices that accept them{left_out}")
        try:
            while not self._stop.wanted:
                loaded = self._child is None or self._child.loaded
                present = self._devices.ready() - (not loaded)
                shown.show(self._own, self._devices.present(), _hint(present, wanted) + self._offered_code())
                self._check_child()
                if terminal.typed(_LOOK_SECONDS) is not None:
                    self._started = True  # and never False, since the page may set it at any time
                if loaded and (self._started or (wanted is not None and present >= wanted)):
                    self._started = False
                    least = self._offer.least
                    if present >= least:
                        self._start(shown)
                        return True
                    shown.say(
                        f"the job needs at least {count(least, 'device')} (parallel.min_workers), and {present} "
                        f"{'is' if present == 1 else 'are'} ready"
                        if least > 1
                        else "no device is ready to train yet"
                    )
            return False
        finally:
            if self._pairing is not None:
                self._pairing.offer.open = False
            shown.close()

    def _offered_code(self) -> str:
        code = self._pairing.offer.code() if self._pairing is not None else None
        return f"; a device without the token joins by `horizonml join {code}`" if code is not None else ""

    def _measure(self) -> None:
        self._own = replace(self._own, gflops=measure_gflops())

    def _own_state(self) -> str:
        return "trains as rank 0" if self._settings.take_part else "does not train"

    def _check_child(self) -> None:
        """Raise HorizonError if this device's own process ended before it had a rank."""
        if self._child is None or (code := self._child.poll()) is None:
            return
        self._end(RunOutcome.FAILED, "the device that offers the job cannot train it")
        if code == 0:  # it has said why
            sys.stdout.flush()
            raise SystemExit(0)
        raise _failed(self._child.error(), code)

    def _start(self, shown: View) -> None:
        try:  # also if this device does not train: the devices know by the lineage that the next run continues this one
            make_run_folder(self._folder)
            note_lineage(self._folder, self._lineage)
        except OSError as error:
            raise JobError(f"cannot write to {self._folder.absolute()}: {error.strerror or error}") from error
        size = self._devices.start()
        self._began = time.time()
        ranked = {device.rank: device for device in self._devices.present() if device.rank is not None}
        shown.say(f"training starts on {count(size, 'device')}")
        for rank, device in sorted(ranked.items()):
            shown.say(f"rank {rank} is {printable(device.beat.device.name)} ({device.host})")
        self._progress = Progress(self._folder, 0)
        self._devices.progress = self._progress.now
        if self._child is not None:
            relay = used()
            own = relay.own if relay is not None else own_address(self._devices.present(), self._settings.host)
            address = f"{own}:{self._port}"
            token = self._settings.token
            env = {"RANK": "0", "WORLD_SIZE": str(size), "HORIZONML_RENDEZVOUS": address}
            self._child.begin(env | secret(token) | {NAME: self._own.name})

    def _train(self) -> RunOutcome:
        known = {device.beat.id: printable(device.beat.device.name) for device in self._devices.present()}
        measured = False
        while not self._stop.wanted:
            self._progress.look()
            if self._progress.first is not None and not measured:
                measured = True
                since, ago = self._progress.first - self._began, time.time() - self._progress.first
                words = f"{since:.1f} s after the start, {seconds_up() - ago:.1f} s after `horizonml up`"
                print(f"the first step was done {words}", file=sys.stderr, flush=True)
            known = self._tell(known)
            if self._child is not None and (code := self._child.poll()) is not None:
                if code != 0:
                    error = self._child.error()
                    train = any(device.rank is not None for device in self._devices.present())
                    if code < 0 and train and not self._stop.wanted:
                        again = "the other devices go on without this one, and `horizonml join` takes it in again"
                        raise _failed(f"{error}; {again}", code)
                    self._end(RunOutcome.FAILED, error.splitlines()[0] if error else "")
                    raise _failed(error, code)
                self._end(RunOutcome.COMPLETE, f"the result is on {self._own.name}")
                print(
                    f"{self._offer.name} is trained to the end: `horizonml report {self._folder}` shows how", flush=True
                )
                return RunOutcome.COMPLETE
            if self._child is None and self._all_done():
                self._end(RunOutcome.COMPLETE, "the result is on the device that had rank 0")
                print("the devices have trained the job to the end; the results are in their run folders", flush=True)
                return RunOutcome.COMPLETE
            time.sleep(_LOOK_SECONDS)
        self._end(RunOutcome.STOPPED, "it was stopped on the device that started it")
        return RunOutcome.STOPPED

    def _tell(self, known: dict[str, str]) -> dict[str, str]:
        """Say who has come and gone, and return who is there."""
        now = {device.beat.id: device for device in self._devices.present()}
        for id, device in now.items():
            name = printable(device.beat.device.name)
            if id not in known and device.rank is not None:
                known[id] = name
                print(f"{name} joins as rank {device.rank}", file=sys.stderr, flush=True)
            if device.beat.state is DeviceState.UNABLE and known.get(id) == name:
                known[id] = f"{name}, which cannot train ({printable(device.beat.words)}),"
        for id in known.keys() - now.keys():
            print(f"{known[id]} is gone", file=sys.stderr, flush=True)
        return {id: name for id, name in known.items() if id in now}

    def _all_done(self) -> bool:
        states = [device.beat.state for device in self._devices.present() if device.rank is not None]
        return DeviceState.DONE in states and DeviceState.TRAINING not in states

    def _end(self, outcome: RunOutcome, words: str = "") -> None:
        """Tell all devices that it is over, end this device's own rank, and wait a moment for theirs."""
        self._devices.end(outcome, printable(words, 180))
        deadline = time.monotonic() + _TOLD_SECONDS
        while not self._devices.all_told() and time.monotonic() < deadline and not self._stop.at_once:
            time.sleep(0.02)
        if self._child is not None:
            self._child.end(at_once=self._stop.at_once)
        deadline = time.monotonic() + _BYE_SECONDS
        while self._devices.present() and time.monotonic() < deadline and not self._stop.at_once:
            time.sleep(0.05)  # their ranks still need the service to end in order


def _hint(present: int, wanted: int | None) -> str:
    if wanted is not None:
        return f"ready: {present} of {count(wanted, 'device')}" + (
            "; Enter starts at once" if terminal.is_there() else ""
        )
    start = "press Enter to start" if terminal.is_there() else "start it on its page"
    return f"ready: {count(present, 'device')}; {start}"


def _shared_files(settings: UpSettings) -> FileServer | None:
    where = needed(settings.job)
    if where is not None and (settings.take_part or settings.share_data) and not where.path.exists():
        raise JobError(f"{where.field}: {where.path} does not exist")
    if not settings.share_data:
        return None
    if where is None:
        raise JobError("--share-data: this job's data lies in no file or folder of this device; leave the option out")
    return FileServer(where.path)


def _failed(text: str, code: int) -> HorizonError:
    error = HorizonError(text)
    error.exit_code = code if code > 0 else 1
    return error
