"""Synchronises the gradients of a stage over its members, in the way that the plan's `Stage.sync` names.

`SYNCS` in `horizonml/plan/syncs.py` names the implementation of each way: most have a file of their own here.
"""

from __future__ import annotations

from torch import nn

from horizonml.engine.sync.base import Alone, GradientSync, Members, SyncedBuffers, trainable


def sync_for(module: nn.Module, members: Members) -> GradientSync:
    """Return this rank's `GradientSync` of a stage; all members call this together. Raises PeerLost."""
    sync = members.stage.sync
    if len(members.ranks) == 1:
        return Alone()
    if not sync.splits_channels and not trainable(module) and not SyncedBuffers(module).named():
        return Alone()  # in a stage that is frozen, there is nothing to agree on
    if sync.steps_alone:
        raise ValueError("members that take local steps train by their replica's plan, in which stages have one")
    made: GradientSync = sync.load()(module, members)
    return made
