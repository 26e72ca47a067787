"""Finds the fastest way to run each layer of a model on this device, by running it in all ways that a job allows.

The layers are timed one by one in each mode, with the tensors that flow through the model in that mode. A dynamic
programme over the chain of layers then picks the sequence of modes with the least time, conversions between neighbours
included. What it picks is finally run as a whole against the plain model, and taken only if it wins.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from horizonml.engine.backward import backward
from horizonml.engine.execution import convert, lay_out, precision_of, runs_for
from horizonml.errors import is_out_of_memory
from horizonml.machine.code import where
from horizonml.machine.resources import memory_left
from horizonml.models.boundary import Values, flat, values_of
from horizonml.models.chain import Chain
from horizonml.models.zoo import Model
from horizonml.plan.execution import PLAIN, Execution, Executions

WORTH = 0.97  # of the plain model's time, or less, for a choice to be taken
_log = logging.getLogger(__name__)
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
            for layers, kept in times.items():
                seconds = self._whole_pass(module, start, stop, *layers)
                if turn:
                    kept.append(seconds)
            if turn == 2:  # those that lose by far need not be tried again
                best = min(map(min, times.values()))
                times = {one: kept for one, kept in times.items() if one == candidates[0] or min(kept) < 1.15 * best}
        usual = {layers: statistics.median(kept) for layers, kept in times.items()}
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
            for mode, kept in zip(self._modes, times, strict=True):
                if turn < 2 or time.perf_counter() < self._deadline:
                    found = self._one_by_one(module, parts, start, mode)
                    if turn:
                        kept.append(found)
        return [[min(column) for column in zip(*kept, strict=True)] for kept in times]

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
