"""Finds out what the ranks of a group may use of their machines, and refuses plans that cannot fit there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horizonml.comm.expected import fields, number, text
from horizonml.comm.group import Group
from horizonml.errors import JobError, PlanError
from horizonml.job.schema import Job
from horizonml.machine.accelerator import Compute, choose_device, computing, use
from horizonml.machine.host import shared_machine
from horizonml.machine.resources import available_cores, memory_share
from horizonml.machine.wish import wished
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.planner.hardware import Host
from horizonml.planner.strategies import uses_horovod
from horizonml.text import human_bytes


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
    wish, source = wished(job.device)
    if uses_horovod(job.parallel):
        if wish not in ("auto", "cpu"):
            raise JobError(
                f"{source}: {wish}, but parallel.strategy: horovod computes on processors here; choose cpu, or ddp"
            )
        wish = "cpu"
    return choose_device(wish, place, source)


def find_hosts(group: Group, taken: float) -> list[Host]:
    """Return the machines and containers of a group, with what each of its ranks may use there.

    `taken` are the bytes of this process without its layers, which are not there for the model. An accelerator
    is a host with one core, which the ranks share that compute on it, and with its own memory.
    """
    nodes, rank, compute = group.hosts, group.rank, computing()
    own = memory_share(nodes.count(nodes[rank])) - taken
    there = compute.memory()
    if there is not None:
        own = min(own, there) if compute.shared else there
    told = [available_cores(), own, *shared_machine(), compute.label]
    limits = group.gather_json(told, fields(number, number, text, number, text))
    group.devices = {rank: str(limit[4]) for rank, limit in enumerate(limits) if limit[4]}
    machines = {node: str(limits[nodes.index(node)][2]) for node in nodes}
    hosts = []
    for node, label in dict.fromkeys(zip(nodes, (str(limit[4]) for limit in limits), strict=True)):
        ranks = tuple(rank for rank, other in enumerate(nodes) if (other, limits[rank][4]) == (node, label))
        cores, memory, machine_, machine_cores, _ = limits[ranks[0]]
        if label:
            hosts.append(Host(ranks, 1.0, float(memory) / len(ranks)))
            continue
        shared = sum(other == machine_ for other in machines.values()) > 1
        place = (str(machine_), float(machine_cores)) if shared else ()
        hosts.append(Host(ranks, float(cores), float(memory), *place))
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
