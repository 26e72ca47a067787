"""Whole runs with local steps: their accuracy, ranks that are lost and come back, and checkpoints."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from horizonml.telemetry.log import read_lines
from tests.distributed.processes import Service, horizonml, rank_process, steps, wait_for

pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.Popen[str]"]
QUIET = ["--set", "telemetry.divergence_every=0", "--set", "lr_schedule={name: constant}"]
ADAM = ["--set", "optimizer={name: adamw, lr: 0.002}", "--set", "ema.decay=0.9"]
LOCALLY = ["--set", "parallel.strategy=ddp", "--set", "parallel.sync={every: 8, momentum: 0.9}"]

STAGES = "[{ranks: [0, 1], layers: [0, 7]}, {ranks: [2, 3], layers: [8, 16]}]"
REPLICAS = [
    "--set",
    f"parallel={{stages: {STAGES}, micro_batches: 2, sync: {{every: 8, fragments: 2, delay: 1, momentum: 0.9}}}}",
]


def records(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    lines = read_lines(folder / "runs" / "test" / f"rank-{rank}.jsonl")
    return [record for record in lines if record["kind"] == kind]


@pytest.mark.longest
def test_digits_reach_the_accuracy_of_ddp_with_a_hundredth_of_the_bytes(folder: Path) -> None:
    job = (
        (Path(__file__).resolve().parents[2] / "jobs" / "digits.yaml")
        .read_text()
        .replace("name: digits\n", "name: test\n", 1)
    )
    (folder / "job.yaml").write_text(job)
    accuracy, per_sample = {}, {}
    for format in ("", "int4", "topk"):  # fp32 has less to lose
        sync = ["--set", f"parallel.sync={{every: 16, format: {format}}}"] if format else []
        options = ["--workers", "4", "--fresh", "--set", "epochs=30", "--set", "checkpoint.enabled=false", *sync]
        done = horizonml(folder, "train", "job.yaml", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        accuracy[format] = records(folder, "evaluation")[-1]["accuracy"]
        sent = sum(record["bytes_sent"] for rank in range(4) for record in records(folder, "step", rank))
        per_sample[format] = sent / sum(record["batch"] for record in records(folder, "step"))
    assert accuracy[""] > 0.98
    for format in ("int4", "topk"):
        assert accuracy[format] > accuracy[""] - 0.01, accuracy
    assert per_sample[""] / per_sample["int4"] > 100
    assert per_sample[""] / per_sample["topk"] > 300


def state(folder: Path) -> dict[str, torch.Tensor]:
    """What the newest checkpoint has."""
    newest = sorted((folder / "runs" / "test" / "checkpoints").glob("step-*"))[-1]
    return {
        f"{file.name}: {key}": value for file in newest.glob("*.safetensors") for key, value in load_file(file).items()
    }


@pytest.mark.parametrize("way", [LOCALLY, REPLICAS], ids=["ddp", "replicas"])
def test_a_run_that_is_resumed_ends_with_the_same_bits(folder: Path, way: list[str]) -> None:
    def train(*options: str) -> None:
        done = horizonml(folder, "train", "job.yaml", *way, "--workers", "4", *QUIET, *ADAM, *options)
        assert done.returncode == 0, done.stdout + done.stderr

    train("--set", "steps=48")
    whole = state(folder)
    assert {key.partition(":")[0] for key in whole} >= {f"inner-{place}-stage-0.safetensors" for place in range(2)}
    assert any(key.endswith("outer_momentum") for key in whole)
    train("--fresh", "--set", "steps=24")
    train("--set", "steps=48")
    assert records(folder, "run")[-1]["resumed_at"] == 24
    again = state(folder)
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[key], whole[key]) for key in whole)

    train("--set", "steps=56", "--set", "parallel.sync.momentum=0")
    assert not any(key.endswith("outer_momentum") for key in state(folder)), "a momentum that nobody keeps up to date"

    # Any other plan goes on from it, too, with the optimizer state of the first member.
    for options in (["--workers", "1", "--set", "parallel.strategy=single"], ["--workers", "3"]):
        other = ["--set", "parallel={strategy: ddp}", *options]
        before = json.loads(
            (sorted((folder / "runs/test/checkpoints").glob("step-*"))[-1] / "checkpoint.json").read_text()
        )
        more = ["--set", f"steps={before['step'] + 8}"]
        done = horizonml(folder, "train", "job.yaml", *other, *QUIET, *ADAM, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert records(folder, "run")[-1]["resumed_at"] == before["step"]
        assert "Traceback" not in done.stdout + done.stderr


def test_a_rank_that_is_lost_costs_the_others_no_step(folder: Path, start: Start, service: Service) -> None:
    def rank(number: int) -> subprocess.Popen[str]:
        options = [*LOCALLY, *QUIET, *ADAM, "--set", "epochs=5000", "--set", "checkpoint.enabled=false"]
        place = {"RANK": str(number), "WORLD_SIZE": "3", "HORIZONML_RENDEZVOUS": service.address}
        return start("train", "job.yaml", *options, **place)

    ranks = [rank(number) for number in range(3)]
    wait_for(lambda: steps(folder) > 20, "the first steps")
    before = steps(folder)
    rank_process(folder, 2).kill()
    wait_for(lambda: len(records(folder, "run")) == 2 and bool(records(folder, "recovery")), "a group of two")
    recovery, resumed = records(folder, "recovery")[0], records(folder, "run")[1]
    assert (recovery["source"], recovery["lost"]) == ("memory", [2])
    assert resumed["world_size"] == 2
    assert resumed["resumed_at"] >= before
    assert recovery["steps_repeated"] == 0

    ranks[2] = rank(2)  # it joins at a synchronisation, with what all have agreed on
    wait_for(lambda: len(records(folder, "run")) == 3, "a group of three again")
    joined = records(folder, "run")[2]
    assert joined["world_size"] == 3
    assert joined["resumed_at"] % 8 == 0
    done = steps(folder)
    wait_for(lambda: steps(folder) > done + 20, "more steps")
    for process in ranks:
        process.terminate()
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs
    assert "Traceback" not in "".join(outputs)


def test_ctrl_c_says_how_long_the_run_goes_on_and_a_second_one_ends_it(folder: Path, start: Start) -> None:
    options = ["--set", "parallel.strategy=ddp", "--set", "parallel.sync={every: 100000}", "--set", "steps=200000"]
    launcher = start("train", "job.yaml", "--workers", "2", *options)
    wait_for(lambda: steps(folder) > 3, "the first steps")
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout is not None
    line = ""
    while "stopping" not in line:
        line = launcher.stdout.readline()
        assert line, "the run has ended, and said nothing"
    assert "stopping at the next synchronisation, after step 100000 at the latest" in line
    before = steps(folder)
    wait_for(lambda: steps(folder) > before, "one more step")
    launcher.send_signal(signal.SIGINT)
    output, _ = launcher.communicate(timeout=120)
    assert "all ranks end at once, as asked" in output
    assert "stopping" not in output
    assert "Traceback" not in output
    assert launcher.returncode == 130
