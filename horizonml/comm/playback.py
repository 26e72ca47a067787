"""Repeats the work of lost ranks in one process: what other ranks sent to them was recorded (see `work.MessageLog`).

Each of the ranks has a thread. They send each other the same messages as before, and sum with each other what they
summed, but only one of them computes at a time, until it waits for another one: what a rank computes, such as the
numbers that it draws, depends on nothing else then.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from horizonml.comm.work import Deferred, Done
from horizonml.errors import PeerLost

Messages = Mapping[tuple[int, int], Tensor]  # by sender and tag
_PATIENCE_SECONDS = 600.0  # for a step of another rank


class Playback:
    """Runs some ranks of a group that is over."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        self._turn = threading.Condition()  # held by the rank that computes
        self._mail: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)  # by sender, receiver and tag
        self._terms: dict[tuple[str, int], dict[int, Tensor]] = defaultdict(dict)  # of sums: the members' own vectors
        self._read: dict[tuple[str, int], int] = defaultdict(int)  # how many members have had a sum
        self._error: BaseException | None = None

    def run(self, work: Callable[[int], None]) -> None:
        """Call `work` for each of the ranks, several of them in threads of their own; raise the first error of any."""
        if len(self.ranks) == 1:
            work(*self.ranks)
            return
        count = torch.get_num_threads()  # which counts for a single thread only

        def run(rank: int) -> None:
            with self._turn:
                try:
                    torch.set_num_threads(count)
                    work(rank)
                except BaseException as error:  # noqa: BLE001 (it is raised below)
                    self._error = self._error or error
                self._turn.notify_all()

        threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in sorted(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def put(self, message: tuple[int, int, int], content: Tensor) -> None:
        """Let a rank send a message to another one: its sender, receiver and tag say which."""
        self._mail[message].append(content.detach().clone())  # the sender goes on, and may write to it
        self._turn.notify_all()

    def take(self, message: tuple[int, int, int]) -> Tensor:
        """Return a message as soon as it is there. Raises PeerLost."""
        self._wait(lambda: bool(self._mail[message]), f"message {message[2]} of rank {message[0]}")
        return self._mail[message].popleft()

    def add(self, name: tuple[str, int], rank: int, vector: Tensor) -> None:
        """Take a member's part in a sum."""
        self._terms[name][rank] = vector.clone()
        self._turn.notify_all()

    def total(self, name: tuple[str, int], count: int) -> Tensor:
        """Return a sum of so many members, in the order of their ranks, as soon as they have come. Raises PeerLost."""
        self._wait(lambda: len(self._terms[name]) == count, f"a sum of {count} members")
        first, *others = (vector for _, vector in sorted(self._terms[name].items()))
        total = first.clone()
        for vector in others:
            total += vector
        self._read[name] += 1
        if self._read[name] == count:
            del self._terms[name], self._read[name]
        return total

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        self._turn.wait_for(lambda: condition() or self._error is not None, _PATIENCE_SECONDS)
        if not condition():
            raise PeerLost(f"{what} did not come, as the work of lost ranks was repeated")


class Recording:
    """Stands for the process groups of a lost rank: what it receives was recorded, or comes from another lost rank."""

    def __init__(self, playback: Playback, rank: int) -> None:
        self._playback, self._rank = playback, rank
        self.messages: Messages = {}  # of the step that is repeated

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        """Send a message to another lost rank; others have it already."""
        if peer in self._playback.ranks:
            self._playback.put((self._rank, peer, tag), tensors[0])
        return Done()

    def recv(self, into: list[Tensor], peer: int, tag: int) -> Done:
        """Receive a message that was recorded, or that another lost rank sends. Raises PeerLost."""
        if peer in self._playback.ranks:
            return Deferred(lambda: into[0].copy_(self._playback.take((peer, self._rank, tag))))
        if (peer, tag) not in self.messages:
            raise PeerLost(f"message {tag} of rank {peer} was not recorded")
        into[0].copy_(self.messages[peer, tag])
        return Done()

    def allgather(self, every: list[list[Tensor]], own: list[Tensor]) -> Done:
        """Let all others say the same as this rank, which then need not wait for them."""
        for other in every[0]:
            other.copy_(own[0])
        return Done()

    def connect(self, name: str, ranks: tuple[int, ...]) -> _Sums:
        """Return the process group of the members of a stage, all of whom are lost."""
        return _Sums(self._playback, self._rank, name, ranks)

    def cut(self) -> None:
        """Do nothing: there are no connections."""


class _Sums:
    """Stands for the process group of a stage's members."""

    def __init__(self, playback: Playback, rank: int, name: str, ranks: tuple[int, ...]) -> None:
        self._playback, self._rank, self._name, self._count = playback, rank, name, len(ranks)
        self._calls = 0

    def allreduce(self, tensors: list[Tensor]) -> Deferred:
        """Sum a vector in place."""
        name, self._calls = (self._name, self._calls), self._calls + 1
        self._playback.add(name, self._rank, tensors[0])
        return Deferred(lambda: tensors[0].copy_(self._playback.total(name, self._count)))
