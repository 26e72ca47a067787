"""A rank of another library in `benchmarks.slow_links`, on the same data, model, batches and learning rates.

Run as `python -m benchmarks.slow_links_peers CONFIG`. It writes records in HorizonML's form, as far as
`benchmarks.slow_links_run` reads them. Rank 0 evaluates, which no time includes. Ways with local steps are evaluated
right after a synchronisation.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from benchmarks.slow_links_ways import TASKS
from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.data.dataset import Data, DataBatch
from horizonml.data.sampler import sampler_for
from horizonml.job.schema import Job
from horizonml.machine.host import keep_freed_memory
from horizonml.machine.signals import watch_launcher
from horizonml.runtime.agreement import describe_together
from horizonml.state.optim import learning_rate

_STORE_PORT = 29500
_TIMEOUT = timedelta(seconds=300)


def address(rank: int) -> str:
    """Return a rank's address, as `benchmarks.chaos.network` gives them."""
    return f"10.251.1.{1 + rank}"


@dataclass
class World:
    """What a peer gets: its place, and what it trains."""

    rank: int
    size: int
    options: dict[str, Any]
    module: nn.Module
    optimizer: torch.optim.Optimizer


Forward = Callable[[Tensor], Tensor]
Peer = tuple[nn.Module, Any]  # what computes the outputs, and what has `zero_grad` and `step`


def connect(world: World) -> None:
    """Form torch's default group over the cables."""
    store = dist.TCPStore(address(0), _STORE_PORT, world.size, world.rank == 0, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)


def ddp(world: World) -> Peer:
    """DistributedDataParallel, as its documentation recommends it for a model that does not change."""
    connect(world)
    return nn.parallel.DistributedDataParallel(
        world.module, static_graph=True, gradient_as_bucket_view=True
    ), world.optimizer


def powersgd(world: World) -> Peer:
    """DistributedDataParallel with torch's PowerSGD hook of rank 4, after ten whole steps, and one bucket (see below).

    With several buckets, gloo mixes up their collectives.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    connect(world)
    module = nn.parallel.DistributedDataParallel(world.module, bucket_cap_mb=1000, gradient_as_bucket_view=True)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=10, min_compression_rate=1
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module, world.optimizer


def localsgd(world: World) -> Peer:
    """torch's post-local SGD from the first step on: gradients stay at home, parameters are averaged now and then."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    connect(world)
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    module = nn.parallel.DistributedDataParallel(world.module, broadcast_buffers=False)
    state = PostLocalSGDState(None, alone, start_localSGD_iter=0, post_local_gradient_allreduce=False)
    module.register_comm_hook(state, post_localSGD_hook)
    every = world.options["every"]
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
    return module, PostLocalSGDOptimizer(world.optimizer, averager)


def _manager(world: World) -> Any:
    """Return torchft's manager of a replica group of one rank."""
    from torchft import Manager, ProcessGroupGloo

    own = address(world.rank)
    store = dist.TCPStore(own, _STORE_PORT, None, True, wait_for_workers=False)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{os.environ['HORIZONML_RENDEZVOUS']}"
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        min_replica_size=world.size,
        load_state_dict=world.module.load_state_dict,
        state_dict=world.module.state_dict,
        use_async_quorum=False,
        init_sync=False,  # all begin with the same parameters
        replica_id=f"slow_{world.rank}",
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        hostname=own,
        heartbeat_interval=timedelta(seconds=1),  # by default ten a second, which a slow link would feel
    )
    manager.kept = store
    return manager


def torchft_localsgd(world: World) -> Peer:
    """torchft's LocalSGD, which averages parameters."""
    from torchft.local_sgd import LocalSGD

    LocalSGD(_manager(world), world.module, world.optimizer, world.options["every"]).__enter__()
    return world.module, world.optimizer


