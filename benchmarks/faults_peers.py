"""The same training as `benchmarks.faults`, by other libraries: torch DDP under torchrun elastic, and torchft.

- torchrun: the loop of torch's elastic tutorial, with one agent for each rank, as if each were a machine of its own,
  and a snapshot each `SAVE_EVERY` steps. The rendezvous' store is a process of its own, which no fault hits.
- torchft: the loop of its example, with one replica group for each rank and a lighthouse, which no fault hits.

All settings that neither tutorial nor example sets are the defaults. Records are in HorizonML's form, as far as
`benchmarks.faults_read` needs them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.faults_cluster import BATCH_SIZE, Processes, free_port
from horizonml.machine.torchvision import import_torchvision

SAVE_EVERY = 28  # steps, which is an epoch of what HorizonML trains


class Torchrun(Processes):
    """torch DDP, with an elastic agent for each rank."""

    def __init__(self, folder: Path, world_size: int, python: str) -> None:
        super().__init__(folder, world_size)
        self._python, self._port = python, free_port()
        self.help("store", [python, "-m", "benchmarks.faults_peers", "store", str(self._port)])

    def command(self, rank: int) -> tuple[list[str], dict[str, str]]:
        elastic = [
            f"--nnodes=1:{self.world_size}", "--nproc-per-node=1", "--max-restarts=1000", "--rdzv-id=faults",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-conf=is_host=false",
            "--local-addr=127.0.0.1",
        ]  # fmt: skip
        script = ["-m", "benchmarks.faults_peers", "torchrun", str(self.folder), str(rank)]
        # Otherwise the workers' store ends with the agent that holds it (torch 2.13).
        return [self._python, "-m", "torch.distributed.run", *elastic, *script], {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
        }


class Torchft(Processes):
    """torchft's DDP, with a manager for each rank."""

    def __init__(self, folder: Path, world_size: int, python: str) -> None:
        super().__init__(folder, world_size)
        self._python, self._lighthouse = python, f"http://127.0.0.1:{(port := free_port())}"
        lighthouse = Path(python).parent / "torchft_lighthouse"
        if not lighthouse.exists():
            raise SystemExit(f"{python} has no torchft; install it into an environment of its own, and name that")
        quick = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]  # as its README says
        self.help("lighthouse", [str(lighthouse), "--bind", f"[::]:{port}", *quick])

    def command(self, rank: int) -> tuple[list[str], dict[str, str]]:
        script = [self._python, "-m", "benchmarks.faults_peers", "torchft", str(self.folder), str(rank)]
        return script, {"TORCHFT_LIGHTHOUSE": self._lighthouse}


class Records:
    """Writes what `faults_read` reads."""

    def __init__(self, folder: str, rank: str) -> None:
        self._file = (Path(folder) / f"rank-{rank}.jsonl").open("a", encoding="utf-8", buffering=1)

    def formed(self, generation: int, world_size: int) -> None:
        """Record a new group."""
        self._write(kind="run", generation=generation, world_size=world_size)

    def step(self, step: int, batch: int) -> None:
        """Record a step that counts."""
        self._write(kind="step", step=step, batch=batch)

    def broken(self) -> None:
        """Record that a group broke."""
        self._write(kind="end", outcome="failed")

    def _write(self, **record: Any) -> None:
        self._file.write(json.dumps({**record, "time": time.time()}) + "\n")


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and the optimizer of all libraries."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = import_torchvision().models.resnet18(num_classes=10)
    return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=5e-4, fused=True)


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    """A batch of noise: what is learned does not matter here."""
    return torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,))


def torchrun_worker(folder: str, node: str) -> None:
    """A rank of torch DDP, from the newest snapshot on, until it or its group ends."""
    records = Records(folder, node)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = parts()
    ddp, step, snapshot = DistributedDataParallel(model), 0, Path(folder) / "snapshot.pt"
    if snapshot.exists():
        saved = torch.load(snapshot)
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    number = torch.tensor([time.time_ns()])
    dist.broadcast(number, 0)
    records.formed(int(number), world_size)
    inputs, targets = batch_of(BATCH_SIZE // world_size + (rank < BATCH_SIZE % world_size))
    try:
        while True:
            optimizer.zero_grad()
            functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
            step += 1
            records.step(step, BATCH_SIZE)
            if rank == 0 and step % SAVE_EVERY == 0:
                state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, snapshot.with_suffix(".new"))
                os.replace(snapshot.with_suffix(".new"), snapshot)
    except RuntimeError:  # of gloo
        records.broken()
        raise


def torchft_worker(folder: str, rank: str) -> None:
    """A replica group of one rank."""
    from torchft import Manager, ProcessGroupGloo
    from torchft import Optimizer as ManagedOptimizer

    # The other one of torchft 0.2.0 ends the process, by a failed assertion, where a peer's connection is reset.
    from torchft.ddp import PureDistributedDataParallel as ManagedDDP

    records = Records(folder, rank)
    model, optimizer = parts()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"faults_{rank}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    ddp, managed = ManagedDDP(manager, model), ManagedOptimizer(manager=manager, optim=optimizer)
    inputs, targets = batch_of(BATCH_SIZE // 4)
    members = 0
    while True:
        before = manager.current_step()
        managed.zero_grad()
        functional.cross_entropy(ddp(inputs), targets).backward()
        managed.step()
        step = manager.current_step()
        if step == before:
            records.broken()
        elif step > before:
            if manager.num_participants() != members:
                members = manager.num_participants()
                records.formed(0, members)
            records.step(step, len(inputs) * members)


def serve_store(port: str) -> None:
    """The store at which torchrun's agents meet."""
    store = dist.TCPStore("127.0.0.1", int(port), None, True, wait_for_workers=False)
    while store.port:
        time.sleep(60)


WORKERS: dict[str, Callable[..., None]] = {"torchrun": torchrun_worker, "torchft": torchft_worker, "store": serve_store}

if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        WORKERS[sys.argv[1]](*sys.argv[2:])
