"""Runs the training loop, which is the same for every plan and every task, until it is done or does not get better."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

import torch

from horizonml.comm.expected import fields, mapping, measure, whole
from horizonml.comm.group import Group
from horizonml.data.dataset import Data, DataBatch, NeededRows
from horizonml.data.loading import Ahead
from horizonml.data.sampler import Sampler, name_seed, sampler_for
from horizonml.data.workers import Workers, workers_for
from horizonml.engine.clock import StepResult
from horizonml.engine.session import Trainer, Wishes
from horizonml.errors import CheckpointError, Diverged, JobError, PeerLost
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.runtime.outcome import LeavesUnsaved, Outcome
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.follow import Following
from horizonml.state.mirror import Mirror
from horizonml.state.optim import learning_rate
from horizonml.state.shards import KEPT, STOPPING, Best
from horizonml.tasks.task import Task
from horizonml.telemetry.record import metric_key
from horizonml.telemetry.recorder import Recorder
from horizonml.text import count, human_bytes, nearest


@dataclass
class Training:
    """A training from where the session's state is to the end of the job, or until a rank is asked to stop."""

    job: Job
    session: Trainer
    data: Data
    checkpoints: Checkpoints | None
    recorder: Recorder
    stop: StopRequest
    newcomers: Callable[[], bool] = lambda: False  # whether further ranks want to join
    watch: StragglerDetector | None = None
    make_mirror: Callable[[], Mirror | None] = lambda: None  # what mirrors the ranks' state, once all of them have it
    given: Workers | None = None  # that load samples, and are not ended here; otherwise there are new ones
    mirror: Mirror | None = None
    overdue: bool = False  # whether a checkpoint waits until no rank follows any longer
    wall: float = math.inf  # seconds that the last step took
    told: bool = False  # whether the user knows that the stop has to wait

    def __post_init__(self) -> None:
        self.sampler = sampler_for(self.data.info, self.job.batch_size, self.job.seed)
        self.per_epoch = self.sampler.steps_per_epoch
        self.total = self.job.total_steps(self.per_epoch)
        self.every = self.job.checkpoint.every_steps or self.per_epoch
        self.state = self.session.state
        self.evaluations = Evaluations(self.job, self.session.task)

        session, cache = self.session, cache_folder() / "data"
        needed = session.is_first, session.is_last
        self.workers = self.given or workers_for(self.job.data, self.data, cache, *needed)
        self.batches = self._ahead(self._training_batch, self.total, training=True)

    def _ahead(self, batches: Callable[[int], DataBatch], count: int, training: bool) -> Ahead:
        spec, session = self.job.data, self.session

        def needs(size: int, number: int) -> NeededRows:
            return session.needs(size, training, number)

        return Ahead(batches, range(count), needs, self.workers, self.data.info, spec.prefetch, spec.memory)

    def _training_batch(self, number: int) -> DataBatch:
        return training_batch(self.job, self.data, self.sampler, *divmod(number, self.per_epoch))

    def run(self) -> Outcome:
        """Train to the end, and return why it is the end.

        That may be that the group must form again, because another rank was asked to stop or newcomers want to join, or
        that training must go on by a better plan. Raises CheckpointError if the run ends and its last checkpoint could
        not be saved. If training fails, the checkpoint that is being written is completed first.
        """
        try:
            return self._run()
        except PeerLost:  # without that rank nothing can be written
            raise
        except Diverged as error:
            kept = self._finish_checkpoint(together=self.session.plan.local is None)
            raise Diverged(f"{error}{kept}") from None
        except Exception:
            self._finish_checkpoint(together=False)
            raise
        finally:
            self.batches.close()
            if self.given is None:
                self.workers.close()

    def _run(self) -> Outcome:
        caught_up = self._catch_up()
        if self.session.following is None:
            self.mirror = self.make_mirror()
        if self.ended:
            return Outcome.COMPLETE if caught_up else Outcome.ALREADY_COMPLETE
        while not self.ended:
            step = self._step()
            done = self.state.step
            self._note_saved(self.checkpoints)
            best = self._evaluate(done) if self._is_evaluated(done) else False
            ended = self.ended
            stopping = (step.totals.stop or step.totals.newcomers) and not ended
            following = not self._all_have_caught_up(step, ends=stopping or ended, best=best)
            replan = not following and self._has_better_plan(step, done) and not ended
            saving = stopping and step.totals.stop
            due = (self._falls_due(self.every, done) or best or self.overdue) and not (stopping and not saving)
            self.overdue, due = due and following, due and not following
            if self.checkpoints is not None and (due or ended or saving or replan):
                self._save(self.checkpoints, done, stopping, best)
            if stopping:
                return Outcome.STOPPED if self.stop.wanted else Outcome.RE_FORM
            if replan:
                return Outcome.RE_PLAN
        return Outcome.COMPLETE

    @property
    def ended(self) -> bool:
        """Whether the training is at its end, or has ended early."""
        return self.state.step >= self.total or self.evaluations.ends(self.state.best)

    def _is_evaluated(self, done: int) -> bool:
        spec = self.job.evaluate
        return done >= self.total or self._falls_due(spec.every_steps or spec.every_epochs * self.per_epoch, done)

    def _falls_due(self, period: int, done: int) -> bool:
        """Return whether what is due every `period` steps takes place after so many steps.

        Local steps put it off until the replicas synchronise.
        """
        local = self.session.plan.local
        return done % period == 0 if local is None else local.falls_due(period, done)

    def _epoch(self, done: int) -> int:
        """Return the epoch, counted from 1, of which the last of so many steps was a part."""
        return -(-done // self.per_epoch)

    def _catch_up(self) -> bool:
        """Do what an earlier group has left undone after its last step; return whether there was anything.

        The state may have outlived a group that was lost while it evaluated, or saved the last checkpoint.
        """
        done, metrics = self.state.step, self.state.metrics
        # Version 0.1.0 evaluated at the end of each epoch, and did not save at which step.
        evaluated = metrics.get("step", metrics.get("epoch", 0) * self.per_epoch)
        # A job that was shortened may have been trained beyond its end, where it has no evaluation.
        evaluating = 0 < done <= self.total and self._is_evaluated(done) and evaluated != done
        best = self._evaluate(done) if evaluating else False
        saving = (self.ended or best) and self.checkpoints is not None and self.checkpoints.newest != done
        if saving and self.checkpoints is not None:
            if self.session.following is not None:
                self._end_following(wait=True)
            self._save(self.checkpoints, done, stopping=False, best=best)
        return evaluating or saving

    def _step(self) -> StepResult:
        done = self.state.step
        epoch = done // self.per_epoch
        batch = self.batches.take(done)
        lr = learning_rate(self.job.lr_schedule, self.job.optimizer.lr, done, self.per_epoch, self.total)
        every = self.job.telemetry.divergence_every
        following = self.session.following
        if following is not None:
            following.before_step()
        if self.mirror is not None:
            self.mirror.before_step(self.wall)
        self._tell_stop(done)
        takes_in = following is None  # or what is on its way to a newcomer would have to be sent again
        wishes = Wishes(
            measure_divergence=every > 0 and done % every == 0,
            stop=self.stop.wanted,
            newcomers=takes_in and self.newcomers(),
            look=takes_in and self.watch is not None and self.watch.due(),
            full=self._is_evaluated(done + 1) or self._falls_due(self.every, done + 1),
        )
        step = self.session.step(batch, lr, wishes)
        if self.mirror is not None:
            self.mirror.after_step()
            self.recorder.replica(self.mirror.age, covered=self.mirror.age is not None or not self.mirror.is_owner)
        if following is not None:
            following.after_step(step.transfer, step.wall)
        self.wall = step.wall
        if following is None and batch.size == self.job.batch_size and step.local_steps != 0:
            self.recorder.quickest = min(self.recorder.quickest, step.compute)
        self.recorder.step(step, done + 1, epoch + 1, batch.size, lr, batch.skipped)
        return step

    def _tell_stop(self, done: int) -> None:
        """Say once when a run that was asked to stop will, if that is not after the step that follows `done` others."""
        local = self.session.plan.local
        if local is None or self.told or not self.stop.wanted:
            return
        self.told, last = True, min(local.stops_by(done), self.total)
        if last > done + 1:
            self.recorder.message(
                f"step {done}: stopping at the next synchronisation, after step {last} at the latest; a second Ctrl-C "
                "ends the run at once"
            )

    def _all_have_caught_up(self, step: StepResult, ends: bool, best: bool) -> bool:
        """Return whether all ranks hold their state now; wait for that if none may follow any longer. Raises PeerLost.

        That is so if a follower has no room for more gradients, and if training `ends` or this is the `best` step: all
        take part in a checkpoint.
        """
        if self.session.following is None:
            return True
        wait = step.totals.behind and (step.totals.hurry or ((ends or best) and self.checkpoints is not None))
        if step.totals.behind and not wait:
            return False
        self._end_following(wait)
        if not ends:
            self.mirror = self.make_mirror()
        self.session.clock.pause()
        self.recorder.skip()
        return True

    def _end_following(self, wait: bool) -> None:
        """Go on with the shares of the plan; first `wait` for the state that is still on its way. Raises PeerLost."""
        following = self.session.following
        assert following is not None
        if wait:
            following.finish()
        self.session.end_following()
        _tell_followed(following, self.session.group, self.recorder, self.state.step)

    def _evaluate(self, done: int) -> bool:
        """Evaluate the model on the held-out data; return whether its checkpoint is to be kept as the best one."""
        epoch, started = self._epoch(done), time.perf_counter()
        batches = held_out_batches(self.job, self.data)
        with closing(self._ahead(batches.__getitem__, len(batches), training=False)) as ahead:
            totals = self.session.evaluate(ahead)
        metrics = {f"held_out_{metric_key(name)}": value for name, value in totals.metrics.items()}
        measured = {"held_out_loss": totals.loss, **metrics}
        if self.evaluations.follows:  # processors differ in the last bit of what tasks compute, and all must agree
            measured = self.session.group.broadcast(measured, read=mapping(measure))
        self.state.metrics = {"step": done, "epoch": epoch, **measured}
        self.state.best = best = self.evaluations.note(self.state.best, measured, done)
        kept = KEPT in best and best[KEPT].step == done
        within = done % self.per_epoch != 0
        self.recorder.evaluation(totals, done, epoch, time.perf_counter() - started, within_epoch=within, best=kept)
        if self.ended:
            self._tell_end(best, done)
        self.recorder.skip()
        return kept

    def _tell_end(self, best: Mapping[str, Best], done: int) -> None:
        if done < self.total:
            found = best[STOPPING]
            self.recorder.message(
                f"step {done}: training ends early, because {count(found.waited, 'evaluation')} brought no improvement "
                f"on {found.metric} {found.value:.4f} (step {found.step})"
            )
        if KEPT in best and self.checkpoints is not None:
            found = best[KEPT]
            self.recorder.message(
                f"the best checkpoint is that of step {found.step}, with {found.metric} {found.value:.4f}"
            )

    def _has_better_plan(self, step: StepResult, done: int) -> bool:
        if self.watch is None:
            return False
        self.watch.note(step.compute)
        if not step.totals.look:
            return False
        found = self.watch.look()
        self.recorder.slowdowns(found.slowdowns, found.stragglers if found.news else None, found.reasons, done)
        better = self.watch.better_plan(found, self.total - done)
        if better:
            self.recorder.replanned()
        self.session.clock.pause()  # the time that this took belongs to no step
        self.recorder.skip()
        return better

    def _save(self, checkpoints: Checkpoints, done: int, stopping: bool, best: bool) -> None:
        """Save a checkpoint: the last one while all wait, others while training goes on, and never two at once.

        If one is still being written, that of the `best` evaluation waits for it, and another one is left out. Raises
        CheckpointError if it is not saved and no later one will be.
        """
        complete, due = self.ended, self._falls_due(self.every, done) or best
        details = {"epochs": self.job.total_epochs(self.per_epoch), "complete": complete, "metrics": self.state.metrics}
        details = {"job": self.job.model_dump(), "data": self.data.info.to_json(), **details}
        if self.state.best:
            details["best"] = {purpose: one.model_dump() for purpose, one in self.state.best.items()}
        if self.state.tried is not None:
            details["tried"] = self.state.tried.to_json()
        problems: list[str] = []
        if self.job.checkpoint.background and due and not complete and not stopping:
            skipped = checkpoints.skipped
            checkpoints.begin(self.state, self.session.plan, details, must=best)
            if checkpoints.skipped > skipped:
                self.recorder.checkpoint_skipped(done)
        else:
            problems = checkpoints.save(self.state, self.session.plan, details)
        self._note_saved(checkpoints)
        self.session.clock.pause()
        self.recorder.skip()
        if problems and (complete or (stopping and self.stop.wanted)):
            newest = checkpoints.newest
            kept = "no checkpoint is there" if newest is None else f"the newest checkpoint is that of step {newest}"
            raise (CheckpointError if complete else LeavesUnsaved)(
                f"the last checkpoint, after step {done}, could not be saved ({'; '.join(problems)}); {kept}"
            )

    def _finish_checkpoint(self, together: bool) -> str:
        """Wait for the checkpoint that is being written; return a sentence about the newest one."""
        if self.checkpoints is None:
            return ""
        self.checkpoints.finish(together)
        self._note_saved(self.checkpoints)
        newest = self.checkpoints.newest
        return ". " + (
            f"The newest checkpoint is that of step {newest}" if newest is not None else "No checkpoint is there"
        )

    def _note_saved(self, checkpoints: Checkpoints | None) -> None:
        for one in checkpoints.finished() if checkpoints is not None else []:
            self.recorder.checkpoint(one.step, not one.problems, one.pause, one.writing)


def _tell_followed(following: Following, group: Group, recorder: Recorder, step: int) -> None:
    """Say who has caught up after a step; all ranks of the group call this. Raises PeerLost."""
    received = group.gather_json([following.early, following.waited], fields(whole(), whole()))
    for rank in sorted(following.ranks):
        early, late = received[rank]
        waited = f", and {human_bytes(late)} while they waited" if late else ""
        recorder.message(
            f"rank {rank} joined at step {step}; {human_bytes(early)} of state arrived while the others trained, in "
            f"{count(following.steps, 'step')}{waited}"
        )
    if group.rank in following.ranks:
        recorder.followed(step, following.steps, following.early)


def training_batch(job: Job, data: Data, sampler: Sampler, epoch: int, step: int) -> DataBatch:
    """Return the global batch of a step, augmented if the data set does that; epoch and step count from 0."""
    return data.batch(True, sampler.indices(epoch, step), name_seed(job.seed, "augment", epoch, step))


def held_out_batches(job: Job, data: Data) -> list[DataBatch]:
    """Return all held-out samples in batches of the job's size."""
    order = torch.arange(data.info.held_out)
    return [data.batch(False, part) for part in order.split(job.batch_size)]


_HIGHEST = {"accuracy", "exact_match", "f1", "r2", "mean_iou"}
_LOWEST = {"loss", "perplexity", "mae", "rmse"}
_PREFIX = "held_out_"


@dataclass(frozen=True)
class _Followed:
    """Describes a metric that is followed for a purpose."""

    purpose: str
    metric: str
    highest: bool
    min_delta: float = 0.0

    def next(self, before: Best | None, value: float, step: int) -> Best:
        """Return the best evaluation, now that there is another one."""
        if before is None or before.metric != self.metric or not math.isfinite(before.value):
            return Best(metric=self.metric, value=value, step=step)
        gain = value - before.value if self.highest else before.value - value
        if gain > self.min_delta:
            return Best(metric=self.metric, value=value, step=step)
        return before.model_copy(update={"waited": before.waited + 1})


class Evaluations:
    """Follows the metrics that a job names; all ranks come to the same decisions if they are given the same values."""

    def __init__(self, job: Job, task: Task) -> None:
        """Raise JobError if a task does not record a metric that the job names."""
        names = [_PREFIX + metric_key(name) for name in ("loss", *recorded(task))]
        early, kept = job.early_stop, job.checkpoint
        self._patience = early.patience
        self._followed = []
        if early.patience is not None:
            highest = _is_highest("early_stop", early.metric, early.best_is, names)
            self._followed.append(_Followed(STOPPING, early.metric, highest, early.min_delta))
        if kept.keep_best is not None:
            highest = _is_highest("checkpoint", kept.keep_best, kept.best_is, names, "keep_best")
            self._followed.append(_Followed(KEPT, kept.keep_best, highest))

    @property
    def follows(self) -> bool:
        """Return whether the job names any metric."""
        return bool(self._followed)

    def note(self, best: Mapping[str, Best], metrics: Mapping[str, float], step: int) -> dict[str, Best]:
        """Return the best evaluation for each purpose, now that `metrics` were measured after `step` steps."""
        return {one.purpose: one.next(best.get(one.purpose), metrics[one.metric], step) for one in self._followed}

    def ends(self, best: Mapping[str, Best]) -> bool:
        """Return whether training ends early."""
        found = best.get(STOPPING)
        return self._patience is not None and found is not None and found.waited >= self._patience


def recorded(task: Task) -> list[str]:
    """Return the names of the metrics that a task records."""
    return list(task.report(1.0, dict.fromkeys(task.metrics, 1.0)))


def _is_highest(section: str, metric: str, best_is: str, names: list[str], field: str = "metric") -> bool:
    """Return whether the highest value of a metric is the best. Raises JobError."""
    if metric not in names:
        raise JobError(
            f"{section}.{field}: there is no metric {metric!r}; this task records {', '.join(names)}"
            f"{nearest(metric, names)}"
        )
    own = metric.removeprefix(_PREFIX)
    if best_is == "auto" and own not in _HIGHEST | _LOWEST:
        raise JobError(f"{section}.best_is: say whether the lowest or the highest {metric} is best")
    return best_is == "highest" if best_is != "auto" else own in _HIGHEST
