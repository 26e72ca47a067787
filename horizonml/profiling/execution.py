"""Chooses how a device runs layers: by how many threads, in which memory format, and how precisely.

More threads are not always faster. The layers of small networks finish before all threads have begun, and where other
programs compete for the cores, every layer waits for the most delayed thread.

Results depend on the choice in their last bits (and with bf16 in more), so a rank keeps it as long as it lives, and the
cache keeps it for the next run.

The whole model is timed in every mode that a job allows, in pieces if it does not fit into memory at once, in turns
with the mode that is not to be left without a gain. The fastest mode is taken if it wins clearly. All layers run in it:
other modes for some of the layers were tried, and what they gained was lost to conversions between layers and to noise.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from horizonml.comm.expected import instance, optional, whole
from horizonml.comm.group import Group
from horizonml.engine.execution import backward, lay_out, runs_for
from horizonml.errors import is_out_of_memory
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.machine.code import where
from horizonml.machine.host import OtherWork, available_cores, memory_left, processor_name, threads_per_rank
from horizonml.models.boundary import Boundary, flat
from horizonml.models.cutting import Uncut
from horizonml.models.zoo import Model
from horizonml.plan.plan import PLAIN, Execution
from horizonml.planner.profile import Host
from horizonml.profiling import kept

_log = logging.getLogger(__name__)
_MOST_THREADS = 4096
_THREADS_FORMAT = 1
_REPEATS = 3
_MOST_ROWS = 64
_THREADS_SECONDS = 2.5  # layers that have not been tried by then do not count
_WATCH_SECONDS = 0.2  # how long the use of the processor by other programs is measured
_BUSY = 0.25  # of the cores that a rank may use
_WORTH = 0.9  # more threads must reduce the time to this part


def choose_threads(job: Job, model: Model, group: Group, here: Host) -> int:
    """Return the number of threads for this rank; all ranks must call this together.

    The first rank on a machine decides for the other ranks on it while they wait, so that all of them use the same
    number. With one core or less for each rank there is nothing to decide.
    """
    most = threads_per_rank(here.cores, len(here.ranks))
    own = None
    if group.rank == here.ranks[0]:
        rows = max(2, min(_MOST_ROWS, job.batch_size // group.world_size))
        rows = 1 << (rows.bit_length() - 1)  # allows a group that loses a rank to find a cached answer
        own = 1 if most == 1 else _remembered(model, rows, most)
    return group.gather_json(own, optional(whole(1, _MOST_THREADS)))[here.ranks[0]] or 1


def _remembered(model: Model, rows: int, most: int) -> int:
    """Return the choice for this model on this device, from the cache if it was made before.

    Results depend in their last bits on the number of threads, so the choice for a run must not change because two
    numbers were equally fast. A busy device has a choice of its own.
    """
    others = OtherWork()
    time.sleep(_WATCH_SECONDS)
    key = {
        "format": _THREADS_FORMAT,
        "device": processor_name(),
        "torch": torch.__version__,
        "waiting": {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")},
        "layers": model.chain.names,
        "shapes": [[tensor.shape for tensor in one.tensors] for one in model.chain.boundaries],
        "rows": rows,
        "most": most,
        "busy": others.cores_taken() > _BUSY * available_cores(),
    }
    threads = kept.read("threads", key).get("threads")
    if isinstance(threads, int) and 1 <= threads <= most:
        return threads
    seconds = try_threads(model, rows, most)
    threads = fewest(seconds)
    kept.write("threads", key, {"threads": threads, "seconds": seconds})
    return threads


def fewest(seconds: Mapping[int, float]) -> int:
    """Return the smallest number of threads from which no larger number gains much."""
    chosen = min(seconds)
    for threads in sorted(seconds):
        if seconds[threads] < _WORTH * seconds[chosen]:
            chosen = threads
    return chosen


def try_threads(model: Model, rows: int, most: int) -> dict[int, float]:
    """Return the seconds of a forward and backward pass of `rows` samples with 1, 2, 4, ... `most` threads.

    Layers are tried one at a time, each as a new module, so that the model to train does not change.
    """
    before = torch.get_num_threads()
    candidates = sorted({*(1 << power for power in range(most.bit_length())), most})
    totals = dict.fromkeys(candidates, 0.0)
    deadline = time.perf_counter() + _THREADS_SECONDS
    try:
        with torch.random.fork_rng(devices=[]):
            for index in _spread(len(model.chain)):
                if time.perf_counter() > deadline:
                    break
                for threads, seconds in _try(model, index, rows, candidates, deadline):
                    totals[threads] += seconds
    finally:
        torch.set_num_threads(before)
    return totals


def _try(model: Model, index: int, rows: int, candidates: list[int], deadline: float) -> list[tuple[int, float]]:
    """Return the seconds of a layer with each number of threads, or of the whole model if it does not run in layers.

    A plan that does not cut the model needs no layers that run by themselves.
    """
    try:
        return list(
            _try_layer(model.stage(index, index + 1).train(), model.chain.boundaries[index], rows, candidates, deadline)
        )
    except Exception as error:  # the model's own code runs here, and may fail in any way
        if is_out_of_memory(error):
            raise
        _log.info("the whole model is run to choose the number of threads: %s", where(error))
    whole = model.stage(0, len(model.chain)).train()
    return list(_try_layer(whole, model.chain.boundaries[0], rows, candidates, deadline))


def _try_layer(
    layer: nn.Module, boundary: Boundary, rows: int, candidates: list[int], deadline: float
) -> Iterator[tuple[int, float]]:
    """Yield the seconds of a layer with each number of threads.

    The numbers take turns, because other programs come and go.
    """
    entered = boundary.example(rows)
    times: dict[int, list[float]] = {threads: [] for threads in candidates}
    for turn in range(1 + _REPEATS):
        if turn > 1 and time.perf_counter() > deadline:
            break
        for threads in candidates:
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            left = tuple(value for value in flat(layer(*entered)) if value.requires_grad)
            if left:
                backward(left, tuple(torch.ones_like(value) for value in left))
            if turn:  # the first turn warms up
                times[threads].append(time.perf_counter() - begin)
    for threads, seconds in times.items():
        yield threads, kept.usual(seconds)


def _spread(count: int) -> list[int]:
    """Return the numbers below `count`, ordered so that the first few are spread over all: 0, 4, 2, 6, 1, 3, 5, 7."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


