"""Lists the ways in which members of a stage agree on its gradients, and the formats that travel between stages.

Buckets are filled in the order of the backward pass, and a full one is sent while earlier layers are still being
computed (Li et al., VLDB 2020). The engine sums gradients in this way, and the planner predicts it.

`SYNCS` has one row for each way, with every fact that the engine, the planner, the job file and the documentation need
of it. To add a way, write its implementation and a row: see `docs/extending.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

HEADED = 64 << 10  # bytes of a message between stages from which on a header announces it
BUCKET_BYTES = 5 << 20  # larger ones leave more to be sent after the backward pass: 25 MB cost a tenth of a step
POWERSGD_RANK = 4  # columns of the matrices that approximate a gradient
POWERSGD_WORTH = 2  # PowerSGD is used for a parameter only if it sends this many times fewer numbers
# Up to these sizes a tree is faster than a ring: over a network, where its root carries n times the bytes, and on one
# machine, where only the number of messages counts.
TREE_BYTES = 128 << 10
TREE_BYTES_ON_ONE_HOST = 4 << 20
TREE_ARITY = 8


def in_buckets(sizes: Sequence[int], limit: float = BUCKET_BYTES) -> list[list[int]]:
    """Return the indices of `sizes` (in bytes), from the last to the first, grouped into buckets.

    A bucket has at most `limit` bytes, or a single index.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(sizes))):
        if not buckets or filled + sizes[index] > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def powersgd_numbers(shape: Sequence[int]) -> int:
    """Return how many numbers PowerSGD (Vogels et al., NeurIPS 2019) sends for a parameter of this shape."""
    if not shape:
        return 1
    rows, columns = shape[0], math.prod(shape[1:])
    thin = (rows + columns) * min(rows, columns, POWERSGD_RANK)
    return thin if thin * POWERSGD_WORTH < rows * columns else rows * columns


def tree_messages(place: int, members: int) -> int:
    """Return how many messages the member at `place` sends in a sum along a tree: to its children and to its parent."""
    first = TREE_ARITY * place + 1
    return max(0, min(first + TREE_ARITY, members) - first) + (place > 0)


@dataclass(frozen=True)
class Format:
    """Describes a format of activations and their gradients on a link between stages: a row of `FORMATS`."""

    ratio: float  # of its bytes to those of float32
    what: str
    error: str  # by how much each number is off; empty for exact formats
    tried_first: bool = False  # whether a run uses it only once a warm-up has shown what it costs in accuracy


# The most precise first. The bytes of int4 include its scales, of 16 bits for 64 values.
FORMATS = {
    "fp32": Format(1.0, "32-bit floats", ""),
    "bf16": Format(0.5, "16-bit floats", "each is off by at most 1/256 of itself"),
    "int8": Format(0.25, "8-bit integers", "each is off by at most 1/254 of the largest of its channel or sample"),
    "int4": Format(4.25 / 32, "4-bit integers", "each is off by at most 1/13 of the largest of 64", tried_first=True),
}


@dataclass(frozen=True, eq=False)
class Sync:
    """Describes one way in which members of a stage agree on its gradients: a row of `SYNCS`."""

    name: str  # in plans and job files
    what: str  # what the members sum or do, in words
    implementation: str  # `module:callable`, which makes a `GradientSync` from a stage's module and its `Members`
    # The more exact way that takes its place where it is too imprecise; None for exact ways. What is exact gives the
    # result of float32, apart from the order of additions.
    fallback: Sync | None = None
    error: str = ""  # by how much each number is off, where the way is not exact
    ratio: float = 1.0  # of the bytes that members sum to those of float32
    # How many numbers are sent for a parameter of a shape, where that depends on the shape.
    numbers: Callable[[Sequence[int]], int] | None = None
    # How often a member encodes or decodes each of its gradients, and `module:function`, which does it to a matrix of
    # them that often. The profile of a device measures it, and knows its seconds per byte by the name `codec`.
    codings: int = 0
    coding: str = ""
    codec: str = ""
    # Numbers that a member keeps of each trained parameter because they were left out of its own sum, and of each that
    # it sums for the others.
    remainders: tuple[float, float] = (0.0, 0.0)
    compression: str = ""  # the value of `parallel.gradient_compression` that asks for this in place of `exactly`
    offered: bool = False  # whether strategy auto may choose it where a job allows plans that are not exact
    tried_first: bool = False  # whether a run uses it only once a warm-up has shown what it costs in accuracy
    alone: str = ""  # what a stage does that agrees so, if it must be the only stage of its plan
    strategy: str = ""  # the strategy that asks for this, if the strategy is named after it
    package: str = ""  # the optional package that it needs
    install: str = ""  # how to get that package
    only_on_processors: bool = False  # whether ranks that use it cannot compute on accelerators
    sums_in_buckets: bool = True  # whether a bucket is summed while earlier layers are still being computed
    sums_along_trees: bool = False  # whether few bytes are summed along a tree
    sums_as_weights_lie: bool = False  # whether weights may have another memory format; other ways see matrices
    # Whether a newcomer may take part while it still receives its state: zeros must change nothing in the sums, which
    # come out alike on all members, bit for bit. PowerSGD and sums of 4 bits instead have each member add up what its
    # compression has left out, also of zeros; Horovod does not overlap with a member that has no backward pass; and
    # members that split channels do not hold each other's state.
    can_be_followed: bool = False

    ALL_REDUCE: ClassVar[Sync]
    FP16: ClassVar[Sync]
    INT4: ClassVar[Sync]
    POWERSGD: ClassVar[Sync]
    CHANNELS: ClassVar[Sync]
    HOROVOD: ClassVar[Sync]
    HOROVOD_FP16: ClassVar[Sync]
    LOCAL: ClassVar[Sync]

    @classmethod
    def named(cls, name: str) -> Sync:
        """Return the way with this name. Raises ValueError if there is none."""
        if name not in SYNCS:
            raise ValueError(f"{name[:40]!r} is no way to agree on gradients; there are {', '.join(SYNCS)}")
        return SYNCS[name]

    @property
    def exact(self) -> bool:
        """Return whether the result is that of float32, apart from the order of additions."""
        return self.fallback is None

    @property
    def exactly(self) -> Sync:
        """Return the exact way that would take its place."""
        return self if self.fallback is None else self.fallback.exactly

    @property
    def steps_alone(self) -> bool:
        """Return whether members take local steps, and sum nothing in a usual step."""
        return self is Sync.LOCAL

    @property
    def splits_channels(self) -> bool:
        """Return whether members split the channels of layers instead of the samples."""
        return self is Sync.CHANNELS

    def bytes_of(self, shapes: Sequence[Sequence[int]]) -> float:
        """Return the bytes that members sum of the gradients of parameters of these shapes."""
        if self.numbers is not None:
            return 4.0 * sum(map(self.numbers, shapes))
        return 4 * self.ratio * sum(map(math.prod, shapes))

    def load(self) -> Any:
        """Return what makes a rank's `GradientSync`, imported only now because it may need an optional package."""
        return resolve(self.implementation)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Sync], tuple[str]]:
        return Sync.named, (self.name,)


