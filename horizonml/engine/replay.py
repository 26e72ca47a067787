"""Repeats the work of a lost rank from the messages that its neighbours had sent to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

from torch import Tensor

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.errors import PeerLost
from horizonml.plan.execution import Executions
from horizonml.plan.plan import Plan
from horizonml.state.train_state import TrainState
from horizonml.tasks.task import Batch, Task

Messages = Mapping[tuple[int, int], Tensor]  # by sender and tag


class _Delivered:
    """Stands for a message that is there already."""

    def wait(self) -> None:
        return None


class _Recorded(Group):
    """Takes the part of a lost rank's group: it receives what was recorded, and sends nothing."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(None, 0, 1, 1.0)
        self.rank, self.world_size = rank, world_size
        self.messages: Messages = {}

    def send(self, tensor: Tensor, peer: int, tag: int) -> _Delivered:
        if peer == self.rank:
            super().send(tensor, peer, tag)
        return _Delivered()

    def receive(self, into: Tensor, peer: int, tag: int):  # type: ignore[no-untyped-def]
        if peer == self.rank:
            return super().receive(into, peer, tag)
        if (peer, tag) not in self.messages:
            raise PeerLost(f"message {tag} of rank {peer} was not recorded")
        into.copy_(self.messages[peer, tag])
        return _Delivered()

    def barrier(self) -> None:
        """Do nothing: nobody else is there."""


def replay(
    plan: Plan,
    rank: int,
    state: TrainState,
    steps: Iterator[tuple[Messages, Batch, float, float]],
    task: Task,
    batch_size: int,
    executions: Executions | None = None,
) -> None:
    """Bring the state of a lost rank's stages to the present.

    `state` holds the stages' layers as they were before the first of the `steps`, each of which is given by what the
    rank received in it, the global batch, the learning rate, and the factor by which the gradients were multiplied.
    Raises PeerLost if a message is missing.
    """
    group = _Recorded(rank, plan.world_size)
    with closing(Session(plan, state, group, task, batch_size, executions)) as session:
        for group.messages, batch, learning_rate, scale in steps:
            session.replay(batch, learning_rate, scale)
