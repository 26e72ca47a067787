"""What is compared: HorizonML's engine, and its peers on the same model, batch and number of threads.

Run as `python -m benchmarks.peers CONFIG`, one process per rank: it builds what CONFIG (JSON) names, prints "ready",
and then, for each line `N` on standard input, runs N steps and prints their wall times as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.job.schema import Job
from horizonml.machine.host import keep_freed_memory, rss_bytes
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import PLAIN, Execution, Plan
from horizonml.profiling.execution import execution_here
from horizonml.state.spec import Sgd
from horizonml.state.train_state import TrainState
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec

StepFunction = Callable[[], None]
LR = 0.05


class RandomBatch:
    """A batch of noise, the same on all ranks."""

    def __init__(self, size: int, shape: tuple[int, ...], classes: int = 10) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size = size
        self._inputs = torch.randn(size, *shape, generator=generator)
        self._targets = torch.randint(0, classes, (size,), generator=generator)

    def inputs(self, start: int, stop: int) -> Tensor:
        return self._inputs[start:stop]

    def targets(self, start: int, stop: int) -> Tensor:
        return self._targets[start:stop]


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """The same for all: PyTorch's fused SGD."""
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4, fused=True)


def horizonml(config: dict[str, Any], rank: int, store: PrefixStore, model: Model, batch: RandomBatch) -> StepFunction:
    """HorizonML's engine with the plan of the configuration."""
    plan = Plan.from_json(config["plan"])
    group = Group(store, rank, config["world_size"], 300.0)
    execution = execution_of(config, model, group)
    session = Session(plan, TrainState(model, Sgd()), group, Classification(), batch.size, execution)

    def step() -> None:
        session.step(batch, LR)

    return step


def execution_of(config: dict[str, Any], model: Model, group: Group) -> Execution:
    """How layers run: plain, unless the configuration says `"execution": "auto"`, for which this device is tried.

    Rank 0 tries it for all, because members of a stage must not differ in how their weights lie in memory.
    """
    if config.get("execution") != "auto":
        return PLAIN
    job = Job.model_validate(
        {
            "batch_size": config["batch_size"],
            "precision": config.get("precision", "fp32"),
            "model": {"name": config["model"], "options": config.get("options", {})},
            "parallel": {"strategy": "ddp", "workers": config["world_size"]},
        }
    )
    own = execution_here(job, model, config["world_size"], 1 << 20, lambda text: None) if group.rank == 0 else PLAIN
    found = group.exchange(own)[0]
    return found.among([found])


