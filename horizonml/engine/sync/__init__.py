"""Synchronises the gradients of a stage over its members: one file for each way, chosen by the plan's `Stage.sync`."""

from __future__ import annotations

from torch import nn

from horizonml.engine.sync.allreduce import AllReduce, NcclAllReduce, has_gpus_of_its_own
from horizonml.engine.sync.base import Alone, GradientSync, Members, SyncedBuffers, trainable
from horizonml.engine.sync.channels import Channels
from horizonml.engine.sync.coded_sum import Int4AllReduce
from horizonml.engine.sync.compressed import HalfAllReduce, PowerSgdAllReduce
from horizonml.plan.plan import Sync


def sync_for(module: nn.Module, members: Members) -> GradientSync:
    """Return this rank's `GradientSync` of a stage; all members call this together. Raises PeerLost."""
    if len(members.ranks) == 1:
        return Alone()
    if not members.stage.splits_channels and not trainable(module) and not SyncedBuffers(module).named():
        return Alone()  # in a stage that is frozen, there is nothing to agree on
    match members.stage.sync:
        case Sync.LOCAL:
            raise ValueError("members that take local steps train by their replica's plan, in which stages have one")
        case Sync.ALL_REDUCE if has_gpus_of_its_own(members):
            return NcclAllReduce(module, members)
        case Sync.ALL_REDUCE:
            return AllReduce(module, members)
        case Sync.FP16:
            return HalfAllReduce(module, members)
        case Sync.POWERSGD:
            return PowerSgdAllReduce(module, members)
        case Sync.INT4:
            return Int4AllReduce(module, members)
        case Sync.CHANNELS:
            return Channels(module, members)
        case Sync.HOROVOD | Sync.HOROVOD_FP16:
            from horizonml.engine.sync.horovod import HorovodSync  # an optional dependency

            return HorovodSync(module, members)