def resolve(path: str) -> Any:
    """Return what a path `module:name` of a row names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


_HOROVOD = "`make horovod` builds it into .venv in about four minutes (or choose ddp, which needs nothing)"
_HALVES = ("16-bit floats", "each is off by at most 1/2048 of itself")

# In the order in which strategy auto considers them: of those that it may choose, the most precise first.
Sync.ALL_REDUCE = Sync(
    "all-reduce",
    "32-bit floats",
    "horizonml.engine.sync.allreduce:exact_sums",
    sums_along_trees=True,
    sums_as_weights_lie=True,
    can_be_followed=True,
)
Sync.FP16 = Sync(
    "fp16",
    _HALVES[0],
    "horizonml.engine.sync.compressed:HalfAllReduce",
    fallback=Sync.ALL_REDUCE,
    error=_HALVES[1],
    ratio=0.5,
    codings=2,
    coding="horizonml.engine.sync.compressed:halves",
    codec="fp16",
    compression="fp16",
    offered=True,
    sums_as_weights_lie=True,
    can_be_followed=True,
)
Sync.INT4 = Sync(
    "int4",
    "4-bit numbers",
    "horizonml.engine.sync.compressed:Int4AllReduce",
    fallback=Sync.FP16,
    error="what rounding leaves out is added to the next sum",
    ratio=FORMATS["int4"].ratio,
    codings=4,  # its own and, to know the error, back; the others' parts of its own piece; and the sums likewise
    codec="int4",  # as on links, where it is measured
    remainders=(1.0, 1.0),
    compression="int4",
    offered=True,
    tried_first=True,
)
Sync.POWERSGD = Sync(
    "powersgd",
    "thin matrices (PowerSGD)",
    "horizonml.engine.sync.compressed:PowerSgdAllReduce",
    fallback=Sync.FP16,
    error="what they leave out is added to the next sum",
    numbers=powersgd_numbers,
    codings=1,
    coding="horizonml.engine.sync.compressed:thin",
    codec="powersgd",
    remainders=(1.0, 0.0),
    compression="powersgd",
    offered=True,
    tried_first=True,
    sums_in_buckets=False,
)
Sync.CHANNELS = Sync(
    "channels",
    "nothing, as members split the channels within layers",
    "horizonml.engine.sync.channels:Channels",
    alone="splits channels",
    strategy="tensor",
)
Sync.HOROVOD = Sync(
    "horovod",
    "32-bit floats by Horovod",
    "horizonml.engine.sync.horovod:HorovodSync",
    alone="sums its gradients by Horovod",
    strategy="horovod",
    package="horovod",
    install=_HOROVOD,
    only_on_processors=True,
)
Sync.HOROVOD_FP16 = replace(
    Sync.HOROVOD,
    name="horovod-fp16",
    what=f"{_HALVES[0]} by Horovod",
    fallback=Sync.HOROVOD,
    error=_HALVES[1],
    ratio=0.5,
    compression="fp16",
)
Sync.LOCAL = Sync("local", "nothing in a usual step, as members take local steps", "", Sync.ALL_REDUCE, ratio=0.0)

SYNCS: dict[str, Sync] = {sync.name: sync for sync in vars(Sync).values() if isinstance(sync, Sync)}


def offered() -> tuple[Sync, ...]:
    """Return the ways that strategy auto may choose where a job allows plans that are not exact, precise ones first."""
    return tuple(sync for sync in SYNCS.values() if sync.offered)


def compressed(exact: Sync, compression: str) -> Sync | None:
    """Return the way that sums as `exact` does, with what `parallel.gradient_compression` says, or None."""
    found = (sync for sync in SYNCS.values() if sync.compression == compression and compression)
    return next((sync for sync in found if sync.exactly is exact), None)
