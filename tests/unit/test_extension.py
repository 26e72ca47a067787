"""A way to agree on gradients that is added from outside: nothing that speaks of such ways is silent on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from horizonml.plan.syncs import SYNCS, Sync, resolve

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own, as an extension is there before a job is read; and because it stays in the table.
SPEAKS = """
import pickle
from dataclasses import replace
from tests.toy_sync import TOY
from horizonml.errors import JobError
from horizonml.job.jobfile import json_schema, parse
from horizonml.plan.lossy import Setting, Tried
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.planner.cost import coding_seconds, copies_for_sync, synced_bytes
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.explain import explain
from horizonml.planner.choose import choose
from horizonml.planner.strategies import fixed_plan, problem_for
from horizonml.planner.profile import Host, Network
from horizonml.planner.reasons import inexact_parts
from horizonml.profiling.measure import codec_seconds
from tests.unit.test_planner import profile
import time

assert pickle.loads(pickle.dumps(TOY)) is TOY
schema = json_schema()["$defs"]
assert "toy" in schema["StageSpec"]["properties"]["sync"]["anyOf"][0]["enum"]
assert "toy" in schema["Parallel"]["properties"]["gradient_compression"]["enum"]
assert "`toy` sums 16-bit brain floats, which is not exact" in schema["StageSpec"]["properties"]["sync"]["description"]
try:
    parse("{parallel: {exact: true, strategy: ddp, gradient_compression: toy}}", "job.yaml")
except JobError as error:
    assert "toy) is not exact" in str(error)
else:
    raise AssertionError("it is not exact")
asked = parse("{batch_size: 24, parallel: {strategy: ddp, gradient_compression: toy}}", "job.yaml")
plan = fixed_plan(asked, 6, 3)
assert plan.stages[0].sync is TOY and Plan.from_json(plan.to_json()) == plan
assert inexact_parts(plan) == ["sums of gradients by toy"]
assert codec_seconds(time.perf_counter)[0]["toy"] > 0
free = parse("{batch_size: 24, parallel: {strategy: auto, exact: false}}", "job.yaml")
slow = replace(profile(*[0.001] * 6, parameters=1 << 20), codec_seconds_per_byte={"toy": 1e-12, "fp16": 1.0})
problem = problem_for(free, [slow] * 2, [Host((rank,), 1.0, 1e12) for rank in range(2)], Network(1e-4, 1e6), 0)
assert TOY in problem.constraints.syncs
assert TOY not in problem.constraints.without_trial("there is none").syncs
evaluator = Evaluator(problem)
ddp = Plan((Stage(0, 6, (0, 1), (1.0, 1.0), TOY),))
(reason,) = (one for one in explain(evaluator, evaluator.judge(ddp), ["a", "b"]) if one.about == "sum")
assert not reason.exact and "16-bit brain floats" in reason.text and TOY.error in reason.text
assert synced_bytes(problem, TOY, 0, 6) == synced_bytes(problem, Sync.ALL_REDUCE, 0, 6) / 8
assert TOY.load().__name__ == "ToyAllReduce"
assert coding_seconds(problem, TOY, (0, 1), 1e6) == 2e-6
assert copies_for_sync(ddp, ddp.stages[0]) == 1
assert any(stage.sync is TOY for stage in evaluator.plan([], [[0, 1]], 1).stages)
(choice,) = Setting(ddp).lossy
assert str(choice) == "stage 0 sums gradients as toy"
assert Setting(ddp).raised(choice).plan.stages[0].sync is Sync.FP16
assert Setting(ddp).cautious().plan.stages[0].sync is Sync.FP16
assert Tried.of(0, 8, Setting(ddp), ()).may_sum(TOY) and not Tried(0, 8, {}, "fp16", "fp32").may_sum(TOY)
"""


def test_a_way_from_outside_is_known_everywhere() -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_facts_of_a_way_agree_with_one_another() -> None:
    page = (ROOT / "docs" / "slow-links.md").read_text(encoding="utf-8")
    for sync in (sync for sync in SYNCS.values() if not sync.steps_alone):
        assert sync.package or callable(sync.load())
        assert not sync.coding or callable(resolve(sync.coding))
        assert sync.exact == (not sync.error), "what is not exact says by how much"
        assert sync.exact == (sync.ratio == 1 and sync.numbers is None), "fewer bytes are never exact"
        assert sync.exactly.exact
        assert bool(sync.codings) == bool(sync.codec)
        if sync.offered:
            assert not sync.exact
            assert sync.exactly is Sync.ALL_REDUCE, "which the planner would take instead"
            assert sync.name in page