def torchft_diloco(world: World) -> Peer:
    """torchft's DiLoCo with the outer optimizer of its paper."""
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(world.module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    DiLoCo(
        _manager(world), [world.module], world.optimizer, outer, world.options["every"], use_bucketization=True
    ).__enter__()
    return world.module, world.optimizer


def hivemind(world: World) -> Peer:
    """Hivemind's optimizer with local updates, which averages parameters and statistics in 8 bits in the background."""
    import hivemind as library
    from hivemind.compression import Uniform8BitQuantization

    first, own = Path(world.options["folder"]) / "first-peer", f"/ip4/{address(world.rank)}/tcp/0"
    deadline = time.monotonic() + _TIMEOUT.total_seconds()
    while world.rank and not first.exists():
        assert time.monotonic() < deadline, "rank 0 has not published its address"
        time.sleep(0.1)
    known = json.loads(first.read_text()) if world.rank else []
    dht = library.DHT(host_maddrs=[own], initial_peers=known, start=True)
    if not world.rank:
        part = first.with_suffix(".part")
        part.write_text(json.dumps([str(one) for one in dht.get_visible_maddrs()]))
        part.rename(first)
    optimizer = library.Optimizer(
        dht=dht,
        run_id="slow",
        target_batch_size=64 * world.options["every"],
        batch_size_per_step=64 // world.size,
        optimizer=world.optimizer,
        use_local_updates=True,
        matchmaking_time=1.0,
        averaging_timeout=60.0,
        state_averaging_compression=Uniform8BitQuantization(),
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.5},
        averager_opts={"target_group_size": world.size, "min_group_size": 2},
        verbose=True,
    )
    return world.module, optimizer


PEERS: dict[str, Callable[[World], Peer]] = {
    "ddp": ddp,
    "powersgd": powersgd,
    "localsgd": localsgd,
    "torchft_localsgd": torchft_localsgd,
    "torchft_diloco": torchft_diloco,
    "hivemind": hivemind,
}


class Records:
    """Writes rank 0's records."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "rank-0.jsonl").open("w", encoding="utf-8", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        """Add a record."""
        self._file.write(json.dumps({"kind": kind, **values, "time": time.time()}) + "\n")


def pictures(batch: DataBatch, start: int, stop: int) -> Tensor:
    """Return the inputs of some rows of a batch."""
    inputs = batch.inputs(start, stop)
    assert isinstance(inputs, Tensor)
    return inputs


@torch.no_grad()
def accuracy(module: nn.Module, data: Data) -> float:
    """Return the accuracy on the held-out samples."""
    module.eval()
    right, count = 0, data.info.held_out
    for first in range(0, count, 500):
        batch = data.batch(False, torch.arange(first, min(count, first + 500)))
        right += int((module(pictures(batch, 0, batch.size)).argmax(1) == batch.targets(0, batch.size)).sum())
    module.train()
    return right / count


def train(job: Job, data: Data, world: World, records: Records | None) -> None:
    """Train to the end of the job."""
    module, optimizer = PEERS[world.options["peer"]](world)
    sampler = sampler_for(data.info, job.batch_size, job.seed)
    assert job.steps is not None
    for step in range(job.steps):
        epoch, number = divmod(step, sampler.steps_per_epoch)
        batch = data.batch(True, sampler.indices(epoch, number))
        own = batch.size * world.rank // world.size, batch.size * (world.rank + 1) // world.size
        rate = learning_rate(job.lr_schedule, job.optimizer.lr, step, sampler.steps_per_epoch, job.steps)
        for group in world.optimizer.param_groups:
            group["lr"] = rate
        began = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(module(pictures(batch, *own)), batch.targets(*own)).backward()
        optimizer.step()
        if records is None:
            continue
        records.write("step", step=step + 1, wall=time.perf_counter() - began)
        if (step + 1) % (job.evaluate.every_steps or job.steps) == 0 or step + 1 == job.steps:
            began = time.perf_counter()
            found = accuracy(world.module, data)
            records.write("evaluation", step=step + 1, accuracy=found, seconds=time.perf_counter() - began)


def main() -> None:
    """Run a rank."""
    watch_launcher()
    torch.set_num_threads(1)
    keep_freed_memory()
    options = json.loads(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    job = Job.model_validate({**TASKS[options["task"]].job, "seed": options["seed"]})
    info, model = describe_together(job, Group(None, 0, 1, 60.0))
    data = load(job.data, info, Path("data"))
    module = model.stage(0, len(model.chain))
    spec = job.optimizer
    optimizer = torch.optim.SGD(module.parameters(), spec.lr, spec.momentum, weight_decay=spec.weight_decay, fused=True)
    train(
        job, data, World(rank, size, options, module, optimizer), Records(Path(options["folder"])) if not rank else None
    )
    time.sleep(1.0)  # what the others still want of this rank's store
    for child in psutil.Process().children(recursive=True):
        child.kill()  # Hivemind's daemons
    os._exit(0)  # torch's process group would wait for its peers


if __name__ == "__main__":
    main()
