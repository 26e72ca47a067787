"""Measures the layers of a model on this device once, what sending in fewer bits costs it, and caches the profile.

Cuts and micro-batches that fit the measured times gain far more than any schedule, and the number of layers says little
about their times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from horizonml.data.dataset import TensorSpec
from horizonml.engine import fragment
from horizonml.engine.execution import Forward, backward, memory_format, runs_for
from horizonml.engine.link import BoundaryCodec, Codec
from horizonml.engine.staging import staging_for
from horizonml.machine.accelerator import computing, synchronised
from horizonml.machine.host import available_cores
from horizonml.models.boundary import Boundary, Values, flat
from horizonml.models.module_slice import HOST, bring
from horizonml.models.zoo import Model
from horizonml.plan.plan import PLAIN, Execution
from horizonml.plan.syncs import FORMATS, SYNCS, resolve
from horizonml.planner.profile import LayerProfile, Profile
from horizonml.profiling import kept
from horizonml.state.optim import Optimizer
from horizonml.state.spec import Sgd
from horizonml.text import human_seconds

_FORMAT, _KIND = 10, "profiles"
_SIZES = (1, 4, 16, 64)  # one sample, too, as what a few samples take does not follow from what more of them take
_REPEATS = 3
_MOST_AGAIN = 3  # times that a layer is measured again while its times contradict one another
_COUNTS = 0.01  # of all layers' time; those that take less are not measured again
_BUSY = 3.0  # times as long as the least, from which on it is told that the machine was busy
_LITTLE = 2e-3  # seconds, by which layers one by one may take longer than together
_WRONG = 1.5  # times as long as the quickest step of a run, from which on a prediction is wrong
_COLD_BYTES = 64 << 20  # more than caches hold
_SHORT, _LONG = (1, 16, 16), (8, 64, 32, 32)  # messages for a link
_BUDGET_SECONDS = 20.0  # larger micro-batches are not measured if the next one would take longer

Form = tuple[torch.dtype, torch.memory_format]
Runs = list[tuple[float, float]]  # the forward and backward seconds of each run
Passes = tuple[tuple[float, ...], tuple[float, ...]]  # the forward and the backward seconds for each size


def cached_profile(
    model: Model,
    key: dict[str, object],
    batch_size: int,
    say: Callable[[str], None],
    execution: Execution = PLAIN,
) -> Profile:
    """Return the profile of a model on this device, from the cache if it was measured before.

    `key` names the model and its options. Sizes above `batch_size` cannot occur and are not measured. `say` receives a
    message if the measurement takes time. `execution` says how layers run.
    """
    key, sizes = _full_key(model, key, batch_size, execution)
    content = kept.read(_KIND, key)
    profile, why = _profile(content), content.get("doubt")
    if profile is not None and not why:
        return profile
    if profile is None:
        say("measuring the layers, once for this model and device ...")
    else:
        say(f"measuring the layers again, because {why} ...")
    with staging_for(computing().device).creating():
        profile = measure(model, sizes, execution)
    whole = sum(layer.forward[-1] + layer.backward[-1] for layer in profile.layers)
    slow = [layer for layer in profile.layers if layer.forward[-1] + layer.backward[-1] > _COUNTS * whole]
    spread = max((layer.spread for layer in slow), default=1.0)
    if spread > _BUSY:
        say(
            f"warning: this device was busy while it was measured: some runs of a layer took {spread:.1f} times as "
            "long as the quickest, which counts; --measure-again measures anew"
        )
    error = kept.write(_KIND, key, {"profile": profile.to_json(), "doubts": content.get("doubts", 0)})
    if error is not None:
        say(
            f"warning: {kept.path_of(_KIND, key).parent} cannot be written to ({error.strerror or error}), so the "
            "layers are measured each time; HORIZONML_CACHE names another folder"
        )
    return profile


def kept_profile(model: Model, key: dict[str, object], batch_size: int, execution: Execution = PLAIN) -> Profile | None:
    """Return the profile of a model on this device if it was measured before, as in `cached_profile`, or None."""
    return _profile(kept.read(_KIND, _full_key(model, key, batch_size, execution)[0]))


def compare_with_run(
    model: Model,
    key: dict[str, object],
    batch_size: int,
    execution: Execution,
    passes: Sequence[tuple[int, int, int]],
    seconds: float,
) -> str | None:
    """Have the profile measured again if a run shows that it was made on a busy device; return what to say of it.

    `passes` are the layers (start, stop) and the rows of all that the run does in a step, and `seconds` what its
    quickest step took to compute. What else a device does can only make a step longer, so the profile cannot be right
    if it says that the layers take longer than that.
    """
    full, _ = _full_key(model, key, batch_size, execution)
    profile = _profile(kept.read(_KIND, full))
    if profile is None or computing().accelerates:
        return None
    predicted = sum(sum(profile.seconds(layer, rows)) for start, stop, rows in passes for layer in range(start, stop))
    if predicted <= max(_WRONG * seconds, seconds + _LITTLE):
        return None
    why = f"the quickest step of a run took {human_seconds(seconds)} to compute, and these times say " + human_seconds(
        predicted
    )
    if not kept.doubt(_KIND, full, why):
        return None
    return f"the layers will be measured again before the next plan: {why}"


def _full_key(
    model: Model, key: dict[str, object], batch_size: int, execution: Execution
) -> tuple[dict[str, object], tuple[int, ...]]:
    """Return all that a profile depends on, and the sizes of micro-batches that it has."""
    sizes = tuple(size for size in _SIZES if size <= batch_size)
    sizes = sizes if len(sizes) > 1 else (1, max(2, batch_size))
    return {
        "format": _FORMAT,
        "device": computing().name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "layers": model.chain.names,
        "boundaries": [[[tensor.shape, str(tensor.dtype)] for tensor in one.tensors] for one in model.chain.boundaries],
        "sizes": sizes,
        "executions": [] if execution == PLAIN else asdict(execution),
        **key,
    }, sizes


def _profile(content: dict[str, object]) -> Profile | None:
    try:
        return Profile.from_json(content["profile"])
    except (ValueError, KeyError, TypeError):
        return None


def measure(model: Model, sizes: tuple[int, ...], execution: Execution = PLAIN) -> Profile:
    """Return the profile of a model, from running every layer forward and backward, one layer in memory at a time.

    Times are medians of a few runs, without those that other programs disturb, and with gradients accumulated as in
    training. A layer whose times contradict one another is measured again at the end, when that may be over. Layers
    that do the same work get the median of their times: a search for plans would put the boundaries where measuring
    happened to be too low. Each layer gets its input as the layer before leaves it; the first layer also converts what
    enters the model.
    """
    forms: Sequence[Form] = ()
    found_runs: list[list[Runs]] = []
    entered: list[Sequence[Form]] = []
    fewest: list[int] = []  # samples that a layer trains on
    layers: list[tuple[int, int, int]] = []
    kinds: list[Hashable] = []
    update, largest = 0.0, 0
    for index in range(len(model.chain)):
        module, run = _runnable(model, execution, index)
        boundary = model.chain.boundaries[index]
        times: list[Runs] = []
        fewest.append(1 if _trains_on_one(module, boundary) else 2)
        for size in sizes:
            runs, left = _runs(run, boundary, max(size, fewest[-1]), index > 0, forms)
            times.append(runs)
            if size > 1 and min(map(sum, runs)) * len(model.chain) * _REPEATS * 4 > _BUDGET_SECONDS:
                break
        found_runs.append(times)
        entered.append(forms)
        size = sum(parameter.nbytes for parameter in module.parameters())
        trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
        if trained > largest:
            largest, update = trained, _update_seconds_per_byte(module)
        saved, operations = _saved_bytes(module, run, boundary, index > 0, forms)
        layers.append((size, trained, saved))
        shapes = tuple(parameter.shape for parameter in module.parameters())
        kind = (tuple(forms), boundary, shapes, saved, operations, model.chain.boundaries[index + 1])
        kinds.append(kind if operations else index)
        forms = left
        del module, run
    # All layers must have the same sizes.
    known = min(len(times) for times in found_runs)
    for number, size in enumerate(sizes[:known]):
        rows = [max(size, least) for least in fewest]
        _settle(model, execution, rows, [times[number] for times in found_runs], entered)
    seconds = alike([settled(times[:known]) for times in found_runs], kinds)
    found = tuple(
        LayerProfile(
            model.chain.names[index],
            *seconds[index],
            parameter_bytes=layers[index][0],
            trained_bytes=layers[index][1],
            saved_bytes=layers[index][2],
            output_bytes=model.chain.boundaries[index + 1].bytes_per_sample,
            gradient_bytes=model.chain.boundaries[index + 1].gradients.bytes_per_sample,
            coded=coded_bytes(model.chain.boundaries[index + 1]),
            spread=max(map(sum, times[known - 1])) / max(1e-9, min(map(sum, times[known - 1]))),
        )
        for index, times in enumerate(found_runs)
    )
    codecs, short = codec_seconds(clock())
    copying = _copy_seconds_per_byte() if computing().accelerates else 0.0
    return Profile(
        computing().name,
        sizes[:known],
        update,
        found,
        codecs,
        transfer_seconds_per_byte=copying,
        least_rows=max(fewest),
        execution=execution,
        codec_seconds_per_message=short,
    )


def settled(runs: Sequence[Runs]) -> Passes:
    """Return the forward and the backward seconds for each size, of which `runs` has all runs.

    Fewer samples never take longer than more: where it looks like that, the time for more samples stands for both,
    because other programs can only add to a time.
    """
    passes = []
    for which in (0, 1):
        times = [kept.usual([run[which] for run in own]) for own in runs]
        for place in reversed(range(len(times) - 1)):
            times[place] = min(times[place], times[place + 1])
        passes.append(tuple(times))
    return passes[0], passes[1]


def alike(seconds: Sequence[Passes], kinds: Sequence[Hashable]) -> list[Passes]:
    """Return the forward and backward seconds of each layer, as the medians of all layers of its kind."""
    members: dict[Hashable, list[Passes]] = {}
    for own, kind in zip(seconds, kinds, strict=True):
        members.setdefault(kind, []).append(own)

    def median(which: int, kind: Hashable) -> tuple[float, ...]:
        return tuple(map(statistics.median, zip(*(own[which] for own in members[kind]), strict=True)))

    return [(median(0, kind), median(1, kind)) for kind in kinds]


def _settle(
    model: Model, execution: Execution, rows: Sequence[int], runs: Sequence[Runs], entered: Sequence[Sequence[Form]]
) -> None:
    """Measure the layers again whose `runs`, on so many `rows`, contradict one another, and add what that took."""
    end = time.monotonic() + _BUDGET_SECONDS / 4
    for _ in range(_MOST_AGAIN):
        whole = sum(min(map(sum, own)) for own in runs)
        for index, own in enumerate(runs):
            totals = [sum(run) for run in own]
            if kept.is_settled(totals) or max(totals) < _COUNTS * whole or time.monotonic() > end:
                continue
            _, run = _runnable(model, execution, index)
            own += _runs(run, model.chain.boundaries[index], rows[index], index > 0, entered[index])[0]


def _runnable(model: Model, execution: Execution, index: int) -> tuple[nn.Module, Forward]:
    """Return a layer as a module, and what runs it."""
    module = in_training(model, index, index + 1)
    return module, runs_for(model, module, index + 1, execution.among([execution]), leaves=False)


def in_training(model: Model, start: int, stop: int) -> nn.Module:
    """Return layers `start` to `stop - 1` in training mode, on the device that this process computes on."""
    if not computing().accelerates:
        return model.stage(start, stop).train()
    with HOST:
        module = model.stage(start, stop).train()
    bring(module, computing().device)
    return module


def clock() -> Callable[[], float]:
    """Return a clock in seconds: of processor time where a quota would interrupt the process, else of wall time.

    It waits for an accelerator to be done with what it has been given.
    """
    if computing().accelerates:
        return synchronised
    return time.process_time if has_quota() else time.perf_counter


def has_quota() -> bool:
    """Return whether a quota of processor time interrupts this process, so that wall time says little of its speed."""
    return available_cores() < torch.get_num_threads()


def _example(entry: Boundary, size: int, needs_gradient: bool, forms: Sequence[Form]) -> Values:
    """Return synthetic inputs of a layer as the layer before leaves them: in its dtypes and memory formats."""
    values = entry.example(size, needs_gradient)
    if len(forms) != len(values):
        return values
    return tuple(
        value.detach().to(dtype=dtype, memory_format=form).requires_grad_(value.requires_grad)
        if value.is_floating_point()
        else value
        for value, (dtype, form) in zip(values, forms, strict=True)
    )


def _runs(
    run: Forward, entry: Boundary, size: int, needs_gradient: bool, forms: Sequence[Form]
) -> tuple[Runs, Sequence[Form]]:
    """Return the forward and backward seconds of a few runs on `size` samples, and the forms of what they return.

    Each run has its own input and output, because in training, too, other micro-batches displace these from the
    processor's caches.
    """
    copies = max(1, min(_REPEATS, _COLD_BYTES // (size * entry.bytes_per_sample)))
    inputs = [_example(entry, size, needs_gradient, forms) for _ in range(copies)]
    kept: list[Values] = []
    runs = []
    for number in range(2 * _REPEATS):
        if number == _REPEATS:  # the first runs warm up, and provide memory for the others
            kept.clear()
        runs.append(_once(run, inputs[number % copies], kept))
        del kept[:-copies]
    return runs[_REPEATS:], [(value.dtype, memory_format(value)) for value in kept[-1]]


def _once(run: Forward, entered: Values, kept: list[Values]) -> tuple[float, float]:
    """Return the forward and backward seconds of one run, and append the outputs to `kept`."""
    tick = clock()
    start = tick()
    left = flat(run(*entered))
    middle = tick()
    kept.append(tuple(value.detach() for value in left))
    learned = tuple(value for value in left if value.requires_grad)
    if not learned:
        return middle - start, 0.0
    gradients = tuple(torch.ones_like(value) for value in learned)
    for value in entered:
        value.grad = None
    begin = tick()
    backward(learned, gradients)
    return middle - start, tick() - begin


@torch.no_grad()
def _trains_on_one(module: torch.nn.Module, entry: Boundary) -> bool:
    try:
        module(*entry.zeros(1))
    except ValueError:  # raised by BatchNorm, which needs more than one value per channel
        return False
    return True


def _saved_bytes(
    module: torch.nn.Module, run: Forward, entry: Boundary, needs_gradient: bool, forms: Sequence[Form]
) -> tuple[int, Hashable]:
    """Return the bytes per sample that autograd keeps from the forward to the backward pass, and what it will do then.

    Parameters are not counted. Nothing is done in the backward pass of a layer in which nothing is trained.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    shapes = {parameter.shape for parameter in module.parameters()}
    kept: dict[int, int] = {}
    samples = 2

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_cast = tensor.dtype == torch.bfloat16 and tensor.shape in shapes  # a weight's copy, made once in a step
        if storage.data_ptr() not in own and not is_cast:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    entered = _example(entry, samples, needs_gradient, forms)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        left: Values = flat(run(*entered))  # keeps saved tensors alive, and their addresses in use
    if not any(value.requires_grad for value in left):  # nothing before here is trained
        return 0, ()
    return (sum(kept.values()) + sum(value.nbytes for value in left)) // samples, _operations(left)


