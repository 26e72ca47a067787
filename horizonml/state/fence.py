"""Keeps groups that are over from writing into a folder in which a newer group has begun.

A group may be held up for minutes, between any two instructions, and wake up when the others have long formed a new
one. So each group announces itself in the folder before it writes there, by a file whose name says which generation it
is, and looks for newer announcements before it turns what it wrote into a checkpoint. No group removes a newer one's
announcement, so none that wakes up can take one back.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from horizonml.errors import CheckpointError, PeerLost, is_out_of_files
from horizonml.files import sync_folder

_log = logging.getLogger(__name__)
_MOST = 10**18


@dataclass(frozen=True, order=True)
class Term:
    """Orders the groups that have begun in a folder.

    Generations are counted by a rendezvous service, and begin again when the whole job is started again.
    """

    restarts: int  # how often the count of generations has begun again in this folder
    generation: int

    @classmethod
    def of(cls, value: object) -> Term | None:
        """Return the term that another rank reports as `[restarts, generation]`, or None if it reports none."""
        numbers = value if isinstance(value, list) and len(value) == 2 else []
        if not numbers or not all(type(number) is int and 0 <= number < _MOST for number in numbers):
            return None
        return cls(*numbers)

    @classmethod
    def after(cls, known: Iterable[Term | None], generation: int) -> Term:
        """Return the term of a generation that begins where those `known` have begun before."""
        newest = max((term for term in known if term is not None), default=None)
        if newest is None or generation > newest.generation:
            return cls(newest.restarts if newest is not None else 0, generation)
        return cls(newest.restarts + 1, generation)  # all members are here, so it is not one that is over

    def to_json(self) -> list[int]:
        """Return what `of` reads."""
        return [self.restarts, self.generation]


class Fence:
    """Represents the announcements in one folder, as a member of one group."""

    def __init__(self, folder: Path, word: str) -> None:
        """`word` is unique to the group, and consists of letters and digits."""
        self._folder, self._word = folder, word
        self.term = Term(0, 0)  # of this group, which is chosen by what `newest` says on all disks
        self._before = self._announced()

    def newest(self) -> Term | None:
        """Return the newest group that had begun in the folder when this one formed."""
        return max((term for term, _ in self._before), default=None)

    def begin(self) -> None:
        """Announce this group. Raises PeerLost if a newer one has begun since it formed, and this one is over."""
        announced = self._announced()
        # One with a higher number that has begun meanwhile is of the same run, however the restarts were counted.
        since = [one for one in announced if one not in self._before and one[0].generation > self.term.generation]
        newer = max((term for term, _ in since), default=self._newer(announced))
        if newer is not None:
            raise PeerLost(self._refusal(newer))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file(self.term, self._word).touch()
            sync_folder(self._folder)
            for term, word in announced:
                if term < self.term:
                    self._file(term, word).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot write to %s: %s", self._folder, error.strerror or error)

    def check(self) -> None:
        """Raise CheckpointError if a newer group has begun."""
        newer = self._newer(self._announced())
        if newer is not None:
            raise CheckpointError(self._refusal(newer))

    def _newer(self, announced: Iterable[tuple[Term, str]]) -> Term | None:
        """Return the newest of the groups that this one must leave the folder to, if there are any."""
        others = (term for term, word in announced if word != self._word and term >= self.term)
        return max(others, default=None)

    def _announced(self) -> list[tuple[Term, str]]:
        """Return the groups that have begun in the folder, each with its word."""
        try:
            names = os.listdir(self._folder)
        except OSError as error:
            if is_out_of_files(error):  # or a group that is over could write
                raise
            return []
        found = (re.fullmatch(r"\.generation-(\d{1,18})-(\d{1,18})-(\w+)", name) for name in names)
        return [(Term(int(match[1]), int(match[2])), match[3]) for match in found if match]

    def _file(self, term: Term, word: str) -> Path:
        return self._folder / f".generation-{term.restarts}-{term.generation}-{word}"

    def _refusal(self, newer: Term) -> str:
        return (
            f"generation {newer.generation} has begun in {self._folder}, and generation {self.term.generation}, which "
            "is over, may not write there any more"
        )
