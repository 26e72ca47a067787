"""Finds out how a model can be cut so that its parts compute what it computes itself, and remembers it."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable

import torch

from horizonml import __version__
from horizonml.data.choose import load
from horizonml.data.dataset import DataInfo
from horizonml.data.seeds import name_seed
from horizonml.errors import DataError
from horizonml.files import cache_folder, write_atomically
from horizonml.job.schema import Job
from horizonml.machine.code import own_files
from horizonml.machine.resources import memory_left
from horizonml.models.boundary import Values, values_of
from horizonml.models.cutting import AUTOMATIC, Cutting
from horizonml.models.proof import check_shared, prove
from horizonml.models.zoo import Model
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
    path = cache_folder() / "cuts" / f"{name_seed(0, json.dumps(key, sort_keys=True)):016x}.json"
    try:
        return Cutting.from_json(json.loads(path.read_text())["cutting"])
    except (OSError, ValueError, LookupError, TypeError):
        _log.debug("no comparison of %s with its layers is known in %s", job.model.name, path)
    started = time.monotonic()
    samples, kind = _samples(job, model, info)
    cutting = prove(model, samples)
    taken = time.monotonic() - started
    layers = len(model.recut(cutting).chain)
    if layers > 1 and (cutting != AUTOMATIC or taken > _TOLD_SECONDS):
        say(
            f"{job.model.name}: its {layers} layers compute what the model computes, on {kind} ({human_seconds(taken)})"
        )
    try:
        write_atomically(path, json.dumps({"key": key, "cutting": cutting.to_json()}, indent=1).encode())
    except OSError as error:
        _log.info("how the model may be cut is not remembered: %s: %s", path, error.strerror or error)
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
