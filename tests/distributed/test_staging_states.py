"""What else happens to a state happens to one on a pretended device: it is saved, moved, copied, rebuilt and shared."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from horizonml.data.dataset import TensorSpec
from horizonml.engine.link import BoundaryCodec
from horizonml.job.schema import Job
from horizonml.machine import accelerator
from horizonml.machine.accelerator import Compute, GpuReadings
from horizonml.machine.signals import StopRequest
from horizonml.models.boundary import Boundary
from horizonml.plan.local import Local
from horizonml.plan.plan import FORMATS
from horizonml.rendezvous.identity import Identity
from horizonml.runtime import checks
from horizonml.runtime.agreement import model_for
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.worker import Worker
from horizonml.state.mirror import Packer
from horizonml.state.spec import Ema
from horizonml.state.train_state import TrainState
from horizonml.telemetry.metrics import Metrics
from tests.distributed import test_equal, test_following, test_local, test_lossless, test_saving
from tests.distributed.pool import Pool
from tests.distributed.staged import OnDevice, every_state_on_device, run_on
from tests.distributed.truth import distance, expect_same
from tests.pretend import CUDA, PretendDevice, Pretended


def test_a_lost_stage_is_rebuilt(pool: Pool) -> None:
    test_lossless.expect_rebuilt(OnDevice(pool, frozenset((0, 2))), "int8", 2, 9, 12_000.0, 0.5)


@pytest.mark.parametrize("where", [frozenset((1,)), frozenset((0, 2))], ids=["newcomer", "others"])
def test_a_newcomer_follows(pool: Pool, where: frozenset[int]) -> None:
    case = next(case for case in test_following.CASES if "clipped" in case.name)
    found = pool.run(3, run_on, where, test_following.joins, case, 3, False)
    for part in (0, 1):
        expect_same(found[case.newcomer][part], found[2][part])


def test_checkpoints_are_saved_and_resumed(pool: Pool, tmp_path: Path) -> None:
    arguments = (frozenset((1, 2)), test_saving.going_on, test_saving.PLANS["hybrid"], tmp_path, False)
    for result in pool.run(3, run_on, *arguments):
        assert result["problems"] == []
        assert result["loaded"] == [(6, True), (3, True)]


def test_who_misses_the_agreement_learns_of_it(pool: Pool) -> None:
    plan, method, prepared, clip_norm, _ = test_lossless.MISSED[-1]
    straight = pool.run(3, test_lossless.miss, plan, method, None, clip_norm)
    results = pool.run(3, run_on, frozenset((0, 1)), test_lossless.miss, plan, method, 0, clip_norm)
    assert results[0][1] == prepared
    for (state, _), (expected, _) in zip(results, straight, strict=True):
        assert all(distance(state[key], expected[key]) < 1e-5 for key in expected)


def test_a_member_that_begins_otherwise_takes_over_the_first_members_state(pool: Pool) -> None:
    for found, _ in pool.run(3, run_on, frozenset((2,)), test_equal.unequal):
        assert found == [(2, "model/1.running_mean")]


@pytest.mark.parametrize(("format", "model"), [("fp32", "normed"), ("int4", "plain")])
def test_local_steps_are_taken(pool: Pool, format: str, model: str) -> None:
    local = Local(4, 2, 1, format, learning_rate=0.7, momentum=0.9)
    case = test_local.Locally("local", ((1.0, 1.0),), 1, model=model, local=local)
    mixed = pool.run(2, run_on, frozenset((1,)), test_local.synchronise, case, 8, Ema(decay=0.9))
    hosts = pool.run(2, test_local.synchronise, case, 8, Ema(decay=0.9))
    for (state, reports, sent), (other, others, also) in zip(mixed, hosts, strict=True):
        assert [one.local_steps for one in reports] == [one.local_steps for one in others]
        if format == "int4":  # in which step the second half of a sum is sent depends on when the first one arrives
            sent, also = ([(sum(size for size, _ in one), sum(n for _, n in one))] for one in (sent, also))
        assert sent == also
        assert state.keys() == other.keys()
        bound = 1e-4 if format == "fp32" else 2e-2  # where a last bit decides on what a value is rounded to
        assert all(distance(state[key], other[key]) < bound for key in state if key.startswith("model/"))
    own = {key: value for key, value in mixed[0][0].items() if key.startswith("model/")}
    assert all(torch.equal(value, mixed[1][0][key]) for key, value in own.items()), "members hold the same bits"


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_messages_are_encoded_and_decoded_on_the_device(format: str) -> None:
    codec = BoundaryCodec(Boundary(tuple(TensorSpec((8, 9, 9)) for _ in range(2))), format)
    values = tuple(torch.randn(3, 8, 9, 9) for _ in range(2))
    encoded = codec.encode(values, seed=1)
    with PretendDevice():
        there = codec.encode(tuple(value.to(CUDA) for value in values), seed=1)
        assert torch.equal(there.to("cpu"), encoded)
        decoded = codec.decode(encoded.to(CUDA))
        assert all(isinstance(value, Pretended) for value in decoded)
        found = [value.to("cpu") for value in decoded]
    assert all(torch.equal(one, other) for one, other in zip(found, codec.decode(encoded), strict=True))


def test_everybody_else_sees_tensors_of_the_host() -> None:
    job, info = test_lossless.job(clip_norm=0.5), test_lossless.described()
    model = model_for(job, info)
    state = TrainState(model, job.optimizer, job.ema)
    state.take([(0, len(model.chain))])
    with every_state_on_device():
        there = TrainState(model, job.optimizer, job.ema)
        (module,) = there.take([(0, 7), (7, len(model.chain))])[:1]
        assert all(isinstance(tensor, Pretended) for tensor in module.state_dict().values())
        assert not any(isinstance(tensor, Pretended) for tensor in there.tensors().values())
        assert torch.equal(Packer().pack(there), Packer().pack(state))
        kept = dict(module.named_parameters())
        there.keep(range(7))
        (again,) = there.take([(0, 8)])
        now = dict(again.named_parameters())
        assert all(now[name] is kept[name] for name in kept), "layers that stay are the same tensors"
        there.restart()
        there.become(state.tensors())
        (last,) = there.take([(0, len(model.chain))])
        assert all(isinstance(tensor, Pretended) for tensor in last.state_dict().values())
        there.load(state.tensors().__getitem__, state.tensors())
        assert torch.equal(Packer().pack(there), Packer().pack(state))


class PretendedGpu(Compute):
    """What a rank on the pretended device computes on."""

    def memory(self) -> float:
        return 2.0**30

    def taken(self) -> float:
        return 2.0**20

    def readings(self) -> GpuReadings:
        return GpuReadings(50.0, 0.25)


def run(folder: Path, device: str, epochs: int) -> list[dict[str, Any]]:
    """Train a small job with one rank, and return its records."""
    values = {
        "name": "test", "folder": str(folder), "epochs": epochs, "batch_size": 32, "device": device,
        "data": {"name": "digits", "samples": 100}, "parallel": {"strategy": "single"}, "ema": {"decay": 0.9},
        "lr_schedule": {"name": "constant"},
    }  # fmt: skip
    worker = Worker(Job.model_validate(values), Identity(0, 1, "a test"), None, Metrics(0), StopRequest())
    outcome = worker.run(fresh=False, rejoin=False)
    assert outcome is Outcome.COMPLETE
    del worker
    gc.collect()  # which gives the folder back
    return [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]


def test_a_run_on_a_device_is_recorded_saved_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [record["loss"] for record in run(tmp_path / "host", "cpu", 2) if record["kind"] == "evaluation"]
    gpu = PretendedGpu(CUDA, "Pretended GPU")
    monkeypatch.setattr(checks, "choose_device", lambda *_: gpu)
    monkeypatch.setattr(accelerator, "_used", [Compute()])
    with every_state_on_device():
        run(tmp_path / "device", "cuda", 1)
        records = run(tmp_path / "device", "cuda", 2)
        metrics = generate_latest(Metrics(0).registry).decode()
    found = [record["loss"] for record in records if record["kind"] == "evaluation"]
    assert found == pytest.approx(expected, rel=1e-4)
    begun = [record for record in records if record["kind"] == "run"]
    assert {(one["device"], one["device_memory"]) for one in begun} == {("Pretended GPU (cuda:0)", 2.0**30)}
    assert begun[1]["resumed_at"] > 0
    for line in ("memory_bytes", "memory_limit_bytes", "temperature_celsius", "utilization_ratio"):
        assert f"horizonml_accelerator_{line}{{" in metrics
