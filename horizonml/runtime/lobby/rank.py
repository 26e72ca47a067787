"""The process that becomes this device's rank: how it is started, ended and followed, and what it runs.

It loads PyTorch while devices still gather, which takes seconds on a small board, and waits for its orders on standard
input: first the job's file, then the rank. Nothing secret is on its command line.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizonml.machine.code import python_module
from horizonml.machine.network import METRICS, metrics_address
from horizonml.machine.signals import LAUNCHER, launcher_name
from horizonml.rendezvous.device_messages import JobOffer, Phase, RunProgress
from horizonml.rendezvous.wire import read
from horizonml.runtime.forkserver import start
from horizonml.runtime.process import ENDING, TOLD_ABOVE, run_and_exit, why_it_failed
from horizonml.security.token import INSECURE, TOKEN, Token
from horizonml.telemetry.log import Tail

if TYPE_CHECKING:
    from horizonml.job.schema import Job
    from horizonml.rendezvous.places import Lobby
    from horizonml.rendezvous.roster import Roster
    from horizonml.rendezvous.service import Handlers

STOP_SECONDS = 60.0  # for a rank that was asked to stop, to finish its step and save
_GRACE_SECONDS = 3.0  # for one that has no rank yet
_UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HORIZONML_JOIN")  # of a launcher above this process


def secret(token: Token | None) -> dict[str, str]:
    """Return the environment variable by which a rank may take part."""
    return {TOKEN: token.text} if token is not None else {INSECURE: "1"}


class Child:
    """The process of this device's rank."""

    def __init__(self, job: Path, fresh: bool = False, joins: bool = False) -> None:
        """Start it, so that it loads what it needs and waits.

        `fresh` says that the run starts over on all devices. A device that `joins` another one's run learns only at
        the start of the training whether its folder holds a part of that run, so it does not look there before.
        """
        self._ready, ready = os.pipe()  # says that it has loaded everything
        self._folder = tempfile.TemporaryDirectory(prefix="horizonml-")
        self._ending = Path(self._folder.name) / "ending"
        env = {name: value for name, value in os.environ.items() if name not in _UNSET}
        self._process = start(
            python_module("horizonml.runtime.lobby.rank"),
            env={**env, LAUNCHER: launcher_name(), ENDING: str(self._ending), TOLD_ABOVE: "1"},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[ready],
        )
        os.close(ready)
        self.began: float | None = None  # when it was given its rank, a time of `monotonic`
        self._said: deque[str] = deque(maxlen=20)
        self._reader = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._reader.start()
        self._order({"job": str(job), "fresh": fresh, "joins": joins, "ready": ready})

    def begin(self, env: Mapping[str, str], offer: JobOffer | None = None) -> None:
        """Let it train, as the environment says; new devices may come to it for the job that it was offered."""
        self.began = time.monotonic()
        self._order({"env": dict(env), "offer": asdict(offer) if offer is not None else None})

    @property
    def loaded(self) -> bool:
        """Return whether it has loaded everything and waits for its rank, or has ended."""
        return bool(select.select([self._ready], [], [], 0)[0])

    def poll(self) -> int | None:
        """Return its exit code once it has ended."""
        return self._process.poll()

    def error(self) -> str:
        """Return why it has ended, as far as it said so."""
        self._reader.join(2.0)
        return why_it_failed(self._process.returncode or 0, self._ending, list(self._said))

    def ask_to_stop(self) -> None:
        """Ask it to finish its step, save, hand over what it holds, and end."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, at_once: bool = False) -> None:
        """See to it that it has ended when this returns; a rank that trains has a minute to stop by itself."""
        self.ask_to_stop()
        seconds = 0.0 if at_once else STOP_SECONDS if self.began is not None else _GRACE_SECONDS
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(2.0)
        for stream in (self._process.stdin, self._process.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):  # what it was told at its end was never written
                    stream.close()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1
        self._folder.cleanup()

    def _order(self, values: Mapping[str, object]) -> None:
        """Send it a line; that it has ended already is found out by `poll`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(values).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def _pass_on(self) -> None:
        """Show what it says on standard error, and remember the last of it."""
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            self._said.append(line)
            print(line, file=sys.stderr, flush=True)