def _operations(left: Values) -> Hashable:
    """Return how often each operation, with its settings, stands in the graph that leads to some values."""
    waiting = [value.grad_fn for value in left if value.grad_fn is not None]
    met = set(waiting)
    while waiting:
        after = {node for node, _ in waiting.pop().next_functions if node is not None} - met
        met |= after
        waiting += after
    return frozenset(Counter((node.name(), *_settings(node)) for node in met).items())


def _settings(node: torch.autograd.graph.Node) -> Iterator[tuple[str, str]]:
    """Yield the numbers that an operation was called with, such as a stride."""
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            if all(isinstance(one, int | float) for one in (value if isinstance(value, tuple | list) else [value])):
                yield name, str(value)


def _update_seconds_per_byte(module: torch.nn.Module) -> float:
    """Return the seconds of an SGD update per byte of the module's parameters, which must have gradients."""
    optimizer, state = Optimizer(Sgd()), dict[str, dict[str, Tensor]]()
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    least = _least_seconds(lambda: optimizer.step(parameters, state, 1e-9), clock())
    return least / sum(parameter.nbytes for parameter in parameters.values())


def _copy_seconds_per_byte() -> float:
    """Return the mean seconds to copy a byte of a message between an accelerator and the host's memory."""
    staging, tensor = staging_for(computing().device), torch.randn(1 << 20)
    return _least_seconds(lambda: staging.to_device(staging.to_host(tensor)), clock()) / tensor.nbytes / 2


