"""Finds out whether compiling the layers repays its time within the rest of the run.

Some layers from the middle of the model stand for all of them. They are compiled and timed by a process of their own,
because PyTorch's compiler takes 70 MB that a rank can spare only if it gains by them, and because such a process can be
ended if it takes too long. That process is run as `python -m horizonml.profiling.compile_trial`, and reads
the layers from its standard input.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.engine.backward import backward
from horizonml.engine.execution import Compiled, convert, precision_of
from horizonml.models.boundary import Values, flat
from horizonml.models.zoo import Model
from horizonml.plan.execution import Execution
from horizonml.text import human_seconds

_log = logging.getLogger(__name__)
_LEAST_SECONDS = 600.0  # of the rest of a run, for the trial to be made at all
_MOST_SECONDS = 120.0  # that the trial may take
_PART = 8  # one in so many of the layers is compiled
_LEAST_LAYERS = 3
_RUNS = 7
_WORTH = 0.97
_TIMES = 2.0  # what is gained must be so many times what compiling costs

Say = Callable[[str], None]


@dataclass(frozen=True)
class CompileTrial:
    """Holds the seconds to compile some layers, and those of a pass through them, plain and compiled."""

    compile_seconds: float
    plain_seconds: float
    compiled_seconds: float
    part: float  # of the model's layers

    def repays(self, pass_seconds: float, steps: int) -> bool:
        """Return whether compiling all layers repays its time in a run of so many steps."""
        gain = 1 - self.compiled_seconds / self.plain_seconds
        cost = self.compile_seconds / self.part
        return self.compiled_seconds < _WORTH * self.plain_seconds and gain * pass_seconds * steps > _TIMES * cost

    def told(self, pass_seconds: float, steps: int) -> str:
        """Return the reason for the decision, as a sentence."""
        gain = self.plain_seconds / self.compiled_seconds
        cost, left = human_seconds(self.compile_seconds / self.part), human_seconds(pass_seconds * steps)
        verb = "repays" if self.repays(pass_seconds, steps) else "does not repay"
        return f"compiling the layers would take {cost} and make them {gain:.2f} times as fast, which {verb} in {left}"


def has_compiler() -> bool:
    """Return whether this machine has a C++ compiler that PyTorch would use."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "g++", "clang++", "c++"))


def worth_compiling(
    model: Model, layers: Sequence[Execution], rows: int, steps: int, say: Say, wait: float = _MOST_SECONDS
) -> bool:
    """Return whether to compile the layers of a run of so many steps, and say why if that was tried.

    Other ranks may wait for the answer `wait` seconds.
    """
    if not has_compiler():
        return False
    count = len(model.chain)
    taken = min(count, max(_LEAST_LAYERS, count // _PART))
    start = (count - taken) // 2
    stop = start + taken
    mode = layers[start]
    module = model.stage(start, stop).train()
    entered = model.chain.boundaries[start].example(rows, start > 0)
    seconds = min(_pass(module, mode, entered) for _ in range(3)) * count / (stop - start)
    if seconds * steps < _LEAST_SECONDS:
        return False
    say("testing whether compiling the layers repays its time ...")
    found = _tried(module, mode, entered, (stop - start) / count, min(_MOST_SECONDS, wait))
    if found is None:
        say("the layers are not compiled: that failed, or took too long")
        return False
    say(found.told(seconds, steps))
    return found.repays(seconds, steps)


def _tried(module: nn.Module, mode: Execution, entered: Values, part: float, most: float) -> CompileTrial | None:
    """Return what another process has measured, or None if it failed or took too long."""
    try:
        layers = pickle.dumps((module, mode, entered, torch.get_num_threads()))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        _log.info("layers cannot be given to another process: %s", error)
        return None
    command = [sys.executable, "-m", "horizonml.profiling.compile_trial"]
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        done = subprocess.run(command, env=env, input=layers, capture_output=True, timeout=most, check=True)
        values = [float(value) for value in json.loads(done.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        _log.info("layers were not compiled: %s", error)
        return None
    return CompileTrial(values[0], values[1], values[2], part)


def _pass(forward: Callable[..., Any], mode: Execution, entered: Values) -> float:
    """Return the seconds of a forward and backward pass."""
    values = tuple(convert(value, mode.channels_last) for value in entered)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    with precision_of(mode, values):
        left = forward(*values)
    learned = tuple(value for value in flat(left) if isinstance(value, Tensor) and value.requires_grad)
    if learned:
        backward(learned, tuple(torch.ones_like(value) for value in learned))
    return clock() - begin


def main() -> None:
    """Measure the layers that this process's parent writes to its standard input, and print the result."""
    module, mode, entered, threads = pickle.load(sys.stdin.buffer)  # noqa: S301 - from its own parent
    torch.set_num_threads(threads)
    compiled = Compiled(module)
    compiled.load()
    begin = time.perf_counter()
    _pass(compiled, mode, entered)
    seconds = time.perf_counter() - begin
    if not compiled.is_used:
        raise SystemExit("the layers cannot be compiled")
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(1 + _RUNS):
        for is_compiled in times:
            taken = _pass(compiled if is_compiled else module, mode, entered)
            if turn:
                times[is_compiled].append(taken)
    print(json.dumps([seconds, statistics.median(times[False]), statistics.median(times[True])]))


if __name__ == "__main__":
    main()
