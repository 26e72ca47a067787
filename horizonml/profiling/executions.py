"""Chooses how a rank runs each layer, once for a model on a device, and remembers it.

Results depend on the choice in their last bits (and with bf16 in more), so a rank keeps it as long as it lives, and the
cache keeps it for the next run.

Finds the fastest way to run each layer of a model on this device, by running it in all ways that a job allows.

The layers are timed one by one in each mode, with the tensors that flow through the model in that mode. A dynamic
programme over the chain of layers then picks the sequence of modes with the least time, conversions between neighbours
included. What it picks is finally run as a whole against the plain model, and taken only if it wins.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.engine.execution import convert, lay_out, precision_of, runs_for
from horizonml.engine.split_backward import backward
from horizonml.errors import is_out_of_memory
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.machine.code import where
from horizonml.machine.resources import memory_left
from horizonml.models.boundary import Values, flat, values_of
from horizonml.models.chain import Chain
from horizonml.models.zoo import Model
from horizonml.plan.execution import PLAIN, Execution, Executions, described, from_json, to_json, without_bf16
from horizonml.planner.profile import Host
from horizonml.profiling import kept

_log = logging.getLogger(__name__)
_FORMAT = 2
_MOST_ROWS = 64
_TINY_BYTES = 4 << 20  # of parameters and of all layers' results together, which take a few milliseconds
_BYTE_SECONDS = 3e-9  # about what a pass takes for each of them; on a slower device, a trial is missed at worst
_LEAST_STEPS = 50  # of a run, for a trial to be worth it
_LEAST_SECONDS = 30.0
_ONE_IN = 8  # one in so many layers must convolve for other memory formats to be tried

_NARROW = ("bf16", "auto")  # precisions of a job with which layers may run in bf16

Say = Callable[[str], None]
Layers = tuple[Execution, ...]


def choose_executions(job: Job, model: Model, group: Group, here: Host, steps: int, say: Say) -> Layers:
    """Return how this rank runs each layer; all ranks must call this together.

    The first rank on a machine decides for the other ranks on it while they wait. `steps` is the length of the run.
    """
    lead = here.ranks[0]
    own = to_json(executions_here(job, model, group.world_size, steps, say)) if group.rank == lead else None
    return group.gather_json(own, lambda value: None if value is None else read_layers(model, value))[lead] or ()


def read_layers(model: Model, value: Any) -> Layers:
    """Return how another rank runs the layers of a model. Raises ValueError."""
    layers = from_json(value)
    if len(layers) != len(model.chain):
        raise ValueError(f"{len(layers)} executions for {len(model.chain)} layers")
    return layers


def executions_here(job: Job, model: Model, ranks: int, steps: int, say: Say, *, may_try: bool = True) -> Layers:
    """Return how layers run on this device: as the cache remembers, or as a trial shows if one is worth its time.

    With `may_try` off, what is not remembered stays plain.
    """
    if job.compile != "never" and may_try:
        say("compile: auto has no effect any more, because compiling never repaid its time; leave the field out")
    modes = modes_for(job.memory_format, job.precision, model)
    plain = (modes[0],) * len(model.chain)
    rows = _rows(job, ranks)
    if computing().accelerates:  # where nothing is tried: 16 bits are faster on every GPU that has them
        bits = "bf16" if job.precision in _NARROW and computing().has_bf16() else "fp32"
        return (replace(modes[0], precision=bits),) * len(model.chain)
    size = _pass_bytes(model, rows)
    if len(modes) == 1 or size < _TINY_BYTES:
        return plain
    key = _key(job, model, modes, rows)
    try:
        return read_layers(model, kept.read("executions", key)["layers"])
    except (ValueError, KeyError, TypeError):
        _log.debug("no choice of executions in %s yet", kept.path_of("executions", key))
    asked = job.precision == "bf16"
    is_short = steps < _LEAST_STEPS or steps * size * _BYTE_SECONDS < _LEAST_SECONDS / 3
    if not may_try or (is_short and not asked):
        return plain

    def worth_trying(seconds: float) -> bool:
        if not asked and seconds * steps < _LEAST_SECONDS:
            return False
        say("trying how each layer runs fastest, once for this model and device ...")
        return True

    choice = try_modes(model, rows, modes, worth_trying)
    if not choice.seconds:  # it depends on the length of the run, and is not remembered
        return plain
    say(_told(choice, model))
    seconds = [choice.seconds, choice.plain_seconds]
    kept.write("executions", key, {"layers": to_json(choice.layers), "seconds": seconds})
    return choice.layers


def modes_for(memory_format: str, precision: str, model: Model) -> list[Execution]:
    """Return the ways to run a layer that a job allows; the first is the one that is not to be left without a gain.

    Whether a run with `auto` uses what is chosen is decided elsewhere, by what it does to the accuracy.
    """
    formats = {"auto": [False, True], "contiguous": [False], "channels_last": [True]}[memory_format]
    if memory_format == "auto" and not _convolves(model):
        formats = [False]
    precisions = ["fp32", "bf16"] if precision in _NARROW else ["fp32"]
    return [Execution(channels_last, bits) for bits in precisions for channels_last in formats]


def untried(job: Job, layers: Layers) -> Layers:
    """Return how layers run before a run has tried what bf16 costs in accuracy, which is what plans are made for."""
    return without_bf16(layers) if job.precision == "auto" else layers


def unused_bf16(job: Job, everyone: list[Layers]) -> str | None:
    """Return a sentence about ranks that run nothing in bf16, though the job asks for it, or None."""
    without = [str(rank) for rank, layers in enumerate(everyone) if all(one.precision == "fp32" for one in layers)]
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
    parameters = sum(4 * shape.numel() for shapes in model.parameter_shapes() for shape in shapes)
    return results + parameters


def gain_here(job: Job, model: Model, ranks: int, layers: Sequence[Execution]) -> float:
    """Return how many times as fast as plain layers run on this device in this way, or 1 if the cache has another."""
    chosen = to_json(layers)
    for precision in dict.fromkeys((job.precision, "fp32")):
        modes = modes_for(job.memory_format, precision, model)
        try:
            content = kept.read("executions", _key(job, model, modes, _rows(job, ranks)))
            taken, plain = map(float, content["seconds"])
            if content["layers"] == chosen and taken > 0 and 0 < plain < math.inf:
                return plain / taken
        except (ValueError, KeyError, TypeError):
            _log.debug("no choice of executions is known for %s", precision)
    return 1.0


def _key(job: Job, model: Model, modes: list[Execution], rows: int) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "device": computing().name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "model": job.model.identity(),
        "layers": model.chain.names,
        "shapes": [[tensor.shape for tensor in one.tensors] for one in model.chain.boundaries],
        "modes": to_json(modes),
        "rows": rows,
    }


def _told(choice: Choice, model: Model) -> str:
    if all(layer == PLAIN for layer in choice.layers):
        return "no layer runs faster in any other way than PyTorch's own"
    return f"{described(choice.layers, model.chain.names)}: {choice.gain:.2f} times as fast as plain on this device"


WORTH = 0.97  # of the plain model's time, or less, for a choice to be taken
_TINY_SECONDS = 0.005  # a pass that takes less is not worth the trial
_PASS_SECONDS = 0.3  # of the plain model, to be timed with; fewer samples are taken if they take longer
_LEAST_ROWS = 2
_SLOW_SECONDS = 0.5  # a pass that takes longer is repeated less often, and none warms up
_REPEATS, _SLOW_REPEATS = 2, 1  # of each mode, layer by layer, after a pass that warms up
_ROUNDS, _SLOW_ROUNDS = 5, 3  # of each candidate as a whole
_BUDGET_SECONDS = 20.0  # what has not been tried by then stays plain
_PIECE_MEMORY = 0.15  # of what is left, for the parameters that are tried at a time
_SWITCH_SECONDS = 5e-5  # that a change of the mode costs at least


@dataclass(frozen=True)
class Choice:
    """Holds how each layer is to run, and the seconds of a pass so and plain; none if it has not been tried."""

    layers: tuple[Execution, ...]
    seconds: float = 0.0
    plain_seconds: float = 0.0
    rows: int = 0

    @property
    def gain(self) -> float:
        """Return how many times as fast as the plain model the layers run, or 1 if that has not been tried."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0


