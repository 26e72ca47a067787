"""Carries tensors between the host's memory, where messages are, and the device that a rank computes on.

Messages, checkpoints and copies of the state consist of tensors in the host's memory. On a rank that computes there,
too, nothing is copied (`Staging`). On an accelerator, what arrives is copied to the device, and what is sent is copied
from it first. `Copying` does both at once. `Overlapping` does not wait for the copies: what has to be done with a
tensor on the host is queued until its copy is complete, and done in the order of the copies: as soon as the rank looks
again, or at the latest before it waits for anybody else (`drain`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from horizonml.comm.work import Work
from horizonml.data.dataset import Tree
from horizonml.engine.clock import DeviceWatch
from horizonml.models.boundary import Values

CPU = torch.device("cpu")


class Staging:
    """Stages nothing: the rank computes in the host's memory."""

    device = CPU
    has_float64: ClassVar[bool] = True
    host: ClassVar[Mapping[str, Any]] = {}
    """How to allocate memory for messages that arrive: further arguments of `torch.empty`."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device; the host's must not be used any more."""
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the device on the host, at once."""
        return tensor

    def send(self, tensor: Tensor, begin: Callable[[Tensor], None]) -> None:
        """Call `begin` with a tensor of the device on the host, once it is there.

        Nobody may write to the tensor before that.
        """
        begin(tensor)

    def sum(self, tensor: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        """Replace a tensor by its sum: `begin` begins to sum a tensor of the host in place.

        Waiting for the work that is returned completes the sum, on the device.
        """
        return begin(tensor)

    def drain(self) -> None:
        """Wait for all copies to the host that are under way, and begin what waits for them."""

    def clear(self) -> None:
        """Forget what waits for copies."""

    def seed(self, number: int) -> None:
        """Seed the generators that layers draw from: that of the host, and that of the device."""
        torch.default_generator.manual_seed(number)

    def creating(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that a model or a task creates are on the device."""
        return nullcontext()

    def watch(self) -> DeviceWatch | None:
        """Return what tells the clock until when the device was busy; None if it works while this process does."""
        return None

    def all_to_device(self, tensors: Values) -> Values:
        """Return tensors of the host on the device."""
        return tensors

    def tree_to_device(self, tree: Tree) -> Tree:
        """Return a tree of tensors of the host on the device; those of the host stay as they are."""
        return tree

    def tree_to_host(self, tree: Tree) -> Tree:
        """Return a tree of tensors of the device on the host."""
        return tree


class Copying(Staging):
    """Copies at once, and returns when the copy is complete."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _bring(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device."""
        return tensor.to(self.device)

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the device on the host."""
        return tensor.detach().to(CPU)

    def _put(self, host: Tensor, into: Tensor) -> None:
        """Copy a tensor of the host into one of the device."""
        into.copy_(host)

    def to_device(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        return self._bring(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        return self._fetch(tensor)

    def send(self, tensor: Tensor, begin: Callable[[Tensor], None]) -> None:
        """See `Staging`."""
        begin(self._fetch(tensor))

    def sum(self, tensor: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        """See `Staging`."""
        return _Sum(self, tensor, begin)

    def creating(self) -> AbstractContextManager[Any]:
        """See `Staging`."""
        return self.device

    def all_to_device(self, tensors: Values) -> Values:
        """See `Staging`."""
        return tuple(self._bring(tensor) for tensor in tensors)

    def tree_to_device(self, tree: Tree) -> Tree:
        """See `Staging`."""
        return _each(tree, self._bring)

    def tree_to_host(self, tree: Tree) -> Tree:
        """See `Staging`."""
        return _each(tree, self._fetch)


class _Sum:
    """Stands for the sum of a tensor of the device, which travels to the host, is summed there, and comes back."""

    def __init__(self, staging: Copying, tensor: Tensor, begin: Callable[[Tensor], Work]) -> None:
        self._staging, self._tensor, self._begin = staging, tensor, begin
        self._under_way: tuple[Tensor, Work] | None = None
        staging.send(tensor, self._start)

    def _start(self, host: Tensor) -> None:
        self._under_way = host, self._begin(host)

    def wait(self) -> None:
        self._staging.drain()
        assert self._under_way is not None
        host, work = self._under_way
        work.wait()
        self._staging._put(host, self._tensor)
        self._under_way = None


class Copy(Protocol):
    """Stands for a copy to the host that is under way."""

    host: Tensor

    def done(self) -> bool:
        """Return whether the copy is complete."""

    def wait(self) -> None:
        """Block until it is."""


class Overlapping(Copying, ABC):
    """Copies to the host while the device computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._queue: deque[tuple[Copy, Callable[[Tensor], None]]] = deque()

    @abstractmethod
    def _begin_copy(self, tensor: Tensor) -> Copy:
        """Begin to copy a tensor of the device to the host."""

    def send(self, tensor: Tensor, begin: Callable[[Tensor], None]) -> None:
        """See `Staging`."""
        self._queue.append((self._begin_copy(tensor), begin))
        while self._queue and self._queue[0][0].done():
            self._begin_first()

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        copy = self._begin_copy(tensor)
        copy.wait()
        return copy.host

    def drain(self) -> None:
        """See `Staging`."""
        while self._queue:
            self._queue[0][0].wait()
            self._begin_first()

    def _begin_first(self) -> None:
        copy, begin = self._queue.popleft()
        begin(copy.host)

    def clear(self) -> None:
        """See `Staging`."""
        self._queue.clear()


def _each(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """Return a tree with `function` of each of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: _each(part, function) for name, part in tree.items()}
    if tree is None:  # what a model leaves out of its result
        return tree
    return [_each(part, function) for part in tree]
