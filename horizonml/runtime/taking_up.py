"""Brings the state to where training goes on: to what is in memory, to a checkpoint, or to the beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from horizonml.comm.expected import optional, whole
from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.engine.session import Session
from horizonml.errors import PeerLost
from horizonml.job.schema import Job
from horizonml.models.zoo import Model
from horizonml.runtime.life import Life
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.equal import share_state
from horizonml.telemetry.record import Source

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
    session: Session,
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
    life: Life, session: Session, checkpoints: Checkpoints | None, first: bool, anew: bool, say: Say
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