_FORMAT = 3
_TINY_BYTES = 4 << 20  # of parameters and of all layers' results together, which take a few milliseconds
_BYTE_SECONDS = 3e-9  # about what a pass takes for each of them; on a slower device, a trial is missed at worst
_LEAST_STEPS = 50  # of a run, for a trial to be worth it
_LEAST_SECONDS = 30.0
_ONE_IN = 8  # one in so many layers must convolve for other memory formats to be tried

_NARROW = ("bf16", "auto")  # precisions of a job with which layers may run in bf16

Say = Callable[[str], None]


def execution_here(job: Job, model: Model, ranks: int, steps: int, say: Say, *, may_try: bool = True) -> Execution:
    """Return how layers run on this device: as the cache remembers, or as a trial shows if one is worth its time.

    `steps` is the length of the run of `ranks`. With `may_try` off, what is not remembered stays plain.
    """
    if isinstance(model.chain, Uncut):
        return PLAIN
    modes = modes_for(job.memory_format, job.precision, model)
    plain, rows = modes[0], _rows(job, ranks)
    if computing().accelerates:  # where nothing is tried: 16 bits are faster on every GPU that has them
        narrow = job.precision in _NARROW and computing().has_bf16()
        return replace(plain, precision="bf16") if narrow else plain
    size = _pass_bytes(model, rows)
    if len(modes) == 1 or size < _TINY_BYTES:
        return plain
    key = _key(job, model, modes, rows)
    try:
        return instance(Execution)(kept.read("executions", key)["execution"])
    except (ValueError, KeyError, TypeError):
        _log.debug("no execution is chosen in %s yet", kept.path_of("executions", key))
    asked = job.precision == "bf16"
    is_short = steps < _LEAST_STEPS or steps * size * _BYTE_SECONDS < _LEAST_SECONDS / 3
    if not may_try or (is_short and not asked):
        return plain

    def worth_trying(seconds: float) -> bool:
        if not asked and seconds * steps < _LEAST_SECONDS:
            return False
        say("trying how layers run fastest, once for this model and device ...")
        return True

    choice = try_modes(model, rows, modes, worth_trying)
    if not choice.seconds:  # it depends on the length of the run, and is not remembered
        return plain
    say(choice.words)
    seconds = [choice.seconds, choice.plain_seconds]
    kept.write("executions", key, {"execution": asdict(choice.execution), "seconds": seconds})
    return choice.execution


