"""Lets devices train for hours while faults of all kinds happen to them: `python -m benchmarks.faults soak --for 2h`.

Each device has a network namespace, a folder and a disk of its own (a file system in memory), and runs what a person
would start there: `horizonml up` on the first one, `horizonml join` on the others. What has ended is started again a
few seconds later, as a service manager would. A fault comes every 30 s on average, of a kind and for a device drawn at
random (see `KINDS`), once all devices train together again. Needs root and iptables.

At the end the faults stop, all devices must train together once more, and what it has cost is printed and written as
JSON and as a picture: steps that were repeated, hangs, goodput (the share of the time in which steps were taken at the
usual pace), and what has grown: memory, descriptors, threads, processes, files. Then as many ranks train the
same epochs on one machine without faults (500 of them at most), and the held-out losses of both are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.harness import machine
from benchmarks.outlive import ENDLESS, House
from horizonml.errors import HorizonError
from horizonml.files import write_atomically
from horizonml.machine.code import python_module
from horizonml.spec.base import duration
from horizonml.telemetry.log import Tail

DEVICES = 5
_DISK = "700m"  # of which 256 MiB stay free on a device that joins
_AGAIN_SECONDS = 3.0  # after which what has ended is started again
_HUNG_SECONDS = (
    120.0  # without a step on any device, or without all of them training together, although nothing is wrong
)
_SAMPLE_SECONDS = 30.0  # between two looks at memory and the like
_COMPARED_EPOCHS = 500
_DRAWN_SECONDS = 12.0  # at least, of a fault in the picture
_MOST_GROWTH = 1.25  # of memory and the like, from the first to the last quarter
_NOTICED_SECONDS = 5.0  # after a fault, within which the others notice it
_QUIET_SECONDS = 30.0  # without faults, at the beginning (for the usual pace) and at the end


@dataclass(frozen=True)
class Fault:
    """What happened to which devices, when (Unix time), and for how many seconds."""

    kind: str
    devices: list[int]
    time: float
    seconds: float


@dataclass
class Trace:
    """What a device has recorded so far, whichever rank it has had."""

    folder: Path
    times: list[float] = field(default_factory=list)  # when its steps ended
    steps: Counter[int] = field(default_factory=Counter)
    size: int = 0  # of its last group
    losses: dict[int, float] = field(default_factory=dict)  # on held-out data, by epoch
    _tails: dict[Path, Tail] = field(default_factory=dict)

    def read(self) -> None:
        """Read what was added."""
        for path in self.folder.glob("runs/digits/rank-*.jsonl"):
            for when, record in self._tails.setdefault(path, Tail(path)).read():
                if record["kind"] == "step":
                    self.times.append(when)
                    self.steps[int(str(record["step"]))] += 1
                elif record["kind"] == "run":
                    self.size = int(str(record["world_size"]))
                elif record["kind"] == "evaluation":
                    self.losses[int(str(record["epoch"]))] = float(str(record["loss"]))

    @property
    def last(self) -> float:
        """When its newest step ended."""
        return self.times[-1] if self.times else 0.0


class Soak(House):
    """Devices that start what has ended again, and to which faults can be done."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.on: set[int] = set(range(DEVICES))  # the devices that are meant to run
        self._ended: dict[int, float] = {}
        self._draw = random.Random(seed)
        self.current: dict[int, subprocess.Popen[bytes]] = {}
        for device in range(DEVICES + 1):
            home = folder / f"device-{device}"
            home.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(home)], check=True)
        super().__init__(DEVICES + 1, folder, DEVICES)
        self.traces = {device: Trace(self.home(device)) for device in range(DEVICES + 1)}

    def start(self, device: int, words: list[str], again: bool = True) -> None:
        """Start a command of HorizonML on a device."""
        super().start(device, words, True)
        self.current[device] = self.processes[-1]

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        for device in range(DEVICES + 1):
            subprocess.run(["umount", "-l", str(self.home(device))], check=False)

    def look(self) -> None:
        """Read what devices have recorded, and start again what has ended."""
        for device, trace in self.traces.items():
            trace.read()
            if device in self.on and self.current[device].poll() is not None:
                since = self._ended.setdefault(device, time.monotonic())
                if time.monotonic() - since > _AGAIN_SECONDS:
                    del self._ended[device]
                    self.join(device)

    def is_whole(self) -> bool:
        """Whether all devices that are on train together."""
        now = time.time()
        return all(self.traces[d].size == len(self.on) and now - self.traces[d].last < 5.0 for d in self.on)

    def processes_of(self, device: int) -> list[psutil.Process]:
        """The processes of a device; the largest first, which is its rank."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.cwd() == str(self.home(device)):
                    found.append((process.memory_info().rss, process))
        return [process for _, process in sorted(found, key=lambda one: -one[0])]

    def pass_time(self, seconds: float) -> None:
        """Go on looking for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.look()
            time.sleep(min(0.5, left))

    # Each fault returns once it is over; `device` is drawn.

    def kill(self, device: int) -> None:
        """kill -9 of its rank."""
        self._signal(device, signal.SIGKILL)

    def stop(self, device: int) -> None:
        """SIGSTOP of its rank for 2 to 60 s, then SIGCONT."""
        self._signal(device, signal.SIGSTOP)
        self.pass_time(self._draw.uniform(2, 60))
        self._signal(device, signal.SIGCONT)

    def service(self, device: int) -> None:
        """kill -9 of what was started on the first device: `up` with its service, or later `join`."""
        self.current[0].kill()

    def machine(self, device: int) -> None:
        """kill -9 of all processes of the first device, which starts again after 10 to 30 s."""
        self.on.discard(0)
        for process in self.processes_of(0):
            with suppress(psutil.Error):
                process.kill()
        self.pass_time(self._draw.uniform(10, 30))
        self.on.add(0)

    def two(self, device: int) -> None:
        """kill -9 of two ranks at once."""
        self._signal(device, signal.SIGKILL)
        self._signal((device + 1) % DEVICES, signal.SIGKILL)

    def cable(self, device: int) -> None:
        """Its cable is pulled for 1 to 30 s."""
        self.networks.cut(device)
        self.pass_time(self._draw.uniform(1, 30))
        self.networks.mend(device)

    def one_way(self, device: int) -> None:
        """Nothing that it sends arrives, for 1 to 30 s."""
        self._drop(device, "", self._draw.uniform(1, 30))

    def lossy(self, device: int) -> None:
        """A tenth of what it sends is lost, for 30 s."""
        self._drop(device, "-m statistic --mode random --probability 0.1", 30.0)

    def full(self, device: int) -> None:
        """Its disk is full for a minute."""
        filler = self.home(device) / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"0" * (1 << 20))
        self.pass_time(60.0)
        filler.unlink()

    def newcomer(self, device: int) -> None:
        """One more device joins, and leaves again 20 s later."""
        self.join(DEVICES)
        self.on.add(DEVICES)
        self.pass_time(20.0)
        self.on.discard(DEVICES)
        self.current[DEVICES].terminate()

    def leave(self, device: int) -> None:
        """It is asked to stop (SIGTERM), as when its machine is drained, and starts again after 5 to 20 s."""
        self.on.discard(device)
        self.current[device].terminate()
        self.pass_time(self._draw.uniform(5, 20))
        self.on.add(device)

    def draw(self) -> Fault:
        """Do a fault to a device, and return which it was."""
        kind, device = self._draw.choice(list(KINDS)), self._draw.randrange(DEVICES)
        began = time.time()
        KINDS[kind](self, device)
        hit = {"service": [0], "machine": [0], "two": [device, (device + 1) % DEVICES], "newcomer": [DEVICES]}
        return Fault(kind, hit.get(kind, [device]), began, time.time() - began)

    def pause_between(self, mean: float) -> float:
        """Seconds until the next fault."""
        return min(4 * mean, self._draw.expovariate(1 / mean))

    def _signal(self, device: int, number: signal.Signals) -> None:
        with suppress(psutil.Error, IndexError):
            self.processes_of(device)[0].send_signal(number)

    def _drop(self, device: int, which: str, seconds: float) -> None:
        """Drop packets that a device sends, for so long."""
        for action in ("-A", "-D"):
            words = f"iptables {action} OUTPUT -o cable {which} -j DROP"
            subprocess.run(self.networks.at_rank(device, words.split()), check=True)
            if action == "-A":
                self.pass_time(seconds)


