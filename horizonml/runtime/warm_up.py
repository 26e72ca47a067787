"""Says how long the warm-ups are on which a run tries lossy formats, and which runs are too short for them.

A trial costs at most `MOST_OF_RUN` of the run's steps.
"""

from __future__ import annotations

from horizonml.data.dataset import DataInfo
from horizonml.job.schema import Job
from horizonml.text import count

MOST_OF_RUN = 0.05
FEWEST_STEPS, MOST_STEPS = 20, 200  # of a warm-up
MOST_WARM_UPS = 4  # the exact one included
NOT_HELD_OUT = "there are no held-out samples to try it on"
LOCAL_STEPS = "a warm-up cannot show what local steps cost"
_EVALUATION = 1 / 3  # of the time of a training step, for as many samples


def trial_steps(job: Job, per_epoch: int, done: int) -> int:
    """Return the steps of each warm-up, or 0 if the rest of the run is too short for a trial."""
    left = job.total_steps(per_epoch) - done
    steps = int(left * MOST_OF_RUN / (MOST_WARM_UPS * (1 + _EVALUATION)))
    return min(steps, MOST_STEPS) if steps >= FEWEST_STEPS else 0


def why_untried(job: Job, info: DataInfo) -> str | None:
    """Return why no run of a job can try anything, as far as that is known before it begins, or None."""
    per_epoch = -(-info.train // job.batch_size)
    if not trial_steps(job, per_epoch, 0):
        return too_short(job, per_epoch)
    return None if info.held_out else NOT_HELD_OUT


def too_short(job: Job, per_epoch: int) -> str:
    """Return a clause that says why a run tries nothing."""
    return f"a run of {count(job.total_steps(per_epoch), 'step')} is too short to try it"
