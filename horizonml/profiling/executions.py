"""Chooses how a rank runs each layer, once for a model on a device, and remembers it.

Results depend on the choice in their last bits (and with bf16 in more), so a rank keeps it as long as it lives, and the
cache keeps it for the next run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from horizonml.comm.group import Group
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.models.zoo import Model
from horizonml.plan.execution import PLAIN, Execution, described, from_json, to_json, without_bf16
from horizonml.planner.hardware import Host
from horizonml.profiling import kept
from horizonml.profiling.execution_trial import Choice, try_modes

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
