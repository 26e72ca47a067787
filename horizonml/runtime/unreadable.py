"""Finds the samples that cannot be read, before training begins, so that all ranks replace them in the same way.

Inputs and targets of a sample are read by different ranks, and a step has no message in which one could tell the other
that a sample is damaged. So every sample is tried once, by the ranks that read inputs, and all ranks agree on the list.
From then on, a replacement is a function of the list: it costs no message, and holds after a loss and for newcomers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from horizonml.comm.expected import boolean, fields, items, optional, text, whole
from horizonml.comm.group import Group
from horizonml.data.dataset import Data, DataBatch, DataInfo, WholeSamples
from horizonml.engine.session import Trainer
from horizonml.errors import DataError
from horizonml.files import cache_folder, write_atomically
from horizonml.job.schema import Job
from horizonml.machine.resources import available_cores
from horizonml.text import count

_CHUNK = 16  # samples that are tried at once
_SECONDS = 5.0  # after which the ranks tell each other that they are still busy


def find_unreadable(job: Job, session: Trainer, data: Data, say: Callable[[str], None]) -> DataInfo:
    """Return the description of the data, with what cannot be read of it; all ranks call this.

    What was found for files that have not changed since is not tried again. Raises DataError on all ranks if nothing
    can be read.
    """
    group, info = session.group, data.info
    readers = session.plan.stages[0].ranks
    reads = group.rank in readers
    note = _note_of(job, data) if reads else None
    noted = _read_note(note)
    one_problem = fields(boolean, whole(0, max(info.train, info.held_out) - 1), text)
    known = group.gather_json(noted, optional(items(one_problem)))
    mine = noted or []
    if any(known[rank] is None for rank in readers):
        mine = _try_all(data, group, readers.index(group.rank) if reads else None, len(readers))
    everyone = [tuple(one) for found in group.gather_json(mine, items(one_problem)) for one in found]
    if note is not None and noted is None:
        with suppress(OSError):  # they are tried again next time
            write_atomically(note, json.dumps(everyone).encode())
    train, held_out = (tuple(sorted({index for kind, index, _ in everyone if kind is part})) for part in (True, False))
    for bad, samples, name in ((train, info.train, "training"), (held_out, info.held_out, "held-out")):
        if samples and len(bad) >= samples:
            raise DataError(f"data.corrupt: none of the {name} samples can be read. {everyone[0][2]}")
    if everyone:
        found = count(len(train) + len(held_out), "sample")
        say(f"warning: {found} cannot be read and will be skipped. {everyone[0][2]}")
    return replace(info, unreadable=(train, held_out))


def _note_of(job: Job, data: Data) -> Path | None:
    """Return the file in which this machine notes what cannot be read, where it can tell whether files change."""
    if data.identity is None:
        return None
    content = f"{data.identity} {data.info.to_json()} {job.data.holdout}"
    return cache_folder() / "data" / f"unreadable-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"


def _read_note(note: Path | None) -> list[tuple[bool, int, str]] | None:
    if note is None or not note.exists():
        return None
    try:
        return [(bool(part), int(index), str(reason)) for part, index, reason in json.loads(note.read_text())]
    except (OSError, ValueError, TypeError):  # it is written anew
        return None


def _try_all(data: Data, group: Group, member: int | None, members: int) -> list[tuple[bool, int, str]]:
    """Try this rank's part of the samples; all ranks call this, and return together."""
    mine: list[tuple[bool, int, str]] = []
    tried = _tried(data, member, members) if member is not None else iter(())
    while True:  # no rank waits long enough for another to take it for lost
        until, busy = time.monotonic() + _SECONDS, False
        for found in tried:
            mine += found
            if time.monotonic() > until:
                busy = True
                break
        if not any(group.gather_json(busy, boolean)):
            return mine


def _tried(data: Data, member: int, members: int) -> Iterator[list[tuple[bool, int, str]]]:
    """Try every sample of this rank's part; yield what is wrong as (whether it is for training, index, reason)."""
    work = (
        (batch, training, start)
        for training, samples in ((True, data.info.train), (False, data.info.held_out))
        for batch in [DataBatch(data.train if training else data.held_out, torch.arange(samples))]
        for start in range(_CHUNK * member, samples, _CHUNK * members)
    )
    threads = max(1, min(8, int(available_cores())))
    with ThreadPoolExecutor(threads, "try") as executor:
        while some := list(islice(work, 2 * threads)):
            yield from executor.map(lambda one: _problems(*one), some)


def _problems(batch: DataBatch, training: bool, start: int) -> list[tuple[bool, int, str]]:
    stop = min(start + _CHUNK, batch.size)
    if _problem(batch, start, stop) is None:
        return []
    found = [(index, _problem(batch, index, index + 1)) for index in range(start, stop)]
    return [(training, index, problem) for index, problem in found if problem is not None]


def _problem(batch: DataBatch, start: int, stop: int) -> str | None:
    try:
        batch.rows(start, stop, inputs=True, targets=isinstance(batch.split, WholeSamples))
    except DataError as error:
        return str(error)
    return None
