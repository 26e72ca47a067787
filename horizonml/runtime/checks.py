"""What ranks find out before they train: how a model can be cut, what fits there, and which samples are broken.

A plan that cannot fit into the ranks' memory is refused. The warm-ups on which a run tries lossy formats cost at most
`MOST_OF_RUN` of its steps; here is how long they are, and which runs are too short for them.

Inputs and targets of a sample are read by different ranks, and a step has no message in which one could tell the other
that a sample is damaged. So every sample is tried once, by the ranks that read inputs, and all ranks agree on the list.
From then on, a replacement is a function of the list: it costs no message, and holds after a loss and for newcomers.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from horizonml import __version__
from horizonml.comm.expected import boolean, fields, items, optional, text, whole
from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.data.dataset import Data, DataBatch, DataInfo, WholeSamples
from horizonml.data.sampler import name_seed
from horizonml.engine.session import Trainer
from horizonml.errors import DataError, JobError, PlanError
from horizonml.files import cache_folder, write_atomically
from horizonml.job.schema import Job
from horizonml.machine.accelerator import Compute, choose_device, computing, use
from horizonml.machine.code import own_files
from horizonml.machine.emulation import is_emulated
from horizonml.machine.host import available_cores, memory_left, memory_share, requested_device, shared_machine
from horizonml.models.boundary import Values, values_of
from horizonml.models.cutting import AUTOMATIC, Cutting
from horizonml.models.proof import check_shared, prove
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.planner.profile import Host
from horizonml.planner.strategies import syncs_of
from horizonml.profiling import kept
from horizonml.text import count, human_bytes, human_seconds

_log = logging.getLogger(__name__)
_FORMAT = 2
_ROWS, _FEW_ROWS = 8, 4  # fewer where those of one sample are large
_MOST_BYTES = 8 << 20  # of a tensor between two layers, for one sample
_COPIES = 6  # of the parameters, with gradients, that the comparison holds
_TOLD_SECONDS = 1.0
_shared: set[int] = set()  # the models whose shared parameters have been looked at

Say = Callable[[str], None]


def is_checked(model: Model) -> bool:
    """Return whether parameters that the model shares between modules are known to be used as PyTorch does."""
    return not model.all_ties or id(model.recorded) in _shared


def check_shared_parameters(job: Job, model: Model, info: DataInfo, *, tries: bool) -> None:
    """Find out, on the rank that `tries`, how a model uses its shared parameters. Raises ModelError if otherwise."""
    _shared.add(id(model.recorded))
    if tries and not _is_too_large(model):
        check_shared(model, _samples(job, model, info)[0])


def proven_cutting(job: Job, model: Model, info: DataInfo, say: Say) -> Cutting:
    """Return how to cut a model so that its layers compute what it computes. Raises ModelError.

    The answer is kept for as long as the model's code, its options and the kind of its data are the same.
    """
    if len(model.chain) == 1:
        return model.cutting
    if _is_too_large(model):
        say(
            f"warning: {job.model.name} is not compared with its layers before it is cut, because that takes "
            f"{human_bytes(_bytes(model))} of memory on this device; what its Python code does beside PyTorch's "
            "operations may be lost"
        )
        return model.cutting
    key = _key(job, model)
    try:
        return Cutting.from_json(json.loads(kept.path_of("cuts", key).read_text())["cutting"])
    except (OSError, ValueError, LookupError, TypeError):
        _log.debug("no comparison of %s with its layers is known in %s", job.model.name, kept.path_of("cuts", key))
    started = time.monotonic()
    samples, kind = _samples(job, model, info)
    cutting = prove(model, samples)
    taken = time.monotonic() - started
    layers = len(model.recut(cutting).chain)
    if layers > 1 and (cutting != AUTOMATIC or taken > _TOLD_SECONDS):
        say(
            f"{job.model.name}: its {layers} layers compute what the model computes, on {kind} ({human_seconds(taken)})"
        )
    kept.write("cuts", key, {"cutting": cutting.to_json()})
    return cutting


def _bytes(model: Model) -> int:
    return _COPIES * sum(parameter.nbytes for parameter in model.recorded.parameters())


def _is_too_large(model: Model) -> bool:
    return _bytes(model) > memory_left()


def _samples(job: Job, model: Model, info: DataInfo) -> tuple[Values, str]:
    """Return a few inputs: training samples where this machine has the data, or else random ones; and what they are."""
    largest = max(boundary.bytes_per_sample for boundary in model.chain.boundaries)
    rows = max(1, min(_ROWS if largest <= _MOST_BYTES else _FEW_ROWS, info.train))
    try:
        data = load(job.data, info, cache_folder() / "data", inputs=True, targets=False)
        found = data.batch(True, torch.arange(rows), name_seed(job.seed, "cuts")).inputs(0, rows)
        return values_of(found), f"{count(rows, 'training sample')}"
    except DataError as error:
        _log.info("the model is compared with its layers on random samples: %s", error)
        return model.chain.boundaries[0].example(rows), "random samples"


def _key(job: Job, model: Model) -> dict[str, object]:
    """Return what a comparison depends on: above all, the code of the model's modules, and the user's own."""
    code = hashlib.sha256()
    for kind in sorted({type(module) for module in model.recorded.modules()}, key=lambda one: one.__qualname__):
        try:
            code.update(inspect.getsource(kind).encode())
        except (OSError, TypeError):  # as for a class of a notebook, which may be another one each time
            code.update(f"{kind!r} {time.time_ns()}".encode())
    for path in own_files():
        code.update(path.read_bytes())
    return {
        "format": _FORMAT,
        "version": __version__,
        "torch": torch.__version__,
        "model": job.model.identity(),
        "code": code.hexdigest(),
        "layers": model.chain.names,
        "boundaries": [[[tensor.shape, str(tensor.dtype)] for tensor in one.tensors] for one in model.chain.boundaries],
    }


def use_device(job: Job, place: int, say: Callable[[str], None]) -> None:
    """Let this process compute on the device that its rank, number `place` on its machine, is to use.

    Raises JobError.
    """
    found = device_of(job, place)
    if found.accelerates:
        say(f"this rank computes on {found.described}")
    elif found.why:
        say(f"warning: this rank computes on the processor: {found.why}")
    use(found)


def device_of(job: Job, place: int) -> Compute:
    """Return the device that rank number `place` on this machine is to compute on. Raises JobError."""
    requested, source = requested_device(job.device)
    own = next((sync for sync in syncs_of(job.parallel) if sync.only_on_processors), None)
    if own is not None:
        if requested not in ("auto", "cpu"):
            raise JobError(
                f"{source}: {requested}, but parallel.strategy: {own.strategy or own.name} computes on processors "
                "here; choose cpu, or ddp"
            )
        requested = "cpu"
    return choose_device(requested, place, source)


@dataclass(frozen=True)
class Capacity:
    """What a rank may use of its machine, and what its machine has in all."""

    cores: float
    memory: float  # bytes for the rank's layers
    machine: str  # a value that all containers of a machine share
    machine_cores: float
    device: str  # the label of the accelerator that the rank computes on, or nothing
    emulated: bool = False  # whether it computes as a device with fewer cores would

    @classmethod
    def here(cls, group: Group, taken: float) -> Capacity:
        """Return that of this rank; `taken` are the bytes of this process without its layers."""
        compute = computing()
        own = memory_share(group.hosts.count(group.hosts[group.rank])) - taken
        there = compute.memory()
        if there is not None:
            own = min(own, there) if compute.shared else there
        return cls(available_cores(), own, *shared_machine(), compute.label, is_emulated())


def find_hosts(group: Group, capacities: Sequence[Capacity]) -> list[Host]:
    """Return the machines and containers of a group, with what each of its ranks may use there.

    An accelerator is a host with one core, which the ranks share that compute on it, and with its own memory.
    """
    nodes = group.hosts
    group.devices = {rank: one.device for rank, one in enumerate(capacities) if one.device}
    machines = {node: capacities[nodes.index(node)].machine for node in nodes}
    hosts = []
    for node, label in dict.fromkeys(zip(nodes, (one.device for one in capacities), strict=True)):
        ranks = tuple(rank for rank, other in enumerate(nodes) if (other, capacities[rank].device) == (node, label))
        first = capacities[ranks[0]]
        if label:
            hosts.append(Host(ranks, 1.0, first.memory / len(ranks)))
            continue
        shared = sum(other == first.machine for other in machines.values()) > 1
        place = (first.machine, first.machine_cores) if shared else ("", 0.0)
        hosts.append(Host(ranks, first.cores, first.memory, *place, bursts=not first.emulated))
    return hosts


def state_bytes(plan: Plan, model: Model, optimizer_copies: int) -> list[float]:
    """Return the bytes of the parameters, gradients and optimizer state of each rank, activations not included.

    `optimizer_copies` is how many numbers the optimizer keeps per trained parameter.
    """
    needed = [0.0] * plan.world_size
    for stage in plan.stages:
        module = model.chain.slice(stage.start, stage.stop)
        tensors = [*module.parameters(), *module.buffers()]
        own = sum(tensor.nbytes for tensor in tensors)
        own += (1 + optimizer_copies) * sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        for rank, share in zip(stage.ranks, stage.shares, strict=True):
            needed[rank] += own * share if stage.splits_channels else own
    return needed


def refuse_what_cannot_fit(
    plan: Plan, model: Model, optimizer_copies: int, hosts: Sequence[Host], names: Sequence[str]
) -> None:
    """Raise PlanError if parameters, gradients and optimizer state alone take more memory than the ranks may use.

    Whether activations fit beside them is a question of measurements, which not every plan has.
    """
    needed = state_bytes(plan, model, optimizer_copies)
    for host in hosts:
        wanted, there = sum(needed[rank] for rank in host.ranks), len(host.ranks) * max(0.0, host.memory)
        if wanted <= there:
            continue
        who = f"rank {host.ranks[0]}" if len(host.ranks) == 1 else f"ranks {', '.join(map(str, host.ranks))} together"
        raise PlanError(
            f"the plan cannot fit into memory: on {names[host.ranks[0]]}, parameters, gradients and optimizer state of "
            f"{who} take {human_bytes(wanted)}, and {human_bytes(there)} are left for them. Divide the layers among "
            "more ranks (parallel.strategy: pipeline or auto, with more parallel.workers), or give them more memory"
        )


MOST_OF_RUN = 0.05
FEWEST_STEPS, MOST_STEPS = 20, 200  # of a warm-up
MOST_WARM_UPS = 4  # the exact one included
NOT_HELD_OUT = "there are no held-out samples to try it on"
LOCAL_STEPS = "a warm-up cannot show what local steps cost"
_EVALUATION = 1 / 3  # of the time of a training step, for as many samples


def trial_steps(job: Job, per_epoch: int, done: int) -> int:
    """Return the steps of each warm-up, or 0 if the rest of the run is too short for a trial."""
    left = job.total_steps(per_epoch) - done
    steps = int(left * MOST_OF_RUN / (MOST_WARM_UPS * (1 + _EVALUATION)))
    return min(steps, MOST_STEPS) if steps >= FEWEST_STEPS else 0


def why_untried(job: Job, info: DataInfo) -> str | None:
    """Return why no run of a job can try anything, as far as that is known before it begins, or None."""
    per_epoch = -(-info.train // job.batch_size)
    if not trial_steps(job, per_epoch, 0):
        return too_short(job, per_epoch)
    return None if info.held_out else NOT_HELD_OUT


def too_short(job: Job, per_epoch: int) -> str:
    """Return a clause that says why a run tries nothing."""
    return f"a run of {count(job.total_steps(per_epoch), 'step')} is too short to try it"


_CHUNK = 16  # samples that are tried at once
_SECONDS = 5.0  # after which the ranks tell each other that they are still busy


def find_unreadable(job: Job, session: Trainer, data: Data, say: Callable[[str], None]) -> DataInfo:
    """Return the description of the data, with what cannot be read of it; all ranks call this.

    What was found for files that have not changed since is not tried again. Raises DataError on all ranks if nothing
    can be read.
    """
    group, info = session.group, data.info
    readers = session.plan.stages[0].ranks
    reads = group.rank in readers
    note = _note_of(job, data) if reads else None
    noted = _read_note(note)
    one_problem = fields(boolean, whole(0, max(info.train, info.held_out) - 1), text)
    known = group.gather_json(noted, optional(items(one_problem)))
    mine = noted or []
    if any(known[rank] is None for rank in readers):
        mine = _try_all(data, group, readers.index(group.rank) if reads else None, len(readers))
    everyone = [tuple(one) for found in group.gather_json(mine, items(one_problem)) for one in found]
    if note is not None and noted is None:
        with suppress(OSError):  # they are tried again next time
            write_atomically(note, json.dumps(everyone).encode())
    train, held_out = (tuple(sorted({index for kind, index, _ in everyone if kind is part})) for part in (True, False))
    for bad, samples, name in ((train, info.train, "training"), (held_out, info.held_out, "held-out")):
        if samples and len(bad) >= samples:
            raise DataError(f"data.corrupt: none of the {name} samples can be read. {everyone[0][2]}")
    if everyone:
        found = count(len(train) + len(held_out), "sample")
        say(f"warning: {found} cannot be read and will be skipped. {everyone[0][2]}")
    return replace(info, unreadable=(train, held_out))


def _note_of(job: Job, data: Data) -> Path | None:
    """Return the file in which this machine notes what cannot be read, where it can tell whether files change."""
    if data.identity is None:
        return None
    content = f"{data.identity} {data.info.to_json()} {job.data.holdout}"
    return cache_folder() / "data" / f"unreadable-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"


def _read_note(note: Path | None) -> list[tuple[bool, int, str]] | None:
    if note is None or not note.exists():
        return None
    try:
        return [(bool(part), int(index), str(reason)) for part, index, reason in json.loads(note.read_text())]
    except (OSError, ValueError, TypeError):  # it is written anew
        return None


def _try_all(data: Data, group: Group, member: int | None, members: int) -> list[tuple[bool, int, str]]:
    """Try this rank's part of the samples; all ranks call this, and return together."""
    mine: list[tuple[bool, int, str]] = []
    tried = _tried(data, member, members) if member is not None else iter(())
    while True:  # no rank waits long enough for another to take it for lost
        until, busy = time.monotonic() + _SECONDS, False
        for found in tried:
            mine += found
            if time.monotonic() > until:
                busy = True
                break
        if not any(group.gather_json(busy, boolean)):
            return mine