def ddp(config: dict[str, Any], rank: int, store: PrefixStore, model: Model, batch: RandomBatch) -> StepFunction:
    """A minimal training loop on torch's DistributedDataParallel."""
    world_size = config["world_size"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    own = slice(batch.size * rank // world_size, batch.size * (rank + 1) // world_size)
    images, labels = batch.inputs(own.start, own.stop), batch.targets(own.start, own.stop)
    layers = model.stage(0, len(model.chain))
    if config.get("channels_last"):
        images, layers = images.to(memory_format=torch.channels_last), layers.to(memory_format=torch.channels_last)
    module = nn.parallel.DistributedDataParallel(layers, **config.get("ddp_options", {}))
    optimizer = optimizer_for(module)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(module(images), labels).backward()
        optimizer.step()

    return step


def horovod(config: dict[str, Any], rank: int, store: PrefixStore, model: Model, batch: RandomBatch) -> StepFunction:
    """A minimal training loop on Horovod, over gloo."""
    import horovod.torch as hvd

    from horizonml.engine.sync.horovod import rendezvous

    world_size = config["world_size"]
    os.environ.update(rendezvous(Group(store, rank, world_size, 300.0)))
    hvd.init()
    own = slice(batch.size * rank // world_size, batch.size * (rank + 1) // world_size)
    images, labels = batch.inputs(own.start, own.stop), batch.targets(own.start, own.stop)
    module = model.stage(0, len(model.chain))
    optimizer = hvd.DistributedOptimizer(optimizer_for(module), module.named_parameters())
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(module(images), labels).backward()
        optimizer.step()

    return step


def sequential(config: dict[str, Any], rank: int, store: PrefixStore, model: Model, batch: RandomBatch) -> StepFunction:
    """The naive layer split: one rank after the other, forward and back again, each waiting for its neighbour."""
    plan, world_size = Plan.from_json(config["plan"]), config["world_size"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    own = plan.stages[rank]
    module = model.stage(own.start, own.stop)
    optimizer = optimizer_for(module)
    images, labels = batch.inputs(0, batch.size), batch.targets(0, batch.size)
    entry, exit_ = model.chain.boundaries[own.start], model.chain.boundaries[own.stop]

    def step() -> None:
        optimizer.zero_grad()
        entered = images
        if rank > 0:
            entered = torch.empty(batch.size, *entry.tensors[0].shape)
            dist.recv(entered, rank - 1)
            entered.requires_grad_()
        left = module(entered)
        if rank == world_size - 1:
            functional.cross_entropy(left, labels).backward()
        else:
            dist.send(left.detach(), rank + 1)
            gradient = torch.empty(batch.size, *exit_.tensors[0].shape)
            dist.recv(gradient, rank + 1)
            left.backward(gradient)
        if rank > 0:
            assert entered.grad is not None
            dist.send(entered.grad, rank - 1)
        optimizer.step()

    return step


def torch_pipeline(
    config: dict[str, Any], rank: int, store: PrefixStore, model: Model, batch: RandomBatch
) -> StepFunction:
    """A schedule of torch.distributed.pipelining, with static shapes; ranks may hold several stages."""
    from torch.distributed import pipelining

    plan = Plan.from_json(config["plan"])
    world_size = config["world_size"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    held = plan.stages_of(rank)
    modules = [model.stage(plan.stages[number].start, plan.stages[number].stop) for number in held]
    rows = batch.size // plan.micro_batches
    assert rows * plan.micro_batches == batch.size, "torch needs equal micro-batches"
    boundaries = [torch.empty(rows, *boundary.tensors[0].shape, device="meta") for boundary in model.chain.boundaries]
    stages = [
        pipelining.PipelineStage(
            module,
            number,
            len(plan.stages),
            torch.device("cpu"),
            input_args=(boundaries[plan.stages[number].start].requires_grad_(number > 0),),
            output_args=(boundaries[plan.stages[number].stop].requires_grad_(),),
        )
        for number, module in zip(held, modules, strict=True)
    ]
    kind = getattr(pipelining, TORCH_SCHEDULES[config["peer"]])
    single = len(plan.stages) == world_size
    schedule = kind(stages[0] if single else stages, plan.micro_batches, loss_fn=functional.cross_entropy)
    optimizer = optimizer_for(nn.ModuleList(modules))
    inputs = (batch.inputs(0, batch.size),) if 0 in held else ()
    last = {"target": batch.targets(0, batch.size), "losses": []} if len(plan.stages) - 1 in held else {}

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **last)
        optimizer.step()

    return step


TORCH_SCHEDULES = {
    "torch_1f1b": "Schedule1F1B",
    "torch_gpipe": "ScheduleGPipe",
    "torch_interleaved": "ScheduleInterleaved1F1B",
    "torch_interleaved_zb": "ScheduleInterleavedZeroBubble",
    "torch_zbv": "ScheduleZBVZeroBubble",
}


PEERS = {
    "horizonml": horizonml,
    "ddp": ddp,
    "horovod": horovod,
    "sequential": sequential,
    **dict.fromkeys(TORCH_SCHEDULES, torch_pipeline),
}


def main() -> None:
    """One rank of one variant."""
    config = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    idle = rss_bytes()
    torch.set_num_threads(config["threads"])
    if config["keep_memory"]:
        keep_freed_memory()
    store = PrefixStore(config["name"], TCPStore("127.0.0.1", config["port"], None, False, wait_for_workers=False))
    batch = RandomBatch(config["batch_size"], tuple(config["shape"]))
    model = build(
        ModelSpec(name=config["model"], options=config.get("options", {})), 0, 10, InputSpec.of(tuple(config["shape"]))
    )
    step = PEERS[config["peer"]](config, rank, store, model, batch)
    print("ready", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        print(json.dumps({"times": times, "rss": rss_bytes(), "idle": idle}), flush=True)
    os._exit(0)  # torch's process group would wait for its peers


if __name__ == "__main__":
    main()
