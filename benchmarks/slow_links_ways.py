"""What `benchmarks.slow_links` compares: data sets with a job for each, and ways of training them on four devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RANKS = 4
EVERY = 32  # steps; evaluations and ends are at multiples of it, so that they are at synchronisations


@dataclass(frozen=True)
class Task:
    """What is learned: `job` as a job file says it."""

    name: str
    title: str
    target: float  # held-out accuracy, the time to which is measured
    every: int  # steps between two synchronisations, in all ways that take local steps
    job: dict[str, Any]


_COMMON: dict[str, Any] = {
    "batch_size": 64,
    "lr_schedule": {"name": "cosine", "warmup_steps": 10},
    "checkpoint": {"enabled": False},
    "recovery": {"mirrors": 0},
    "telemetry": {"timeline_every": 0, "divergence_every": 0},
}
TASKS = {
    "digits": Task(
        "digits",
        "the embedded digits, 0.29 million parameters",
        0.98,
        32,
        {
            **_COMMON,
            "steps": 12 * EVERY,
            "model": {"name": "digits_cnn"},
            "data": {"name": "digits"},
            "evaluate": {"every_steps": EVERY},
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        },
    ),
    "clutter": Task(
        "clutter",
        "two digits and clutter, 100 classes, 0.25 million parameters",
        0.89,
        16,
        {
            **_COMMON,
            "steps": 64 * EVERY,
            "model": {"name": "benchmarks.clutter:net"},
            "data": {"name": "benchmarks.clutter:pictures", "workers": 0},
            "evaluate": {"every_steps": 4 * EVERY},
            "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        },
    ),
}


@dataclass(frozen=True)
class Way:
    """A way of training: HorizonML with settings of its job, or a peer by its name in `benchmarks.slow_links_peers`."""

    name: str
    title: str
    settings: dict[str, Any] = field(default_factory=dict)  # fields of the job, by dotted name
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the peer
    package: str | None = None  # that only the environment of `--python` has
    local: bool = False  # whether it takes local steps, so many as the task says
    first: int = 2  # steps at the beginning that are unlike the others
    planned: bool = False  # whether its plan, and so its accuracy and traffic, depend on the links
    like: str | None = None  # the way that has the same accuracy after each step, for what is planned and exact
    ranks: int = RANKS

    def cycle(self, task: str) -> int:
        """Return the steps after which the traffic repeats."""
        return TASKS[task].every if self.local else 2 * EVERY if self.planned and self.like is None else 1

    def skip(self, task: str) -> int:
        """Return the steps at the beginning that are left out when the seconds of a step are measured."""
        return max(self.first, self.cycle(task) if self.cycle(task) > 1 else 0)


def _ours(name: str, title: str, settings: dict[str, Any], **more: Any) -> Way:
    return Way(name, title, {f"parallel.{key}": value for key, value in settings.items()}, **more)


def _local(form: str, **more: Any) -> dict[str, Any]:
    return {"strategy": "ddp", "sync": {"every": EVERY, "format": form, **more}}  # `every` is the task's, in fact


_DILOCO = {"learning_rate": 0.7, "momentum": 0.9}
_MEAN = {"learning_rate": 1.0, "momentum": 0.0}  # an outer optimizer that takes the mean of all parameters


WAYS = {
    way.name: way
    for way in (
        Way("torch-ddp", "torch DDP", peer="ddp"),
        _ours("ddp", "HorizonML ddp", {"strategy": "ddp"}),
        _ours("single", "one device alone", {"strategy": "single"}, ranks=1),
        _ours("auto", "HorizonML auto, exact", {"strategy": "auto"}, planned=True, like="ddp"),
        Way("torch-powersgd", "torch DDP, PowerSGD hook", peer="powersgd", first=12),
        _ours("powersgd", "HorizonML ddp, PowerSGD", {"strategy": "ddp", "gradient_compression": "powersgd"}, first=12),
        _ours("int4", "HorizonML ddp, int4 sums", {"strategy": "ddp", "gradient_compression": "int4"}),
        Way("torch-localsgd", "torch PostLocalSGD", peer="localsgd", local=True),
        Way("torchft-localsgd", "torchft LocalSGD", peer="torchft_localsgd", package="torchft", local=True),
        Way("torchft-diloco", "torchft DiLoCo", peer="torchft_diloco", package="torchft", local=True),
        Way("hivemind", "Hivemind, local updates, 8 bits", peer="hivemind", package="hivemind", local=True),
        _ours("local", "HorizonML, local steps as DiLoCo", _local("fp32", **_DILOCO), local=True),
        _ours("local-int4", "HorizonML, local steps, means in int4", _local("int4", **_MEAN), local=True),
        _ours("local-stream", "HorizonML, the same, streamed", _local("int4", fragments=2, delay=4, **_MEAN),
              local=True),
        _ours("auto-lossy", "HorizonML auto, exact: false", {"strategy": "auto", "exact": False}, planned=True),
    )
}  # fmt: skip