def _least_seconds(work: Callable[[], object], tick: Callable[[], float]) -> float:
    """Return the least seconds of several runs, without the first one."""
    times = []
    for _ in range(1 + _REPEATS):
        start = tick()
        work()
        times.append(tick() - start)
    return min(times[1:])


def codec_seconds(tick: Callable[[], float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds per byte of float32 for each format, to encode or to decode, and those of a short message.

    Of a way to sum gradients, it is one of its `Sync.codings`.
    """
    formats = [format for format in FORMATS if format != "fp32"]
    short = {format: _link_seconds(format, _SHORT, tick) for format in formats}
    long = {format: _link_seconds(format, _LONG, tick) for format in formats}
    costs = {format: max(0.0, long[format] - short[format]) / (4 * math.prod(_LONG)) for format in formats}
    sums = {s.codec: _sum_seconds(resolve(s.coding), tick) / s.codings for s in SYNCS.values() if s.coding}
    return {**costs, **sums, "topk": _sum_seconds(_largest, tick) / 2}, short


def coded_bytes(boundary: Boundary) -> dict[str, tuple[int, int]]:
    """Return the bytes per sample that a link carries across a boundary in each format, forward and back."""
    ways = [one for one in (boundary, boundary.gradients) if one.tensors]
    found = {format: [BoundaryCodec(one, format).bytes_per_sample for one in ways] for format in FORMATS}
    return {format: (sizes[0], sizes[1] if len(sizes) > 1 else 0) for format, sizes in found.items()}


def _largest(gradients: Tensor) -> Tensor:
    """Return the largest of the gradients, as they are decoded."""
    return fragment.decode(fragment.encode(gradients.flatten()), gradients.numel())


def _sum_seconds(code: Callable[[Tensor], Tensor], tick: Callable[[], float]) -> float:
    """Return the seconds of a way of summing per byte of gradients: of both conversions together."""
    gradients = torch.randn(512, 1024)
    return _least_seconds(lambda: code(gradients), tick) / gradients.nbytes


def _link_seconds(format: str, shape: tuple[int, ...], tick: Callable[[], float]) -> float:
    """Return the mean seconds to encode or decode a message of `shape`, whose first dimension is its rows."""
    codec = Codec(TensorSpec(shape[1:]), format)
    tensor = torch.randn(*shape)
    return _least_seconds(lambda: codec.decode(codec.encode(tensor)), tick) / 2
