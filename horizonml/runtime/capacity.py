"""Finds out what the ranks of a group may use of their machines, and refuses plans that cannot fit there.

The warm-ups on which a run tries lossy formats cost at most `MOST_OF_RUN` of its steps; here is how long they are, and
which runs are too short for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.errors import JobError, PlanError
from horizonml.job.schema import Job
from horizonml.machine.accelerator import Compute, choose_device, computing, use
from horizonml.machine.host import requested_device, shared_machine
from horizonml.machine.resources import available_cores, memory_share
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.planner.profile import Host
from horizonml.planner.strategies import syncs_of
from horizonml.text import count, human_bytes


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

    @classmethod
    def here(cls, group: Group, taken: float) -> Capacity:
        """Return that of this rank; `taken` are the bytes of this process without its layers."""
        compute = computing()
        own = memory_share(group.hosts.count(group.hosts[group.rank])) - taken
        there = compute.memory()
        if there is not None:
            own = min(own, there) if compute.shared else there
        return cls(available_cores(), own, *shared_machine(), compute.label)


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
        place = (first.machine, first.machine_cores) if shared else ()
        hosts.append(Host(ranks, first.cores, first.memory, *place))
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
