"""Gradient truth: every plan must change the parameters exactly as one process does on the same batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizonml.plan.plan import Sync
from horizonml.plan.schedules import SCHEDULES
from horizonml.state.spec import Adam, Ema, Sgd
from tests.distributed.plans import ONE, TWO
from tests.distributed.pool import Pool
from tests.distributed.sessions import built
from tests.distributed.truth import (
    SIZES,
    Case,
    End,
    Images,
    Judged,
    RandomBatch,
    expect_same,
    expect_truth,
    reference,
    train,
    trained,
)

THREE, FIVE = (1.0,) * 3, (1.0,) * 5
MOST = 0.1  # the norm to which gradients are clipped, over all stages
CLIP = Sgd(momentum=0.9, weight_decay=1e-3, clip_norm=MOST)
WARM = Ema(decay=0.9)
TIED = "LanguageModel"  # the first and the last layer share a parameter
CASES = [
    Case("single, 3 micro-batches, normed", (ONE,), 3, model="normed"),
    Case("ddp 5, 1f1b, plain", (FIVE,)),
    Case("ddp 2, shares 3:1, normed", ((3.0, 1.0),), 2, model="normed"),
    Case("ddp 2, buffers of several types", (TWO,), model="masked"),
    Case("ddp 2, a member without rows in the smaller batches", ((50.0, 1.0),), 2),
    Case("ddp 2, tied in one stage", (TWO,), model=TIED),
    Case("ddp 2, nesterov", (TWO,), 2, optimizer=Sgd(nesterov=True)),
    Case("ddp 3 in buckets, a member without samples", ((1.0, 2.0, 1e-9),), 2, model="wide"),
    Case("pipeline 3, 1f1b, normed", (ONE, ONE, ONE), 5, model="normed"),
    Case("pipeline 3, ranks in reverse", (ONE, ONE, ONE), 3, reversed_ranks=True),
    Case("pipeline 5, 1 micro-batch", (ONE,) * 5),
    Case("hybrid 2x2, shares 3:1 and 1:2, normed", ((3.0, 1.0), (1.0, 2.0)), 3, model="normed"),
    Case("hybrid 1+2+1, zb-h1, normed", (ONE, TWO, ONE), 4, "zb-h1", "normed"),
    Case("hybrid 2+3, adamw", (TWO, THREE), 2, optimizer=Adam(name="adamw", weight_decay=0.1)),
    *(Case(f"hybrid 2+3, {name}, tied", (TWO, THREE), 2, name, TIED) for name in SCHEDULES if name != "1f1b"),
    # Several tensors cross each cut.
    Case("pipeline 3, gpipe, two branches", (ONE, ONE, ONE), 5, "gpipe", "TwoBranches"),
    Case("pipeline 3, zb-h1, two branches", (ONE, ONE, ONE), 5, "zb-h1", "TwoBranches"),
    Case("pipeline 3, zb-h1, a module that is used twice", (ONE, ONE, ONE), 5, "zb-h1", "Returning"),
    Case("pipeline 3, interleaved, U-Net", (ONE, ONE, ONE), 5, "interleaved", "UNet"),
    Case("pipeline 5, zb-interleaved, normed", (ONE,) * 5, 5, "zb-interleaved", "normed"),
    Case("pipeline 3, zb-v, U-Net", (ONE, ONE, ONE), 5, "zb-v", "UNet"),
    Case("hybrid 1+2+1, zb-v, normed", (ONE, TWO, ONE), 7, "zb-v", "normed"),
    # The first stage has no parameters.
    Case("two stages a rank in buckets, shares", ((20.0, 1.0), (1.0, 20.0)), 6, "interleaved", "wide"),
    Case("two stages a rank, few samples", (TWO, THREE), 12, turns=2),
    Case("pipeline 2, many micro-batches, interleaved", (ONE, ONE), 24, "interleaved", "normed"),
    # Members that split channels see all samples, so BatchNorm, too, must be that of one process.
    Case("tensor of residual, shares", ((3.0, 1.0, 2.0),), model="residual", sync=Sync.CHANNELS),
    Case("tensor of normed, 5", (FIVE,), model="normed", sync=Sync.CHANNELS),
    Case("tensor of depthwise, 2", (TWO,), model="depthwise", sync=Sync.CHANNELS),
    Case("tensor of wide, 2", (TWO,), model="wide", sync=Sync.CHANNELS),
    Case("clipped: single, tied", (ONE,), model=TIED, optimizer=CLIP),
    Case("clipped: ddp 3", (THREE,), 2, optimizer=CLIP),
    Case("clipped: hybrid 2x2, tied", ((3.0, 1.0), (1.0, 2.0)), 3, "zb-h1", TIED, CLIP),
    Case("clipped: a member without samples", ((50.0, 1.0), ONE), 2, optimizer=CLIP),
    # Adam divides gradients by their own size, so that the rounding of small ones shows in full.
    Case("clipped: hybrid, adam", (TWO, ONE), 2, optimizer=Adam(name="adam", clip_norm=MOST)),
    Case("clipped: channels", ((2.0, 1.0, 1.0),), model="residual", sync=Sync.CHANNELS, optimizer=CLIP),
    Case("clipped: below the limit", (ONE, TWO), 2, optimizer=CLIP.model_copy(update={"clip_norm": 1e6})),
    Case("averaged: single, evaluated without", (ONE,), ema=Ema(decay=0.5, warmup=False, evaluate=False)),
    Case("averaged: hybrid 2x2", ((3.0, 1.0), (1.0, 2.0)), 3, "zb-h1", ema=WARM),
    Case("averaged: pipeline 3, tied", (ONE, ONE, ONE), 4, model=TIED, ema=WARM),
    Case("averaged: channels", ((2.0, 1.0),), sync=Sync.CHANNELS, ema=Ema(decay=0.5, warmup=False)),
]
BY_NAME = {case.name: case for case in CASES}


def evaluated(case: Case, state: dict[str, Tensor]) -> Judged:
    """What a whole model finds on the batches that has these parameters and buffers, or their averages."""
    values = {key.split("/")[1]: value for key, value in state.items() if key.startswith("model/")}
    if case.ema is not None and case.ema.evaluate:
        values |= {key.split("/")[1]: value for key, value in state.items() if key.endswith("/average")}
    model = built(f"tests.models:{case.model}")
    stage = model.stage(0, len(model.chain)).eval()
    stage.load_state_dict(values, strict=False)
    batches = [RandomBatch(step) for step in range(3)]
    inputs, labels = (torch.cat([part(batch) for batch in batches]) for part in (_inputs, _labels))
    with torch.no_grad():
        logits = stage(inputs)
    accuracy = float((logits.argmax(1) == labels).double().mean())
    return float(functional.cross_entropy(logits, labels)), {"accuracy": accuracy}


def _inputs(batch: RandomBatch) -> Tensor:
    return batch.inputs(0, batch.size)


def _labels(batch: RandomBatch) -> Tensor:
    return batch.targets(0, batch.size)


def expect_parameters_of_one_process(pool: Pool, case: Case) -> list[End]:
    """Without BatchNorm, every plan must give the gradients of whole batches."""
    whole = replace(case, members=(ONE,), sync=Sync.ALL_REDUCE, micro_batches=1, schedule="1f1b", turns=1)
    by_member = case.model in ("normed", "masked") and case.sync is Sync.ALL_REDUCE  # what each member sees differs
    expected, losses, norms = reference(case if by_member else whole)
    judged = [*((loss, None) for loss in losses), evaluated(case, expected)]
    tolerance = 1e-4 if isinstance(case.optimizer, Adam) and norms else 1e-5
    ends = expect_truth(pool, case, Images(case.model), expected, judged, norms, tolerance)
    if case.optimizer.clip_norm == MOST:
        assert max(norms) > 2 * MOST, "clipping makes a difference"
    assert any(key.endswith("/average") for end in ends for key in end.state) == (case.ema is not None)
    return ends


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameters_after_three_steps_equal_those_of_one_process(pool: Pool, case: Case) -> None:
    expect_parameters_of_one_process(pool, case)


DROPOUT = Case("dropout", (TWO, ONE), 2, model="dropping")


@pytest.mark.parametrize(
    "case", [DROPOUT, BY_NAME["hybrid 2+3, zb-h1, tied"], BY_NAME["clipped: channels"]], ids=lambda case: case.name
)
def test_runs_repeat_bit_for_bit(pool: Pool, case: Case) -> None:
    first, again = (pool.run(case.world_size, trained, case, Images(case.model)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        expect_same(one.state, other.state)
        assert [r.totals for r in one.reports] == [r.totals for r in other.reports]


class Twins(RandomBatch):
    """Samples of which the second half is the first one again."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self._inputs, self._targets = (torch.cat([part[:12]] * 2) for part in (self._inputs, self._targets))