def try_modes(model: Model, rows: int, modes: Sequence[Execution], worth_trying: Callable[[float], bool]) -> Choice:
    """Return how to run each layer with micro-batches of `rows` samples; `modes` begin with the one to beat.

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
            return Choice((modes[0],) * len(model.chain))


class _Trial:
    """Tries the layers of a model, in pieces that fit into memory."""

    def __init__(self, model: Model, rows: int, modes: Sequence[Execution]) -> None:
        self._model, self._rows, self._modes = model, rows, list(modes)
        self._clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self._is_slow = False
        self._deadline = time.perf_counter() + _BUDGET_SECONDS

    def run(self, worth_trying: Callable[[float], bool]) -> Choice:
        """Return the choice for all layers."""
        pieces = self._pieces()
        found: list[Execution] = []
        seconds = plain = 0.0
        for start, stop in pieces:
            if time.perf_counter() > self._deadline:
                break
            module = self._model.stage(start, stop).train()
            if not found:
                whole = self._calibrate(module, start, stop) * len(pieces) * self._full / self._rows
                if whole < _TINY_SECONDS or not worth_trying(whole):
                    return Choice((self._modes[0],) * len(self._model.chain))
            layers, taken, taken_plain = self._try_piece(module, start, stop)
            found += layers
            seconds, plain = seconds + taken, plain + taken_plain
            del module
        rest = len(self._model.chain) - len(found)
        return Choice((*found, *[self._modes[0]] * rest), seconds, plain, self._rows)

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

    def _try_piece(self, module: nn.Module, start: int, stop: int) -> tuple[list[Execution], float, float]:
        """Return how to run some layers, and the seconds that they take so and plain."""
        candidates = [(mode,) * (stop - start) for mode in self._modes]
        if isinstance(self._model.chain, Chain):
            candidates.append(self._pick(self._layer_times(module, start, stop), start))
        candidates = list(dict.fromkeys(candidates))
        times: dict[tuple[Execution, ...], list[float]] = {layers: [] for layers in candidates}
        for turn in self._turns(_ROUNDS, _SLOW_ROUNDS):
            if turn > 2 and time.perf_counter() > self._deadline:
                break
            for layers, remaining in times.items():
                seconds = self._whole_pass(module, start, stop, *layers)
                if turn:
                    remaining.append(seconds)
            if turn == 2:  # those that lose by far need not be tried again
                best = min(map(min, times.values()))
                times = {
                    one: remaining
                    for one, remaining in times.items()
                    if one == candidates[0] or min(remaining) < 1.15 * best
                }
        usual = {layers: statistics.median(remaining) for layers, remaining in times.items()}
        plain = candidates[0]
        best_layers = min(usual, key=lambda layers: usual[layers])
        chosen = best_layers if usual[best_layers] < WORTH * usual[plain] else plain
        return list(chosen), usual[chosen], usual[plain]

    def _turns(self, usual: int, slow: int) -> range:
        """Return the numbers of the turns; number 0 warms up and does not count."""
        return range(1, 1 + slow) if self._is_slow else range(1 + usual)

    def _whole_pass(self, module: nn.Module, start: int, stop: int, *layers: Execution) -> float:
        """Return the seconds of a forward and backward pass of some layers that run so; one stands for all."""
        own = layers * (stop - start) if len(layers) == 1 else layers
        everywhere = (PLAIN,) * start + tuple(own) + (PLAIN,) * (len(self._model.chain) - stop)
        executions = Executions.of(everywhere)
        lay_out(module, self._names(executions))
        run = runs_for(self._model, module, start, stop, executions)
        for parameter in module.parameters():
            parameter.grad = None
        entered = self._entered(start)
        begin = self._clock()
        left = tuple(value for value in flat(run(*entered)) if isinstance(value, Tensor) and value.requires_grad)
        if left:
            backward(left, tuple(torch.ones_like(value) for value in left))
        return self._clock() - begin

    def _entered(self, start: int) -> Values:
        return self._model.chain.boundaries[start].example(self._rows, start > 0)

    def _names(self, executions: Executions) -> set[str]:
        layers = self._model.parameter_names()
        return {name for name, layer in layers.items() if layer in executions.channels_last_weights}

    def _layer_times(self, module: nn.Module, start: int, stop: int) -> list[list[float]]:
        """Return the seconds of each layer in each mode."""
        assert isinstance(self._model.chain, Chain)
        parts = [self._model.chain.slice(number, number + 1, module) for number in range(start, stop)]
        times: list[list[list[float]]] = [[] for _ in self._modes]
        for turn in self._turns(_REPEATS, _SLOW_REPEATS):
            for mode, remaining in zip(self._modes, times, strict=True):
                if turn < 2 or time.perf_counter() < self._deadline:
                    found = self._one_by_one(module, parts, start, mode)
                    if turn:
                        remaining.append(found)
        return [[min(column) for column in zip(*remaining, strict=True)] for remaining in times]

    def _one_by_one(self, module: nn.Module, parts: Sequence[nn.Module], start: int, mode: Execution) -> list[float]:
        """Return the seconds of each layer, all of which run in one mode."""
        lay_out(module, set(self._model.parameter_names()) if mode.channels_last else ())
        for parameter in module.parameters():
            parameter.grad = None
        steps: list[tuple[Values, Values, float]] = []
        values: Values = tuple(convert(value, mode.channels_last) for value in self._entered(start))
        for number, part in enumerate(parts):
            wants = start + number > 0
            entered = tuple(value.detach().requires_grad_(wants and value.is_floating_point()) for value in values)
            begin = self._clock()
            with precision_of(mode, entered):
                left = part(*entered)
            seconds = self._clock() - begin
            values = values_of(left) if number + 1 < len(parts) else flat(left)
            steps.append((entered, values, seconds))
        found = []
        while steps:
            entered, left, seconds = steps.pop()
            learned = tuple(value for value in left if isinstance(value, Tensor) and value.requires_grad)
            ones = tuple(torch.ones_like(value) for value in learned)
            begin = self._clock()
            if learned:
                backward(learned, ones)
            found.append(seconds + self._clock() - begin)
        return found[::-1]

    def _pick(self, times: list[list[float]], start: int) -> tuple[Execution, ...]:
        """Return the sequence of modes that takes the least time, conversions included."""
        costs = [time[0] for time in times]
        paths: list[list[int]] = [[mode] for mode in range(len(self._modes))]
        for layer in range(1, len(times[0])):
            turned = [
                [self._conversion(start + layer, self._modes[old], new) for old in range(len(self._modes))]
                for new in self._modes
            ]
            before, ways = costs, paths
            costs, paths = [], []
            for mode, own in enumerate(times):
                old = min(range(len(self._modes)), key=lambda old: before[old] + turned[mode][old])
                costs.append(before[old] + turned[mode][old] + own[layer])
                paths.append([*ways[old], mode])
        best = min(range(len(self._modes)), key=lambda mode: costs[mode])
        return tuple(self._modes[mode] for mode in paths[best])

    def _conversion(self, boundary: int, before: Execution, after: Execution) -> float:
        """Return the seconds to convert a boundary's tensors, and their gradients back."""
        if before == after:
            return 0.0
        seconds = _SWITCH_SECONDS
        for spec in self._model.chain.boundaries[boundary].tensors:
            moved = len(spec.shape) == 3 and before.channels_last != after.channels_last
            if spec.dtype.is_floating_point and (moved or before.precision != after.precision):
                seconds += 2 * spec.bytes_per_sample * self._rows * self._rate(moved)
        return seconds

    def _rate(self, moved: bool) -> float:
        """Return the seconds to convert a byte of float32 to another memory format, or else to 16 bits."""
        if not hasattr(self, "_rates"):
            self._rates = (self._measured_rate(False), self._measured_rate(True))
        return self._rates[moved]

    def _measured_rate(self, moved: bool) -> float:
        value, times = torch.randn(8, 64, 32, 32), []
        for _ in range(4):
            begin = self._clock()
            convert(value, moved, None if moved else torch.bfloat16)
            times.append(self._clock() - begin)
        return min(times) / value.nbytes
