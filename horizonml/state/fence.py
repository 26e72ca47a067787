"""Keeps groups that are over from writing into a folder in which a newer group has begun.

A group may be held up for minutes, between any two instructions, and wake up when the others have long formed a new
one. So each group announces itself in the folder before it writes there, by a file whose name says which generation it
is, and looks for newer announcements before it turns what it wrote into a checkpoint. Announcements are made
exclusively, and only ever of newer generations, so that no group that wakes up can take one back.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from horizonml.errors import CheckpointError, PeerLost
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

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.term = Term(0, 0)  # of this group

    def newest(self) -> Term | None:
        """Return the newest group that has begun in the folder."""
        with suppress(OSError):
            found = (re.fullmatch(r"\.generation-(\d{1,18})-(\d{1,18})", name) for name in os.listdir(self._folder))
            return max((Term(int(match[1]), int(match[2])) for match in found if match), default=None)
        return None

    def begin(self) -> None:
        """Announce this group. Raises PeerLost if a newer one has begun since it formed, and this one is over."""
        term, newest = self.term, self.newest()
        if newest is not None and newest >= term:
            raise PeerLost(self._refusal(newest))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._file(term), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            sync_folder(self._folder)
            if newest is not None:
                self._file(newest).unlink(missing_ok=True)
        except FileExistsError:
            raise PeerLost(self._refusal(term)) from None
        except OSError as error:
            _log.warning("cannot write to %s: %s", self._folder, error.strerror or error)

    def check(self) -> None:
        """Raise CheckpointError if a newer group has begun."""
        newest = self.newest()
        if newest is not None and newest > self.term:
            raise CheckpointError(self._refusal(newest))

    def _file(self, term: Term) -> Path:
        return self._folder / f".generation-{term.restarts}-{term.generation}"

    def _refusal(self, newest: Term) -> str:
        return (
            f"generation {newest.generation} has begun in {self._folder}, and generation {self.term.generation}, which "
            "is over, may not write there any more"
        )
