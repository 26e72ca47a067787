"""How long a training lasts, how the learning rate follows it, what ends it early, and which checkpoints stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from horizonml.errors import JobError
from horizonml.job.jobfile import parse
from horizonml.runtime.trainer import Evaluations, recorded
from horizonml.state.optim import Scales, decay_of, learning_rate
from horizonml.state.saver import superfluous
from horizonml.state.shards import KEPT, STOPPING, Best
from horizonml.state.spec import Ema, LrSchedule
from horizonml.tasks.classification import Classification, MultiLabel
from horizonml.tasks.language_model import LanguageModel
from horizonml.tasks.regression import Regression
from horizonml.tasks.segmentation import Segmentation
from horizonml.tasks.task import Task
from horizonml.telemetry.record import metric_key
from tests.tasks import KINDS


def follow(text: str, values: list[float], task: Task | None = None) -> tuple[dict[str, Best], list[bool]]:
    """The best evaluations after these values of a metric, and whether training ended after each."""
    job = parse(text, "job")
    evaluations, best, ends = Evaluations(job, task or Classification()), dict[str, Best](), []
    for number, value in enumerate(values, 1):
        metrics = {"held_out_loss": value, "held_out_accuracy": value, "held_out_perplexity": value}
        best = evaluations.note(best, metrics, 10 * number)
        ends.append(evaluations.ends(best))
    return best, ends


def test_a_small_gain_does_not_count_where_a_larger_one_is_asked_for() -> None:
    best, ends = follow("early_stop: {patience: 2, min_delta: 0.2}", [1.0, 0.9, 0.85])
    assert (best[STOPPING].step, ends) == (10, [False, False, True])


def test_the_best_checkpoint_is_followed_beside_it() -> None:
    best, ends = follow("{early_stop: {patience: 9}, checkpoint: {keep_best: held_out_accuracy}}", [0.5, 0.7, 0.6])
    assert (best[STOPPING].step, best[KEPT].step, any(ends)) == (10, 20, False)
    best, _ = follow("checkpoint: {keep_best: held_out_perplexity}", [5.0, 3.0, 4.0], LanguageModel(4))
    assert best == {KEPT: Best(metric="held_out_perplexity", value=3.0, step=20, waited=1)}


def test_a_first_value_that_is_no_number_does_not_stay_the_best() -> None:
    best, _ = follow("early_stop: {patience: 3, metric: held_out_accuracy}", [float("nan"), 0.2, 0.1])
    assert (best[STOPPING].step, best[STOPPING].waited) == (20, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "early_stop: {patience: 1, metric: held_out_acuracy}",
            r"early_stop\.metric: .*did you mean 'held_out_accuracy'",
        ),
        (
            "checkpoint: {keep_best: accuracy}",
            r"checkpoint\.keep_best: .* this task records held_out_loss, held_out_acc",
        ),
    ],
)
def test_a_metric_that_is_not_recorded_is_refused(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        Evaluations(parse(text, "job"), Classification())


def test_of_a_metric_of_the_users_own_the_job_says_which_value_is_best() -> None:
    task, text = KINDS["floats"].task, "checkpoint: {keep_best: held_out_mean_absolute_error"
    with pytest.raises(JobError, match=r"checkpoint\.best_is: say whether the lowest or the highest"):
        Evaluations(parse(text + "}", "job"), task)
    evaluations = Evaluations(parse(text + ", best_is: lowest}", "job"), task)
    best = evaluations.note({}, {"held_out_mean_absolute_error": 2.0}, 1)
    assert evaluations.note(best, {"held_out_mean_absolute_error": 1.0}, 2)[KEPT].step == 2


def test_of_the_metrics_of_every_task_it_is_known_which_value_is_best() -> None:
    errors = {"loss", "perplexity", "mae", "rmse"}
    for task in (Classification(), MultiLabel(), Regression(), Segmentation(3), LanguageModel(4)):
        for name in ("loss", *recorded(task)):
            evaluations = Evaluations(parse(f"checkpoint: {{keep_best: held_out_{metric_key(name)}}}", "job"), task)
            metric = f"held_out_{metric_key(name)}"
            best = evaluations.note(evaluations.note({}, {metric: 0.5}, 1), {metric: 0.25}, 2)
            assert (best[KEPT].step == 2) == (name in errors), name


def test_the_best_checkpoint_must_be_saved() -> None:
    with pytest.raises(JobError, match="keep_best: no checkpoint is saved with enabled: false"):
        parse("checkpoint: {enabled: false, keep_best: held_out_loss}", "job")


def test_the_learning_rate_follows_the_steps_of_the_whole_run() -> None:
    cosine = LrSchedule(warmup_steps=2)
    rates = [learning_rate(cosine, 1.0, step, 100, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    drops = LrSchedule(name="step", every_steps=4, factor=0.5)
    assert [learning_rate(drops, 1.0, step, 100, 10) for step in (3, 4, 8)] == [1.0, 0.5, 0.25]
    by_epoch = LrSchedule(name="step", every_epochs=2, factor=0.5)
    assert [learning_rate(by_epoch, 1.0, step, 3, 100) for step in (5, 6)] == [1.0, 0.5]


def test_averages_keep_less_at_first() -> None:
    assert [decay_of(Ema(decay=0.9), step) for step in (0, 10, 1000)] == [0.1, 0.55, 0.9]
    assert decay_of(Ema(decay=0.9, warmup=False), 0) == 0.9


def test_factors_of_steps_that_are_done_again_are_replaced() -> None:
    scales = Scales()
    for step in range(5):
        scales.note(step, 0.1 * step)
    scales.note(2, 0.5)
    assert [scales.get(step) for step in range(5)] == [0.0, 0.1, 0.5, None, None]


def saved(folder: Path, step: int, best: int | None) -> None:
    """A checkpoint, as far as its metadata go."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    found = {} if best is None else {KEPT: {"metric": "held_out_loss", "value": 0.5, "step": best, "waited": 0}}
    plan = {"stages": [{"start": 0, "stop": 1}]}
    shard = {"bytes": 1, "sha256": "0" * 64}
    content = {"format": 1, "step": step, "compatible": {}, "plan": plan, "shards": {"stage-0.safetensors": shard}}
    (path / "checkpoint.json").write_text(json.dumps({**content, "best": found}))


def test_the_newest_checkpoints_and_the_best_one_stay(tmp_path: Path) -> None:
    for step, best in ((1, None), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (7, 7)):
        saved(tmp_path, step, best)

    def deleted(step: int, keep: int, keeps_best: bool = True) -> list[int]:
        return [int(path.name[5:]) for path in superfluous(tmp_path, step, keep, keeps_best)]

    assert deleted(6, 1) == [5, 3, 2, 1]  # without the best one, and without that of a later step
    assert deleted(6, 1, keeps_best=False) == [5, 4, 3, 2, 1]
    assert deleted(6, 3) == [3, 2, 1]
    (tmp_path / "step-00000004" / "checkpoint.json").write_text("{")  # so the one before is the best that there is
    assert deleted(6, 1) == [5, 4, 3, 1]