_LINE_SECONDS = 10.0
_MOST_BYTES = 4 << 20  # read at a time


class Progress:
    """Follows the records of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Follow what the rank writes into the run's folder from now on."""
        path = folder / f"rank-{rank}.jsonl"
        self._tail = Tail(path, path.stat().st_size if path.exists() else 0)
        self._told = 0.0
        self.first: float | None = None  # when the first step was done, in seconds since 1970
        self.step = 0
        self._accuracy: float | None = None

    def look(self) -> str | None:
        """Return a line about the training now and then, and None otherwise."""
        last: Any = None
        if self._tail.is_replaced:
            self._tail = Tail(self._tail.path)
        record: Any
        for _, record in self._tail.read(_MOST_BYTES):
            if record.get("kind") == "step":
                last = record
                self.first = self.first or float(record["time"])
            elif record.get("kind") == "evaluation":
                self._accuracy = record.get("accuracy")
        if last is None:
            return None
        now = time.monotonic()
        self.step = int(last["step"])
        if now - self._told < _LINE_SECONDS:
            return None
        self._told = now
        return f"step {self.step}, loss {last['loss']:.4f}, {last['batch'] / last['wall']:,.0f} samples/s"

    def now(self) -> RunProgress:
        """Return how far the training was at the last look."""
        if self.first is None:
            return RunProgress()
        return RunProgress(self.step, self._accuracy, max(0.0, time.time() - self.first))


def main() -> None:
    """Prepare, wait for the rank, and train. Raises HorizonError."""
    metrics = metrics_address(os.environ.get(METRICS))
    first = _order()
    if first is None:
        return
    from horizonml.job.jobfile import load

    job = load(Path(first["job"]))
    gc.disable()  # which would look for garbage among what is loaded, for a tenth of the time
    import horizonml.rendezvous.meeting
    import horizonml.runtime.worker
    import horizonml.telemetry.http  # noqa: F401  (what takes time is loaded now)
    from horizonml.runtime.launch import train_as_rank
    from horizonml.state.shards import completed

    gc.enable()

    if not (first["fresh"] or first["joins"]) and completed(job.run_folder / "checkpoints", job):
        print(f"{job.run_folder} is trained to the end already; --fresh starts over", flush=True)
        return
    with os.fdopen(first["ready"], "wb") as ready:
        ready.write(b"1")
    second = _order()
    if second is None:
        return
    os.environ.update(second["env"])
    from horizonml.rendezvous.identity import identify

    identity = identify(os.environ, job.parallel.max_workers)
    assert identity is not None
    offer = read(JobOffer, second["offer"]) if second["offer"] is not None else None
    lobby = _lobby(offer, job, identity.rank, identity.world_size) if offer is not None else None
    train_as_rank(job, identity, first["fresh"], metrics, stay=False, lobby=lobby)


def _lobby(offer: JobOffer, job: Job, rank: int, world_size: int) -> Lobby:
    """Return what lets new devices come to a run when the device that has offered it is gone."""
    from horizonml.rendezvous.devices import Devices
    from horizonml.rendezvous.discovery.service import Announcement
    from horizonml.rendezvous.places import Lobby
    from horizonml.runtime.command import token_of_rank

    token, most = token_of_rank(), job.parallel.max_workers or world_size
    followed = Progress(job.run_folder, rank)

    def progress() -> RunProgress:
        followed.look()
        return followed.now()

    def handlers(roster: Roster) -> Handlers:
        devices = Devices(
            offer.job, offer.name, job.digest(), offer.lineage, most, False,
            progress=progress, run=offer.run, phase=Phase.STARTED, world_size=world_size, roster=roster,
        )  # fmt: skip
        return devices.handlers()

    def announce(place: tuple[str, int]) -> Announcement:
        return Announcement(place[1], token.id if token is not None else "", offer.name, host=place[0])

    return Lobby(handlers, announce)


def _order() -> dict[str, Any] | None:
    """Return the next line of standard input, or None if whoever started this process is gone."""
    line = sys.stdin.readline()
    return dict(json.loads(line)) if line.endswith("\n") else None


if __name__ == "__main__":
    run_and_exit(main)
