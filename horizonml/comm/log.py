"""Keeps the messages that were sent to some ranks, so that the work of a lost rank can be repeated.

The messages are the tensors themselves, not copies: nobody writes to an activation or a gradient after it was sent.
Logging what crosses the boundary of a failed part is the idea of SWIFT (Zhong et al., PPoPP 2023).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable

from torch import Tensor


class MessageLog:
    """Holds, for each of some receivers, what this rank has sent to it in the latest steps."""

    def __init__(self, receivers: Iterable[int], tags: Container[int], most_bytes: int) -> None:
        """Log messages with these tags to these ranks; drop the oldest steps above `most_bytes` bytes."""
        self._receivers, self._tags, self._most = frozenset(receivers), tags, most_bytes
        self._steps: dict[int, dict[int, dict[int, Tensor]]] = defaultdict(dict)  # step -> receiver -> tag -> message
        self._bytes: dict[int, int] = {}  # of each step
        self._now: int | None = None

    def begin(self, step: int) -> None:
        """Log what is sent from now on as part of a step."""
        self._now = step
        self._steps[step], self._bytes[step] = {}, 0

    def pause(self) -> None:
        """Stop logging, for example during an evaluation."""
        self._now = None

    def add(self, tensor: Tensor, receiver: int, tag: int) -> None:
        """Take note of a message that is sent now."""
        if self._now is None or receiver not in self._receivers or tag not in self._tags:
            return
        self._steps[self._now].setdefault(receiver, {})[tag] = tensor
        self._bytes[self._now] += tensor.nbytes
        while sum(self._bytes.values()) > self._most and len(self._bytes) > 1:
            self.forget(min(self._bytes) + 1)

    def forget(self, step: int) -> None:
        """Drop the messages of all steps before `step`."""
        for old in [number for number in self._bytes if number < step]:
            del self._bytes[old], self._steps[old]

    @property
    def first(self) -> int | None:
        """Return the first step of which all messages are there, or None if nothing is."""
        return min(self._bytes, default=None)

    @property
    def room(self) -> int:
        """Return how many steps fit into the log, if all are like the largest one so far; at least one."""
        return max(1, self._most // max(1, *self._bytes.values(), 1))

    def messages(self, receiver: int, since: int, before: int) -> dict[tuple[int, int], Tensor]:
        """Return the messages to a receiver by step and tag, of steps `since` to `before - 1`."""
        return {
            (step, tag): tensor
            for step, receivers in self._steps.items()
            if since <= step < before
            for tag, tensor in receivers.get(receiver, {}).items()
        }
