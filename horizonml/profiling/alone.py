"""Measures how fast this device would train alone, with all of its cores: the whole model, a few times."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable

import torch
from torch import Tensor

from horizonml.engine.execution import backward, lay_out, runs_for
from horizonml.engine.staging import staging_for
from horizonml.machine.accelerator import computing
from horizonml.machine.code import where
from horizonml.machine.host import available_cores, memory_left, return_freed_memory
from horizonml.models.boundary import flat
from horizonml.models.zoo import Model
from horizonml.plan.plan import Execution
from horizonml.profiling.measure import clock, has_quota, in_training
from horizonml.state.optim import Optimizer
from horizonml.state.spec import Adam, Sgd

_log = logging.getLogger(__name__)
_LEAST_ROWS, _MOST_ROWS = 2, 64  # of a micro-batch
_SHORT, _LONG = 0.3, 1.0  # seconds that a pass may take where larger micro-batches gain nothing, and where they do
_GAIN = 0.98  # of the time of a sample, if twice as many of them gain anything
_REPEATS = 3
_COPIES = 4  # of the parameters: their gradients, what an optimizer keeps, and some room for activations


def samples_per_second(
    model: Model, execution: Execution, optimizer: Sgd | Adam, batch_size: int, threads: Iterable[int]
) -> float | None:
    """Return on how many samples a second this device would train alone, in global batches of `batch_size`.

    The best number of `threads` counts. Time to load samples is not included. Returns None if the device has not the
    memory for it, or if the model does not run on tensors that are made up.
    """
    return_freed_memory()  # which the run has kept, and which would count as taken
    size = sum(4 * shape.numel() for shapes in model.parameter_shapes for shape in shapes)
    if _COPIES * size > memory_left():
        return None
    before = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]), staging_for(computing().device).creating():
            one = _Alone(model, execution, optimizer)
            return max(one.rate(batch_size, number) for number in sorted(set(threads)))
    except Exception as error:  # noqa: BLE001  (the model's own code may fail in any way, and the run has succeeded)
        _log.info("how fast this device is alone is not known: %s", where(error))
        return None
    finally:
        torch.set_num_threads(before)


class _Alone:
    """Holds a model of its own, with what is needed to train it."""

    def __init__(self, model: Model, execution: Execution, optimizer: Sgd | Adam) -> None:
        layers = len(model.chain)
        self._module = in_training(model, 0, layers)
        lay_out(self._module, execution.channels_last)
        self._run = runs_for(model, self._module, layers, execution.among([execution]))
        self._entry = model.chain.boundaries[0]
        self._optimizer, self._state = Optimizer(optimizer), dict[str, dict[str, Tensor]]()

    def rate(self, batch_size: int, threads: int) -> float:
        """Return the samples per second with so many threads."""
        torch.set_num_threads(threads)
        # Where a quota holds the process back, its processor time tells its speed, and wall time only over minutes.
        slower = 1 / min(1.0, available_cores() / threads) if has_quota() else 1.0
        rows = self._best_rows(min(batch_size, _MOST_ROWS))
        whole = statistics.median(self._pass(rows) for _ in range(_REPEATS)) * batch_size / rows
        return batch_size / (slower * (whole + self._update()))

    def _best_rows(self, most: int) -> int:
        """Return the size of the micro-batches that take the least time for a sample."""
        rows = best = min(most, _LEAST_ROWS)
        least, free = math.inf, memory_left()
        while True:
            seconds = min(self._pass(rows), self._pass(rows))  # the first one of a size has to get its memory
            gains = seconds / rows < _GAIN * least
            if seconds / rows < least:
                best, least = rows, seconds / rows
            left = memory_left()
            if 2 * rows > most or 2 * seconds > (_LONG if gains else _SHORT) or free - left > left / 2:
                return best
            rows *= 2

    def _pass(self, rows: int) -> float:
        """Return the seconds of a forward and backward pass."""
        entered, tick = self._entry.example(rows), clock()
        begin = tick()
        left = tuple(value for value in flat(self._run(*entered)) if isinstance(value, Tensor) and value.requires_grad)
        backward(left, tuple(torch.ones_like(value) for value in left))
        return tick() - begin

    def _update(self) -> float:
        """Return the seconds of an update of all parameters, which have gradients now."""
        named = self._module.named_parameters()
        parameters = {name: parameter for name, parameter in named if parameter.grad is not None}
        tick, best = clock(), math.inf
        for _ in range(_REPEATS):
            begin = tick()
            self._optimizer.step(parameters, self._state, 1e-9)
            best = min(best, tick() - begin)
        return best
