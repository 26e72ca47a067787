"""Derives seeds for independent uses of random numbers, and seeds the generators that a process shares."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def name_seed(seed: int, *names: object) -> int:
    """Return a seed of 63 bits from the job's seed and the purpose of the random numbers."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


_spare: list[Any] = []  # generators of numpy that are not in use


@contextmanager
def python_seeded(seed: int) -> Iterator[Callable[[], bool]]:
    """Let Python and numpy draw random numbers from `seed` on, and leave their generators as they were.

    What it yields tells whether a number has been drawn from either.
    """
    numpy = sys.modules.get("numpy")
    kept, generator, own = random.getstate(), None, None
    random.seed(seed)
    if numpy is not None:  # another generator for a while: copying the state of one takes a third of a millisecond
        generator = numpy.random.get_bit_generator()
        own = _spare.pop() if _spare else numpy.random.MT19937(0)
        numpy.random.set_bit_generator(own)
        numpy.random.seed(seed % 2**32)
    first, place = random.getstate(), _place(own)
    try:
        yield lambda: random.getstate() != first or _place(own) != place
    finally:
        random.setstate(kept)
        if numpy is not None:
            numpy.random.set_bit_generator(generator)
            _spare.append(own)


def _place(generator: Any) -> int:
    """Return where a generator of numpy is among the numbers that it has prepared."""
    return 0 if generator is None else int(generator.state["state"]["pos"])


def python_state() -> tuple[Any, bytes]:
    """Return the state of Python's and numpy's generators, to tell whether something has drawn from them."""
    numpy = sys.modules.get("numpy")
    own = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), own[1].tobytes() + bytes(str(own[2]), "ascii") if own is not None else b""
