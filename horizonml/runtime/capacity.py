"""Finds out what the ranks of a group may use of their machines, and refuses plans that cannot fit there."""

from __future__ import annotations

from collections.abc import Sequence

from horizonml.comm.expected import fields, number, text
from horizonml.comm.group import Group
from horizonml.errors import PlanError
from horizonml.machine.host import shared_machine
from horizonml.machine.resources import available_cores, memory_share
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.planner.hardware import Host
from horizonml.text import human_bytes


def find_hosts(group: Group, taken: float) -> list[Host]:
    """Return the machines and containers of a group, with what each of its ranks may use there.

    `taken` are the bytes of this process without its layers, which are not there for the model.
    """
    nodes, rank = group.hosts, group.rank
    own = memory_share(nodes.count(nodes[rank])) - taken
    limits = group.gather_json([available_cores(), own, *shared_machine()], fields(number, number, text, number))
    machines = {node: str(limits[nodes.index(node)][2]) for node in nodes}
    hosts = []
    for node in dict.fromkeys(nodes):
        cores, memory, machine_, machine_cores = limits[nodes.index(node)]
        shared = sum(other == machine_ for other in machines.values()) > 1
        ranks = tuple(rank for rank, other in enumerate(nodes) if other == node)
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
