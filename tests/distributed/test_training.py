"""The loop: checkpoints, resuming with the same or another plan, determinism, stopping."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.api.exports.export import export
from horizonml.comm.group import Group
from horizonml.data.choose import describe, load
from horizonml.errors import CheckpointError
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.models.zoo import build
from horizonml.planner.strategies import fixed_plan
from horizonml.runtime.trainer import Training
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.shards import Metadata, read_metadata, steps
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.recorder import Display, Recorder
from tests.distributed.pool import Pool
from tests.distributed.sessions import session_for, state_of
from tests.records import run_info

PIPELINE3 = [{"ranks": [rank], "layers": list(layers)} for rank, layers in enumerate(((0, 2), (3, 5), (6, 9)))]
HYBRID3 = [{"ranks": [0, 1], "shares": [3, 1], "layers": [0, 4]}, {"ranks": [2], "layers": [5, 9]}]


def job(folder: Path, stages: list[dict[str, Any]] | None = None, workers: int = 1, **changes: Any) -> Job:
    """200 digits, 3 epochs of 7 steps, the last of 8 samples."""
    values: dict[str, Any] = {
        "folder": str(folder),
        "epochs": 3,
        "batch_size": 32,
        "model": {"name": "tests.models:plain"},
        "data": {"name": "digits", "samples": 200},
        "parallel": {"strategy": "ddp" if workers > 1 else "single", "workers": workers, "micro_batches": 2},
        # Steps take milliseconds here, so that checkpoints in the background would be left out now and then.
        "checkpoint": {"every_steps": 5, "keep": 2, "background": False},
        "telemetry": {"timeline_every": 4, "divergence_every": 3},
    }
    if stages is not None:
        values["parallel"] = {"stages": stages, "micro_batches": 4}
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return parse(json.dumps(values), "job")


class StopAfter(StopRequest):
    """Wants to stop once it has been asked this often."""

    def __init__(self, asked: int) -> None:
        self._left = asked

    @property
    def wanted(self) -> bool:  # type: ignore[override]
        self._left -= 1
        return self._left < 0


def run(
    rank: int,
    world_size: int,
    store: Store,
    job: Job,
    stop_after: int | None = None,
    stopping_rank: int = 0,
    outlived: bool = False,
) -> tuple[str, dict[str, Tensor], Metadata | None]:
    """What a rank does after the rendezvous; its outcome, its state, and what it resumed from."""
    group = Group(store, rank, world_size, 30.0)
    info = describe(job.data)
    assert info is not None
    model = build(job.model, job.seed, info.outputs, InputSpec(info.inputs))
    plan = fixed_plan(job, len(model.chain), world_size)
    session = session_for(plan, model, group, job.optimizer, job.batch_size, ema=job.ema)
    data = load(job.data, info, Path("unused"), inputs=session.is_first, targets=session.is_last)
    if "{rank}" in str(job.run_folder):  # every rank is a machine with a disk of its own
        job = job.model_copy(update={"folder": str(job.run_folder).format(rank=rank)})
    compatible = {"model": job.model.name, "batch_size": job.batch_size}
    checkpoints = Checkpoints(job.run_folder / "checkpoints", group, job.checkpoint.keep, compatible)
    recorder = Recorder(
        job.run_folder / f"rank-{rank}.jsonl",
        Display(),
        run_info(job, session.plan, rank),
        job.telemetry.timeline_every,
    )
    try:
        resumed = checkpoints.resume(session.state, plan)
        if outlived:  # as if the ranks had the state in memory, and had lost their group before they saved it
            group.barrier()
            session.state.metrics = {}
            checkpoints.newest = None
            if rank == 0:
                shutil.rmtree(max((job.run_folder / "checkpoints").glob("step-*")))
            group.barrier()
        stop = StopAfter(stop_after) if stop_after is not None and rank == stopping_rank else StopRequest()
        outcome = Training(job, session, data, checkpoints, recorder, stop).run()
        state = state_of(session)
    finally:
        recorder.close("done")
        group.close()
    return outcome, state, resumed


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def whole(results: list[tuple[str, dict[str, Tensor], Any]]) -> dict[str, Tensor]:
    """The state of all stages together."""
    return {key: value for _, state, _ in results for key, value in state.items()}


@dataclass(frozen=True)
class Kind:
    name: str
    world_size: int
    stages: list[dict[str, Any]] | None = None
    model: str = "plain"
    strategy: str | None = None

    def job(self, folder: Path, **changes: Any) -> Job:
        if self.strategy is not None:
            changes["parallel"] = {"strategy": self.strategy, "micro_batches": 1}
        return job(folder, self.stages, self.world_size, model={"name": f"tests.models:{self.model}"}, **changes)


KINDS = [
    Kind("single, dropout", 1, model="dropping"),
    Kind("tensor 2, BatchNorm", 2, model="normed", strategy="tensor"),
    Kind(
        "hybrid 2+1, BatchNorm", 3, [{"ranks": [0, 1], "layers": [0, 5]}, {"ranks": [2], "layers": [6, 14]}], "normed"
    ),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_run_interrupted_and_resumed_equals_the_uninterrupted_one(pool: Pool, tmp_path: Path, kind: Kind) -> None:
    straight = pool.run(kind.world_size, run, kind.job(tmp_path / "straight", epochs=2))
    assert {outcome for outcome, _, _ in straight} == {"complete"}

    broken = kind.job(tmp_path / "broken", epochs=2)
    first = pool.run(kind.world_size, run, broken, 9, kind.world_size - 1)  # in the middle of the second epoch
    assert [outcome for outcome, _, _ in first] == ["re-form"] * (kind.world_size - 1) + ["stopped"]
    second = pool.run(kind.world_size, run, broken)
    assert {resumed.step for _, _, resumed in second} == {10}
    for (outcome, state, _), (_, expected, _) in zip(second, straight, strict=True):
        assert outcome == "complete"
        assert equal(state, expected)

    for rank in range(kind.world_size):
        losses = [
            {
                line["step"]: line["loss"]
                for line in read_lines(tmp_path / name / f"rank-{rank}.jsonl")
                if "loss" in line
            }
            for name in ("straight", "broken")
        ]
        assert losses[0] == losses[1]


def test_a_state_that_outlived_its_group_is_evaluated_and_saved(pool: Pool, tmp_path: Path) -> None:
    kind = Kind("ddp 2", 2)
    whole_run = pool.run(2, run, kind.job(tmp_path, epochs=1))
    again = pool.run(2, run, kind.job(tmp_path, epochs=1), None, 0, True)
    assert {outcome for outcome, _, _ in again} == {"complete"}
    assert equal(whole(again), whole(whole_run))
    evaluations = [line for line in read_lines(tmp_path / "rank-0.jsonl") if line["kind"] == "evaluation"]
    assert evaluations[-1]["step"] == evaluations[-2]["step"]
    third = pool.run(2, run, kind.job(tmp_path, epochs=1))
    assert {outcome for outcome, _, _ in third} == {"already complete"}
    assert equal(whole(third), whole(whole_run))


def test_a_checkpoint_goes_from_pipeline_3_to_ddp_2_to_single(pool: Pool, tmp_path: Path) -> None:
    three = pool.run(3, run, job(tmp_path, PIPELINE3), 6)
    assert [outcome for outcome, _, _ in three] == ["stopped"] + ["re-form"] * 2
    state = whole(three)
    exported = tmp_path / "model.pt"
    export(tmp_path, exported)

    # Nothing left to do at step 7: what is resumed is what was saved.
    done = {"epochs": 1}
    two = pool.run(2, run, job(tmp_path, workers=2, **done))
    one = pool.run(1, run, job(tmp_path, **done))
    for outcome, other, resumed in [*two, *one]:
        assert (outcome, resumed.step) == ("already complete", 7)
        assert equal(other, state)
    weights = torch.load(exported, weights_only=True)
    assert equal(
        {f"model/{key}": value for key, value in weights.items()}, {k: v for k, v in state.items() if "model/" in k}
    )

    # And all go on to about the same place.
    ends = []
    tensor = {"parallel": {"strategy": "tensor", "micro_batches": 1}}
    for world_size, stages, changes in ((1, None, {}), (2, None, tensor), (3, HYBRID3, {})):
        folder = tmp_path / f"on-{world_size}"
        shutil.copytree(tmp_path / "checkpoints", folder / "checkpoints")
        results = pool.run(world_size, run, job(folder, stages, world_size, epochs=2, **changes))
        assert {resumed.step for _, _, resumed in results} == {7}
        ends.append(whole(results))
    for end in ends[1:]:
        for key, value in ends[0].items():
            torch.testing.assert_close(end[key], value, rtol=1e-3, atol=1e-4)


def test_machines_with_disks_of_their_own_send_each_other_what_they_lack(pool: Pool, tmp_path: Path) -> None:
    disks, short = tmp_path / "disk{rank}", {"epochs": 2}
    straight = pool.run(3, run, job(tmp_path / "straight", PIPELINE3, **short))
    pool.run(3, run, job(disks, PIPELINE3, **short), 9)

    def files(rank: int) -> list[str]:
        (newest,) = (tmp_path / f"disk{rank}" / "checkpoints").glob("step-00000010")
        return sorted(path.name for path in newest.iterdir())

    shards = [f"stage-{stage}.safetensors" for stage in range(3)]
    # Every machine has its own stage's shard and that of the one before, and the first machine has all.
    assert files(0) == ["checkpoint.json", *shards]
    for rank in (1, 2):
        assert files(rank) == sorted(["checkpoint.json", shards[rank - 1], shards[rank]])
    metadata = read_metadata(tmp_path / "disk1" / "checkpoints" / "step-00000010")
    assert metadata.shards[shards[2]].machines == ["rank 2", "rank 0"]

    # The first machine vanishes with its disk, or the two others do, and whoever is left goes on.
    for number, left in enumerate(([1, 2], [0])):
        for place, rank in enumerate(left):  # the survivors' ranks move up
            shutil.copytree(tmp_path / f"disk{rank}", tmp_path / f"{number}-left{place}")
        again = pool.run(len(left), run, job(tmp_path / f"{number}-left{{rank}}", workers=len(left), **short))
        assert {(outcome, resumed.step) for outcome, _, resumed in again} == {("complete", 10)}
        for key, value in whole(straight).items():
            torch.testing.assert_close(whole(again)[key], value, rtol=1e-3, atol=1e-4)

    # One machine has lost its disk, and those of two others are damaged: the result is the same.
    shutil.rmtree(tmp_path / "disk1")
    (tmp_path / "disk2" / "checkpoints" / "step-00000010" / shards[2]).write_bytes(b"x")
    (tmp_path / "disk2" / "checkpoints" / "step-00000010" / shards[0]).write_bytes(b"of no use there")
    again = pool.run(3, run, job(disks, PIPELINE3, **short))
    assert {resumed.step for _, _, resumed in again} == {10}
    assert equal(whole(again), whole(straight))

    # Two machines go on with what three have saved, and a new one comes with an empty disk.
    shutil.rmtree(tmp_path / "disk2")
    for workers in (2, 3):
        done = pool.run(workers, run, job(disks, workers=workers, epochs=3), 0)
        assert {resumed.step for _, _, resumed in done} == {14 if workers == 2 else 15}
    assert files_equal(tmp_path / "disk0", tmp_path / "disk2")  # members of a stage are equal bit for bit


def test_what_an_earlier_run_saved_is_kept_and_neither_resumed_nor_in_the_way(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, run, job(tmp_path, epochs=1))
    ends = pool.run(1, set_aside, job(tmp_path))
    assert [path.name for path in steps(tmp_path / "checkpoints.previous")] == ["step-00000007", "step-00000005"]
    assert ends == [["step-00000005"]]

    # A damaged one with a higher number is passed over, and does not push the new ones out.
    (tmp_path / "checkpoints" / "step-00000200").mkdir()
    (tmp_path / "checkpoints" / "step-00000200" / "checkpoint.json").write_text("{")
    ((_, _, resumed),) = pool.run(1, run, job(tmp_path), 4)
    assert resumed.step == 5
    names = ["step-00000200", "step-00000010", "step-00000005"]
    assert [path.name for path in steps(tmp_path / "checkpoints")] == names


def set_aside(rank: int, world_size: int, store: Store, job: Job) -> list[str]:
    """Begin anew in a folder with checkpoints, and save one."""
    group = Group(store, rank, world_size, 30.0)
    model = build(job.model, job.seed, 10, InputSpec.of((1, 8, 8)))
    plan = fixed_plan(job, len(model.chain), world_size)
    session = session_for(plan, model, group, job.optimizer, job.batch_size)
    compatible = {"model": job.model.name, "batch_size": job.batch_size}
    checkpoints = Checkpoints(job.run_folder / "checkpoints", group, 2, compatible)
    checkpoints.set_aside()
    session.state.step = 5
    assert checkpoints.save(session.state, plan, {}) == []
    return [path.name for path in steps(job.run_folder / "checkpoints")]


def files_equal(one: Path, other: Path) -> bool:
    newest = [sorted((folder / "checkpoints").iterdir())[-1] for folder in (one, other)]
    assert newest[0].name == newest[1].name
    return all(
        (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes()
        for name in ("checkpoint.json", "stage-0.safetensors")
    )


DAMAGES = {
    "truncated": "it has 100 bytes instead of",
    "flipped": "does not match its SHA-256",
    "missing": "",
    "metadata": "checkpoint.json is missing or damaged",
}


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(pool: Pool, tmp_path: Path) -> None:
    small = {"workers": 2, "epochs": 1, "checkpoint": {"every_steps": 2}}
    straight = whole(pool.run(2, run, job(tmp_path / "straight", **small)))
    stopped = tmp_path / "stopped"
    pool.run(2, run, job(stopped, **small), 5)
    for damage, words in DAMAGES.items():
        broken = tmp_path / damage
        shutil.copytree(stopped, broken)
        newest = broken / "checkpoints" / "step-00000006"
        shard = newest / "stage-0.safetensors"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        if damage == "missing":
            shard.unlink()
        elif damage == "metadata":
            (newest / "checkpoint.json").write_text("{")
        else:
            shard.write_bytes(content[:100] if damage == "truncated" else content)
        if words:
            shutil.copytree(newest, tmp_path / "one" / damage / "checkpoints" / newest.name)
            with pytest.raises(CheckpointError, match=words):
                export(tmp_path / "one" / damage, tmp_path / "model.pt")
        results = pool.run(2, run, job(broken, **small))
        assert {resumed.step for _, _, resumed in results} == {4}, damage
        assert equal(whole(results), straight), damage

    # With none left that is intact, nothing is silently started over.
    for shard in (stopped / "checkpoints").glob("*/stage-0.safetensors"):
        shard.write_bytes(b"x" * 100)
    ((ok, text), _) = pool.run_each([(run, (rank, 2), (job(stopped, **small),)) for rank in range(2)])
    assert not ok
    assert "no checkpoint can be resumed (--fresh, or fresh=True in Python, starts over)" in text
    assert "step-00000006" in text
    with pytest.raises(CheckpointError, match="damaged"):
        export(stopped, tmp_path / "model.pt")


def test_a_checkpoint_of_another_run_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, run, job(tmp_path), 3)
    ((ok, text),) = pool.run_each([(run, (0, 1), (job(tmp_path, batch_size=16),))])
    assert not ok
    assert "belongs to another run: batch_size was 32, now it is 16" in text


def test_records_and_checkpoints_are_complete_and_true(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, run, job(tmp_path, HYBRID3, epochs=2))
    mark, *names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert mark.startswith(".generation-0-0-")
    assert names == ["step-00000010", "step-00000014"]  # and the others are pruned
    newest = tmp_path / "checkpoints" / "step-00000014"
    assert sorted(p.name for p in newest.iterdir()) == ["checkpoint.json", "stage-0.safetensors", "stage-1.safetensors"]
    metadata = json.loads((newest / "checkpoint.json").read_text())
    assert (metadata["step"], metadata["complete"], metadata["metrics"]["epoch"]) == (14, True, 2)
    assert metadata["metrics"]["held_out_accuracy"] > 0.1
    assert metadata["plan"]["stages"][0]["shares"] == [3, 1]
    for rank in range(3):
        lines = list(read_lines(tmp_path / f"rank-{rank}.jsonl"))
        assert lines[0]["kind"] == "run"
        assert lines[-1]["kind"] == "end"
        steps = [line for line in lines if line["kind"] == "step"]
        assert [line["step"] for line in steps] == list(range(1, 15))
        assert [line["batch"] for line in steps[:7]] == [32] * 6 + [8]
        for line in steps:
            assert line["compute"] + line["transfer"] + line["wait"] == pytest.approx(line["wall"], rel=0.02)
            assert line["rss_bytes"] > 50 << 20
            assert line["cpu_seconds"] > 0
            assert (line["divergence"] is not None) == (rank != 2 and (line["step"] - 1) % 3 == 0)
        assert steps[0]["samples"] == {0: 24, 1: 8, 2: 32}[rank]
        evaluations = [line for line in lines if line["kind"] == "evaluation"]
        assert [line["step"] for line in evaluations] == [7, 14]
        assert {line["samples"] for line in evaluations} == {359}
        timelines = [line for line in lines if line["kind"] == "timeline"]
        assert [line["step"] for line in timelines] == [4, 8, 12]
        kinds = {(kind, what) for kind, what, *_ in timelines[0]["spans"]}
        assert {("compute", "forward"), ("compute", "backward"), ("compute", "update")} <= kinds


def test_checkpoints_in_the_background_are_recorded_with_their_pauses(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, run, job(tmp_path, workers=2, epochs=1, checkpoint={"background": True}))
    for rank in range(2):
        lines = [line for line in read_lines(tmp_path / f"rank-{rank}.jsonl") if line["kind"] == "checkpoint"]
        assert all(line["saved"] and line["seconds"] > 0 for line in lines)
        assert [(line["step"], line["writing_seconds"] > 0) for line in lines] == [(5, True), (7, False)]
    assert steps(tmp_path / "checkpoints")[0].name == "step-00000007"
