"""Brings the state to where training goes on: to what is in memory, to a checkpoint, or to the beginning.

Finds the samples that cannot be read, before training begins, so that all ranks replace them in the same way.

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
from typing import Any

import torch

from horizonml.comm.expected import boolean, fields, items, optional, text, whole
from horizonml.comm.group import Group
from horizonml.data.dataset import Data, DataBatch, DataInfo, WholeSamples
from horizonml.engine.session import Trainer
from horizonml.errors import DataError, PeerLost
from horizonml.files import cache_folder, write_atomically
from horizonml.job.schema import Job
from horizonml.machine.resources import available_cores
from horizonml.models.zoo import Model
from horizonml.runtime.life import Life
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.equal import share_state
from horizonml.telemetry.record import Source
from horizonml.text import count

Say = Callable[[str], None]
"""Tells the user, on rank 0."""


def checkpoints_for(
    life: Life, group: Group, number: int, names: list[str], info: DataInfo, model: Model
) -> Checkpoints | None:
    """Return the run's checkpoints, if there are to be any. All ranks call this, in the group's formation `number`."""
    job = life.job
    if not job.checkpoint.enabled:
        return None
    folder = job.run_folder / "checkpoints"
    compatible = _compatible_with(job, info, model)
    return Checkpoints(folder, group, job.checkpoint.keep, compatible, names, number)


def is_older_than_disk(life: Life, step: int, checkpoints: Checkpoints | None, say: Say) -> bool:
    """Return whether a checkpoint is newer than the newest state in memory, which is dropped then.

    That happens if all ranks that held a newer state are lost, and one that was lost long before them is back.
    """
    newer = checkpoints.newer_than(step) if checkpoints is not None else None
    if newer is None:
        return False
    assert life.state is not None
    life.state.drop()
    say(f"the state in memory is that of step {step}: going on from the checkpoint of step {newer} instead")
    return True


def take_up(
    life: Life,
    session: Trainer,
    checkpoints: Checkpoints | None,
    first: bool,
    anew: bool,
    source: Source | None,
    followers: frozenset[int],
    say: Say,
) -> Source | None:
    """Bring the state to where training goes on: to a checkpoint, or to the beginning. Raises HorizonError.

    `source` says where it has been taken from already, if it has. A run that starts `anew` takes no checkpoint of the
    earlier run. Return where it was taken from, None if the run begins with this group.
    """
    state, group = session.state, session.group
    if source is not None and checkpoints is not None:
        known_steps = group.gather_json(life.newest_checkpoint, optional(whole()))
        checkpoints.newest = max((step for step in known_steps if step is not None), default=None)
    if source is None:
        found = _from_disk(life, session, checkpoints, first, anew, say)
        source = None if first else Source.DISK if found else Source.START
    life.begun, life.awaited = True, None
    # All members of a stage that do not follow begin with the same state, bit for bit.
    for rank, name in share_state(state, session.plan.without(followers), group):
        say(
            f"warning: rank {rank} began with other values than its stage's first member ({name}, for one) and has "
            "taken over that member's; processors that round differently can be the reason"
        )
    return source


def _from_disk(
    life: Life, session: Trainer, checkpoints: Checkpoints | None, first: bool, anew: bool, say: Say
) -> bool:
    """Bring the state to the newest checkpoint, or to the beginning; return whether there was a checkpoint."""
    state, found = session.state, None
    if checkpoints is None:
        if not first:
            raise PeerLost(
                "a lost rank alone held some of the layers, and no copy of them can be used; with checkpoints "
                "(checkpoint.enabled: true) the others would go on from the newest one",
                ends_job=True,
            )
    elif anew:
        pass  # those that there are belong to the earlier run, which is moved away before the first step
    elif first and not life.job.checkpoint.resume:
        checkpoints.set_aside()
    else:
        found = checkpoints.resume(state, session.plan)
    if found is None and (state.step or not state.valid):
        state.restart()
    if not first and found is None:
        say("no checkpoint had been saved: training begins again at step 0")
    return found is not None


def _compatible_with(job: Job, info: DataInfo, model: Model) -> dict[str, Any]:
    """Return what a checkpoint must agree with so that going on from it makes sense."""
    return {
        "model": job.model.identity(),
        **({"weights": model.pretrained.digest} if model.pretrained is not None else {}),
        "data": job.data.name,
        **({"characters": _fingerprint(info.characters)} if info.characters else {}),
        "samples": info.train,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "optimizer": job.optimizer.name,
    }


def _fingerprint(characters: str) -> str:
    """Return how many characters there are, and what differs for other ones."""
    return f"{len(characters)} (SHA-256 {hashlib.sha256(characters.encode('utf-8', 'surrogatepass')).hexdigest()[:8]})"


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
    """Return which of some samples cannot be read, and why."""
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