KINDS: dict[str, Callable[[Soak, int], None]] = {
    "kill": Soak.kill,
    "stop": Soak.stop,
    "service": Soak.service,
    "machine": Soak.machine,
    "two": Soak.two,
    "cable": Soak.cable,
    "one-way loss": Soak.one_way,
    "10% loss": Soak.lossy,
    "disk full": Soak.full,
    "join": Soak.newcomer,
    "leave": Soak.leave,
}


def sizes_of(soak: Soak) -> dict[str, float]:
    """What may grow, over all devices that are on."""
    found: Counter[str] = Counter()
    for device in range(DEVICES):
        for process in soak.processes_of(device):
            with suppress(psutil.Error):
                found["memory_mb"] += process.memory_info().rss / 1e6
                found["descriptors"] += process.num_fds()
                found["threads"] += process.num_threads()
                found["processes"] += 1
        # A device keeps three small files for each rank that it has been, of which there are few, and its newest two
        # checkpoints, which it does not have yet when the soak begins.
        names = (path.relative_to(soak.home(device)).parts for path in soak.home(device).rglob("*"))
        found["files"] += sum(not any(part.startswith(("rank-", "step-")) for part in parts) for parts in names)
    return dict(found)


@dataclass(frozen=True)
class Result:
    """What a soak has cost."""

    begin: float  # Unix time
    seconds: float
    faults: list[Fault]
    kinds: dict[str, int]
    hangs: list[str]
    steps: int
    repeated: int  # steps that some device has recorded more than once
    goodput: float
    usual_seconds: float  # a step without faults
    gaps: list[float]  # the longest times without a step on any device
    growth: dict[str, tuple[float, float]]  # the median over the first and the last quarter
    samples: list[dict[str, float]]
    losses: list[tuple[int, float, float]]  # epoch, its held-out loss, and that of a run without faults
    machine: str