def modes_for(memory_format: str, precision: str, model: Model) -> list[Execution]:
    """Return the ways to run layers that a job allows; the first is the one that is not to be left without a gain.

    Whether a run with `auto` uses what is chosen is decided elsewhere, by what it does to the accuracy.
    """
    formats = {"auto": [False, True], "contiguous": [False], "channels_last": [True]}[memory_format]
    if memory_format == "auto" and not _convolves(model):
        formats = [False]
    precisions: Sequence[Literal["fp32", "bf16"]] = ("fp32", "bf16") if precision in _NARROW else ("fp32",)
    return [Execution(channels_last, bits) for bits in precisions for channels_last in formats]


def untried(job: Job, execution: Execution) -> Execution:
    """Return how layers run before a run has tried what bf16 costs in accuracy, which is what plans are made for."""
    return execution.exact() if job.precision == "auto" else execution


def unused_bf16(job: Job, everyone: Sequence[Execution]) -> str | None:
    """Return a sentence about ranks that do not run in bf16, though the job asks for it, or None."""
    without = [str(rank) for rank, one in enumerate(everyone) if one.precision == "fp32"]
    if job.precision != "bf16" or not without:
        return None
    ranks = "on this device" if len(without) == len(everyone) == 1 else f"by rank {', '.join(without)}"
    return (
        f"precision: bf16 is not used {ranks}: the device does not compute with it, it would be slower there, or the "
        "layers are too small to gain by it"
    )