@dataclass(frozen=True)
class OfTwins(Images):
    """Two members see the same samples."""

    def batches(self) -> list[RandomBatch]:
        return [Twins(0), Twins(1)]


def test_members_drop_different_values(pool: Pool) -> None:
    for model, differs in (("dropping", True), ("plain", False)):
        for end in pool.run(2, trained, Case("twins", (TWO,), model=model), OfTwins(model)):
            assert all((report.divergence or 0.0) > 0.1 for report in end.reports) == differs


def test_time_splits_add_up_and_bytes_are_counted(pool: Pool) -> None:
    case = Case("hybrid", (ONE, (1.0, 1.0), ONE), 4, model="normed")
    results = pool.run(4, train, case, 6)
    for _, reports in results:
        for report in reports:
            assert report.compute + report.transfer + report.wait == pytest.approx(report.wall, rel=0.02)
            assert min(report.compute, report.transfer, report.wait) >= 0
            ends = [span.end for span in report.spans]
            assert all(a.end == b.start for a, b in zip(report.spans, report.spans[1:], strict=False))
            assert ends == sorted(ends)
    sent = [sum(report.bytes_sent for report in reports) for _, reports in results]
    received = [sum(report.bytes_received for report in reports) for _, reports in results]
    assert sum(sent) == sum(received)
    model = built("tests.models:normed")
    plan = case.plan(len(model.chain))
    samples = 2 * sum(SIZES)
    entry = model.chain.boundaries[plan.stages[1].start].bytes_per_sample * samples
    left = model.chain.boundaries[plan.stages[2].start].bytes_per_sample * samples
    assert (sent[0], received[0]) == (entry, entry)  # activations out, gradients in
    assert (sent[3], received[3]) == (left, left)
    assert sent[1] + sent[2] > entry + left  # and the sum of gradients between the members


def test_divergence_is_that_of_the_members_gradients_before_reduction(pool: Pool) -> None:
    case = Case("ddp 2, shares 3:1", ((3.0, 1.0),), 1, optimizer=Sgd(momentum=0, weight_decay=0))
    results = pool.run(2, train, case, 1)
    model = built("tests.models:plain")
    stage = model.stage(0, len(model.chain))
    batch = RandomBatch(0)

    def gradient(start: int, stop: int) -> Tensor:
        loss = functional.cross_entropy(stage(batch.inputs(start, stop)), batch.targets(start, stop))
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(stage.parameters()))])

    mean = gradient(0, 24)
    expected = [float((gradient(a, b) - mean).norm() / mean.norm()) for a, b in ((0, 18), (18, 24))]
    assert [reports[0].divergence for _, reports in results] == pytest.approx(expected, rel=1e-4)
