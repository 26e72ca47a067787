"""Agrees on how each rank runs the layers; it keeps to that for as long as it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.models.zoo import Model
from horizonml.plan.execution import Execution, Executions, to_json
from horizonml.planner.hardware import Host
from horizonml.profiling.executions import choose_executions, read_layers, unused_bf16
from horizonml.runtime.life import Life
from horizonml.runtime.warm_up import why_untried


def use_executions(
    life: Life, group: Group, model: Model, info: DataInfo, hosts: Sequence[Host], say: Callable[[str], None]
) -> Executions:
    """Return how this rank runs each layer; all ranks call this together.

    Results depend on it, as they do on the number of threads, so a rank keeps its choice, and one that is new on a
    machine takes over that of the others there.
    """

    def read(value: Any) -> tuple[Execution, ...] | None:
        return None if value is None else read_layers(model, value)

    kept = group.gather_json(None if life.executions is None else to_json(life.executions), read)
    here = next(host for host in hosts if group.rank in host.ranks)
    own = next((kept[rank] for rank in (group.rank, *here.ranks) if kept[rank] is not None), None)
    if any(all(kept[rank] is None for rank in host.ranks) for host in hosts):
        steps = life.job.total_steps(-(-info.train // life.job.batch_size))
        job, why = life.job, why_untried(life.job, info)
        if job.precision == "auto" and why is not None:
            say(f"precision: auto: layers are computed in fp32, as {why}")
            job = job.model_copy(update={"precision": "fp32"})
        chosen = choose_executions(job, model, group, here, steps, say)
        own = own or chosen
    assert own is not None
    everyone = [layers or () for layers in group.gather_json(to_json(own), read)]
    unused = unused_bf16(life.job, everyone) if life.executions is None else None
    if unused is not None:
        say(unused)
    life.executions = own
    return Executions.among(own, everyone)
