"""The training loop: the same for every plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from horizonml.data.datasets import Data, Split
from horizonml.data.sampler import Sampler
from horizonml.data.seeds import name_seed
from horizonml.engine.engine import Batch, Engine, Step
from horizonml.engine.optim import learning_rate
from horizonml.errors import CheckpointError
from horizonml.job.schema import Job
from horizonml.runtime.signals import StopRequest
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.state.checkpoint import Checkpoints
from horizonml.telemetry.recorder import Recorder

Outcome = Literal["complete", "already complete", "stopped", "stopped waiting", "re-form", "re-plan"]


@dataclass(frozen=True)
class Progress:
    """How far a training has come: steps done, and what was found on held-out data last."""

    step: int
    metrics: dict[str, Any]


@dataclass(frozen=True)
class DataBatch:
    """A global batch of a data set. `augment_seed` is None where the images are to stay as they are."""

    split: Split
    indices: Tensor
    augment_seed: int | None = None

    @property
    def size(self) -> int:
        """Samples in the global batch."""
        return len(self.indices)

    def images(self, start: int, stop: int) -> Tensor:
        """Images of rows `start` to `stop - 1`."""
        images = self.split.images(self.indices[start:stop])
        if self.augment_seed is None:
            return images
        return self.split.augment(images, self.size, start, self.augment_seed)

    def labels(self, start: int, stop: int) -> Tensor:
        """Labels of rows `start` to `stop - 1`."""
        return self.split.labels(self.indices[start:stop])


def train(
    job: Job,
    engine: Engine,
    data: Data,
    checkpoints: Checkpoints | None,
    recorder: Recorder,
    start: Progress | None,
    stop: StopRequest,
    newcomers: Callable[[], bool] = lambda: False,
    watch: StragglerDetector | None = None,
) -> tuple[Outcome, Progress]:
    """Train from `start` to the end of the job, or until a rank is asked to stop; return how far it came.

    If it is another rank that was asked to stop, or `newcomers` want to take part, the group is to form again; if
    `watch` has a better plan, it is to be trained with.

    Raises CheckpointError if the run ends and its last checkpoint could not be saved.
    """
    sampler = Sampler(data.info.train, job.batch_size, job.seed)
    per_epoch, total = sampler.steps_per_epoch, sampler.steps_per_epoch * job.epochs
    every = job.checkpoint.every_steps or per_epoch
    done = start.step if start else 0
    history = dict(start.metrics) if start else {}
    if done >= total:
        return "already complete", Progress(done, history)
    unsaved = False  # whether the last checkpoint could not be saved
    while done < total:
        epoch, within = divmod(done, per_epoch)
        batch = training_batch(job, data, sampler, epoch, within)
        lr = learning_rate(job.lr_schedule, job.optimizer.lr, done, per_epoch, job.epochs)
        measure = job.telemetry.divergence_every > 0 and done % job.telemetry.divergence_every == 0
        step = engine.step(
            batch, lr, done, measure_divergence=measure, stop=stop.wanted, newcomers=not unsaved and newcomers()
        )
        done += 1
        recorder.step(step, done, epoch + 1, batch.size, lr)
        if done % per_epoch == 0:
            started = time.perf_counter()
            totals = engine.evaluate(held_out_batches(job, data))
            recorder.evaluation(totals, done, epoch + 1, time.perf_counter() - started)
            recorder.skip()
            history = {"epoch": epoch + 1, "held_out_loss": totals.loss, "held_out_accuracy": totals.accuracy}
        stopping = (step.totals.stop or step.totals.newcomers) and done < total
        replan = watch is not None and _look(watch, engine, recorder, step, done) and done < total
        if checkpoints is not None and (done % every == 0 or done == total or stopping or replan):
            details = {"epochs": job.epochs, "complete": done == total, "metrics": history}
            started = time.perf_counter()
            before = checkpoints.newest
            problems = checkpoints.save(engine, done, {"job": job.model_dump(), **details})
            recorder.checkpoint(done, not problems, time.perf_counter() - started)
            engine.clock.pause()
            recorder.skip()
            unsaved = bool(problems)
            if problems and (done == total or (stopping and stop.wanted)):
                kept = "no checkpoint is there" if before is None else f"the newest checkpoint is that of step {before}"
                raise CheckpointError(
                    f"the last checkpoint, after step {done}, could not be saved ({'; '.join(problems)}); {kept}"
                )
            if unsaved and not step.totals.stop:
                stopping = False  # newcomers wait, for forming again would cost all steps since the last checkpoint
        if stopping or replan:
            outcome: Outcome = "re-plan" if not stopping else "stopped" if stop.wanted else "re-form"
            return outcome, Progress(done, history)
    return "complete", Progress(done, history)


def _look(watch: StragglerDetector, engine: Engine, recorder: Recorder, step: Step, done: int) -> bool:
    """Compare steps with the plan; whether there is a better plan."""
    look = watch.step(step.compute)
    if look is None:
        return False
    recorder.slowdowns(look, done)
    better = watch.better_plan(look)
    engine.clock.pause()  # what this took belongs to no step
    recorder.skip()
    return better


def training_batch(job: Job, data: Data, sampler: Sampler, epoch: int, step: int) -> DataBatch:
    """The global batch of a step (both from 0)."""
    seed = name_seed(job.seed, "augment", epoch, step) if job.data.augment else None
    return DataBatch(data.train, sampler.indices(epoch, step), seed)


def held_out_batches(job: Job, data: Data) -> list[Batch]:
    """All held-out samples, in batches of the job's size."""
    order = torch.arange(data.info.held_out)
    return [DataBatch(data.held_out, part) for part in order.split(job.batch_size)]