def soak(
    seconds: float, every: float, seed: int, folder: Path, say: Callable[[str], None], keep: Callable[[Result], None]
) -> Result:
    """Run, and return what it has cost; `keep` gets it before the run without faults, with which it is compared.

    Raises HorizonError if the devices never train together.
    """
    faults, hangs, samples = list[Fault](), list[str](), list[dict[str, float]]()
    with Soak(folder, seed) as house:
        _await_whole(house, "at the beginning")
        house.pass_time(_QUIET_SECONDS)
        begin = time.time()
        usual = statistics.median(b - a for a, b in pairwise(house.traces[1].times[-200:]))
        next_sample, next_fault = 0.0, time.monotonic() + house.pause_between(every)
        while time.time() - begin < seconds:
            house.pass_time(max(0.5, min(5.0, next_fault - time.monotonic())))
            if time.monotonic() > next_sample and house.is_whole():
                samples.append({"time": time.time() - begin, **sizes_of(house)})
                next_sample = time.monotonic() + _SAMPLE_SECONDS
            if time.monotonic() >= next_fault:
                fault = house.draw()
                faults.append(fault)
                recovered = _await_whole(house, f"after {fault.kind} on {fault.devices}", hangs)
                say(
                    f"{time.time() - begin:6.0f} s: {fault.kind} on {fault.devices} for {fault.seconds:.0f} s; all "
                    f"train together {recovered:.1f} s later"
                )
                next_fault = time.monotonic() + house.pause_between(every)
        end = time.time()
        house.pass_time(_QUIET_SECONDS)
        _await_whole(house, "at the end", hangs)
        found = _judge(house, faults, hangs, samples, (begin, end), usual)
    losses = dict(sorted(pair for trace in house.traces.values() for pair in trace.losses.items()))
    keep(found)  # before anything else can go wrong
    return replace(found, losses=_compared(losses))


def _await_whole(house: Soak, when: str, hangs: list[str] | None = None) -> float:
    begin = time.monotonic()
    house.pass_time(_NOTICED_SECONDS)
    while not house.is_whole():
        house.pass_time(0.5)
        if time.monotonic() - begin > _HUNG_SECONDS:
            about = {device: (trace.size, round(time.time() - trace.last)) for device, trace in house.traces.items()}
            words = f"{when}: not all train together within {_HUNG_SECONDS:.0f} s (group and last step: {about})"
            if hangs is None:
                raise HorizonError(words)
            hangs.append(words)
            break
    return time.monotonic() - begin