def _rows(job: Job, ranks: int) -> int:
    """Return the likely samples of a micro-batch; a power of 2 lets a group that loses a rank find a cached answer."""
    rows = max(2, min(_MOST_ROWS, job.batch_size // max(ranks, job.parallel.micro_batches or 1)))
    return 1 << (rows.bit_length() - 1)


def _convolves(model: Model) -> bool:
    """Return whether enough of the layers convolve for their memory format to matter."""
    convolving = sum(
        any(isinstance(part, nn.Conv2d | nn.ConvTranspose2d) for part in model.chain.slice(n, n + 1).modules())
        for n in range(len(model.chain))
    )
    return convolving * _ONE_IN >= len(model.chain)


def _pass_bytes(model: Model, rows: int) -> int:
    """Return the bytes of the parameters and of what layers return for so many samples, which tell small models."""
    results = rows * sum(boundary.bytes_per_sample for boundary in model.chain.boundaries)
    parameters = sum(4 * shape.numel() for shapes in model.parameter_shapes for shape in shapes)
    return results + parameters


def gain_here(job: Job, model: Model, ranks: int, execution: Execution) -> float:
    """Return how many times as fast as plain layers run on this device in this way, or 1 if the cache has another."""
    for precision in dict.fromkeys((job.precision, "fp32")):
        modes = modes_for(job.memory_format, precision, model)
        try:
            content = kept.read("executions", _key(job, model, modes, _rows(job, ranks)))
            taken, plain = map(float, content["seconds"])
            if instance(Execution)(content["execution"]) == execution and taken > 0 and 0 < plain < math.inf:
                return plain / taken
        except (ValueError, KeyError, TypeError):
            _log.debug("no execution is chosen for %s", precision)
    return 1.0


def _key(job: Job, model: Model, modes: list[Execution], rows: int) -> dict[str, object]:
    return {
        "format": _FORMAT,
        "device": computing().name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": job.model.identity(),
        "layers": model.chain.names,
        "shapes": [[tensor.shape for tensor in one.tensors] for one in model.chain.boundaries],
        "modes": [asdict(mode) for mode in modes],
        "rows": rows,
    }


WORTH = 0.97  # of the plain model's time, or less, for a choice to be taken
_TINY_SECONDS = 0.005  # a pass that takes less is not worth the trial
_PASS_SECONDS = 0.3  # of the plain model, to be timed with; fewer samples are taken if they take longer
_LEAST_ROWS = 2
_SLOW_SECONDS = 0.5  # a pass that takes longer is repeated less often, and none warms up
_ROUNDS, _SLOW_ROUNDS = 5, 3  # of all modes, in turns
_BUDGET_SECONDS = 20.0  # what has not been tried by then does not count
_PIECE_MEMORY = 0.15  # of what is left, for the parameters that are tried at a time


@dataclass(frozen=True)
class Choice:
    """Holds how layers are to run, and the seconds of a pass so and plain; none if it has not been tried."""

    execution: Execution
    seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def words(self) -> str:
        """Return a sentence on the choice."""
        if self.execution == PLAIN:
            return "layers do not run faster in any other way than PyTorch's own"
        gain = self.plain_seconds / self.seconds if self.seconds else 1.0
        return f"all layers in {self.execution.words}: {gain:.2f} times as fast as plain on this device"


def try_modes(model: Model, rows: int, modes: Sequence[Execution], worth_trying: Callable[[float], bool]) -> Choice:
    """Return how to run layers with micro-batches of `rows` samples; `modes` begin with the one to beat.

    `worth_trying` is asked whether a pass of so many seconds is worth a trial.
    """
    trial = _Trial(model, rows, modes)
    with torch.random.fork_rng(devices=[]):
        try:
            return trial.run(worth_trying)
        except Exception as error:  # the model's own code runs here, and may fail in any way
            if model.proven or is_out_of_memory(error):
                raise
            _log.info("all layers run plain, because they do not run by themselves: %s", where(error))
            return Choice(modes[0])


class _Trial:
    """Tries the layers of a model, in pieces that fit into memory."""

    def __init__(self, model: Model, rows: int, modes: Sequence[Execution]) -> None:
        self._model, self._rows, self._modes = model, rows, list(modes)
        self._clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self._is_slow = False
        self._deadline = time.perf_counter() + _BUDGET_SECONDS

    def run(self, worth_trying: Callable[[float], bool]) -> Choice:
        """Return the mode in which the pieces that there is time for take the least time together."""
        plain = self._modes[0]
        pieces = self._pieces()
        times: list[dict[Execution, float]] = []
        for start, stop in pieces:
            if time.perf_counter() > self._deadline:
                break
            module = self._model.stage(start, stop).train()
            if not times:
                whole = self._calibrate(module, start, stop) * len(pieces) * self._full / self._rows
                if whole < _TINY_SECONDS or not worth_trying(whole):
                    return Choice(plain)
            times.append(self._try_piece(module, start, stop))
            del module
        seconds = {mode: sum(one[mode] for one in times) for mode in self._modes}
        best = min(self._modes, key=lambda mode: seconds[mode])
        chosen = best if seconds[best] < WORTH * seconds[plain] else plain
        return Choice(chosen, seconds[chosen], seconds[plain])

    def _pieces(self) -> list[tuple[int, int]]:
        """Return the layers as spans that fit into a part of the memory that is left."""
        most = memory_left() * _PIECE_MEMORY
        sizes = [
            sum(parameter.nbytes for parameter in self._model.chain.slice(n, n + 1).parameters())
            for n in range(len(self._model.chain))
        ]
        spans, start, size = [], 0, 0
        for number, own in enumerate(sizes):
            if number > start and size + own > most:
                spans.append((start, number))
                start, size = number, 0
            size += own
        return [*spans, (start, len(sizes))]

    def _calibrate(self, module: nn.Module, start: int, stop: int) -> float:
        """Choose with how many samples to try, at most those that there will be; return the seconds of a plain pass."""
        self._full = self._rows
        self._rows = min(self._full, _LEAST_ROWS)
        self._whole_pass(module, start, stop, self._modes[0])
        seconds = self._whole_pass(module, start, stop, self._modes[0])
        while self._rows * 2 <= self._full and seconds < _PASS_SECONDS / 2:
            self._rows *= 2
            seconds = self._whole_pass(module, start, stop, self._modes[0])
        self._is_slow = seconds > _SLOW_SECONDS
        return seconds

    def _try_piece(self, module: nn.Module, start: int, stop: int) -> dict[Execution, float]:
        """Return the seconds that some layers take in each mode."""
        times: dict[Execution, list[float]] = {mode: [] for mode in self._modes}
        rivals = self._modes
        for turn in range(1, 1 + _SLOW_ROUNDS) if self._is_slow else range(1 + _ROUNDS):  # turn 0 warms up
            if turn > 2 and time.perf_counter() > self._deadline:
                break
            for mode in rivals:
                seconds = self._whole_pass(module, start, stop, mode)
                if turn:
                    times[mode].append(seconds)
            if turn == 2:  # those that lose by far need not be tried again
                best = min(map(min, times.values()))
                rivals = [mode for mode in rivals if mode == rivals[0] or min(times[mode]) < 1.15 * best]
        return {mode: statistics.median(own) for mode, own in times.items()}

    def _whole_pass(self, module: nn.Module, start: int, stop: int, mode: Execution) -> float:
        """Return the seconds of a forward and backward pass of some layers in a mode."""
        lay_out(module, mode.channels_last)
        run = runs_for(self._model, module, stop, mode.among([mode]))
        for parameter in module.parameters():
            parameter.grad = None
        entered = self._model.chain.boundaries[start].example(self._rows, start > 0)
        begin = self._clock()
        left = tuple(value for value in flat(run(*entered)) if isinstance(value, Tensor) and value.requires_grad)
        if left:
            backward(left, tuple(torch.ones_like(value) for value in left))
        return self._clock() - begin