def _tried(data: Data, member: int, members: int) -> Iterator[list[tuple[bool, int, str]]]:
    """Try every sample of this rank's part; yield what is wrong as (whether it is for training, index, reason)."""
    work = (
        (batch, training, start)
        for training, samples in ((True, data.info.train), (False, data.info.held_out))
        for batch in [DataBatch(data.train if training else data.held_out, torch.arange(samples))]
        for start in range(_CHUNK * member, samples, _CHUNK * members)
    )
    threads = max(1, min(8, int(available_cores())))
    with ThreadPoolExecutor(threads, "try") as executor:
        while some := list(islice(work, 2 * threads)):
            yield from executor.map(lambda one: _problems(*one), some)


def _problems(batch: DataBatch, training: bool, start: int) -> list[tuple[bool, int, str]]:
    stop = min(start + _CHUNK, batch.size)
    if _problem(batch, start, stop) is None:
        return []
    found = [(index, _problem(batch, index, index + 1)) for index in range(start, stop)]
    return [(training, index, problem) for index, problem in found if problem is not None]


def _problem(batch: DataBatch, start: int, stop: int) -> str | None:
    try:
        batch.rows(start, stop, inputs=True, targets=isinstance(batch.split, WholeSamples))
    except DataError as error:
        return str(error)
    return None