def _judge(
    house: Soak,
    faults: list[Fault],
    hangs: list[str],
    samples: list[dict[str, float]],
    span: tuple[float, float],
    usual: float,
) -> Result:
    """Sum up what the devices have recorded."""
    begin, end = span
    times = sorted(t for trace in house.traces.values() for t in trace.times if begin <= t <= end)
    gaps = sorted((b - a for a, b in pairwise([begin, *times, end])), reverse=True)
    stalled = sum(gap - usual for gap in gaps if gap > 3 * usual)
    steps = set[int]().union(*(trace.steps for trace in house.traces.values()))
    repeated = max(sum(count - 1 for count in trace.steps.values()) for trace in house.traces.values())
    quarter = max(1, len(samples) // 4)
    growth = {
        name: (
            statistics.median(one[name] for one in samples[:quarter]),
            statistics.median(one[name] for one in samples[-quarter:]),
        )
        for name in (samples[0] if samples else {})
        if name != "time"
    }
    kinds = dict(Counter(fault.kind for fault in faults))
    goodput = 1 - stalled / (end - begin)
    return Result(
        begin,
        end - begin,
        faults,
        kinds,
        hangs,
        len(steps),
        repeated,
        goodput,
        usual,
        gaps[:20],
        growth,
        samples,
        [],
        machine(),
    )


def _compared(losses: dict[int, float]) -> list[tuple[int, float, float]]:
    """Train as many epochs without faults, and return the held-out losses of both after some of them."""
    epochs = min(max(losses), _COMPARED_EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "digits", "--workers", str(DEVICES), *ENDLESS]  # the same schedule of the learning rate
        process = subprocess.Popen(python_module("horizonml", *words), cwd=folder, stdout=subprocess.DEVNULL)
        alone = Trace(Path(folder))
        try:
            while epochs not in alone.losses and process.poll() is None:
                time.sleep(0.5)
                alone.read()
        finally:
            process.terminate()
            process.wait()
        if epochs not in alone.losses:
            raise HorizonError(f"a run without faults has ended with code {process.returncode}")
    every = max(1, epochs // 200)
    return [(epoch, losses[epoch], alone.losses[epoch]) for epoch in range(every, epochs + 1, every) if epoch in losses]


def draw(result: Result, path: Path) -> None:
    """Draw the faults and what may grow, over time."""
    import matplotlib.pyplot as plt

    begin = result.begin
    figure, (above, below) = plt.subplots(2, 1, figsize=(11, 7), sharex=True, constrained_layout=True)
    names = list(KINDS)
    for fault in result.faults:
        row = names.index(fault.kind)
        ends = [(fault.time - begin) / 60, (fault.time - begin + max(_DRAWN_SECONDS, fault.seconds)) / 60]
        above.plot(ends, [row, row], lw=6, color=f"C{row}", solid_capstyle="butt")
    above.set_yticks(range(len(names)), names)
    above.set_title(f"{len(result.faults)} faults in {result.seconds / 60:.0f} min: goodput {result.goodput:.1%}")
    minutes = [one["time"] / 60 for one in result.samples]
    for name in result.growth:
        first = result.samples[0][name] or 1.0
        below.plot(minutes, [one[name] / first for one in result.samples], label=name.replace("_mb", ""))
    below.set_xlabel("minutes")
    below.set_ylabel("relative to the beginning")
    below.set_ylim(bottom=0)
    below.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """Run a soak, and write what it has found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--for", dest="seconds", default="10m", help="how long, such as 2h (default: 10m)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between faults, on average (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="which faults are drawn")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measured"))
    parser.add_argument("--folder", type=Path, help="where devices keep runs and logs (default: a temporary folder)")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = options.folder or Path(scratch)
        seconds = duration(options.seconds, "--for")

        def keep(result: Result) -> None:
            write_atomically(options.out / "soak.json", (json.dumps(asdict(result), indent=1) + "\n").encode())
            draw(result, options.out / "soak.png")

        result = soak(seconds, options.every, options.seed, folder, lambda text: print(text, flush=True), keep)
    keep(result)
    print(
        f"{len(result.faults)} faults in {result.seconds:.0f} s: {result.steps:,} steps, {result.repeated} repeated, "
        f"{len(result.hangs)} hangs, goodput {result.goodput:.1%}; longest without a step: {result.gaps[0]:.1f} s"
    )
    failed = bool(result.hangs or result.repeated)
    for name, (before, after) in result.growth.items():
        print(f"  {name}: {before:,.0f} at first, {after:,.0f} at the end")
        failed |= after > _MOST_GROWTH * before
    if result.losses:
        apart = [abs(ours - alone) for _, ours, alone in result.losses]
        epoch, ours, alone = result.losses[-1]
        print(
            f"  held-out loss after epoch {epoch:,}: {ours:.4f}, {alone:.4f} without faults; apart in the median of "
            f"epochs: {statistics.median(apart):.4f}, at most {max(apart):.4f}"
        )
    for words in result.hangs:
        print(f"  hung {words}")
    if failed:
        raise HorizonError("ranks hung, steps were repeated, or something has grown")
