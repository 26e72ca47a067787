"""Benches and launches as a user runs them: real processes, interrupted and resumed."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.processes import horizonml, wait_for

pytestmark = pytest.mark.slow

SMALL = ["job.yaml", "--samples", "64", "--epochs", "1", "--workers", "2"]


def test_an_interrupted_comparison_goes_on_where_it_stopped(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    arguments = ["bench", "compare", *SMALL, "--strategies", "ddp", "pipeline", "--out", "out"]
    process = start(*arguments)
    first, second = (folder / "out" / "runs" / f"{name}-64" for name in ("ddp", "pipeline"))
    wait_for(lambda: second.exists(), "the second run")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "interrupted; the same command goes on where it stopped" in output
    assert (first / "done.json").exists()
    assert not (second / "done.json").exists()
    records = (first / "rank-0.jsonl").stat().st_mtime_ns

    result = horizonml(folder, *arguments)
    assert result.returncode == 0, result.stderr
    assert "1 of 2 runs in out are done already" in result.stdout
    assert "[2/2] pipeline, 64 samples" in result.stdout
    assert "[1/2]" not in result.stdout
    assert (first / "rank-0.jsonl").stat().st_mtime_ns == records
    assert (folder / "out" / "report.html").exists()
    document = json.loads((folder / "out" / "results.json").read_text())
    assert [run["factors"]["strategy"] for run in document["runs"]] == ["ddp", "pipeline"]
    assert document["runs"][0]["environment"]["versions"]["torch"]

    changed = horizonml(folder, *arguments, "--set", "optimizer.lr=0.01", "--strategies", "ddp")
    assert "done already" not in changed.stdout.split("ddp")[0]


def test_a_run_that_fails_is_noted_and_the_others_go_on(folder: Path) -> None:
    many = ["bench", "batch-size", "8", "--models", "digits_cnn", "vit_b_16", "--strategy", "tensor", "--workers", "2"]
    result = horizonml(folder, *many, "--steps", "2", "--out", "out")
    assert result.returncode == 1
    assert "failed: rank" in result.stdout
    page = (folder / "out" / "report.html").read_text()
    assert "vit_b_16-8 failed: rank" in page
    assert "encoder_layer_0.self_attention" in page
    assert "digits_cnn: 8 samples per batch are fastest" in page


def test_scaling_runs_one_thread_a_rank(folder: Path) -> None:
    options = ["--mode", "weak", "--workers", "1", "2", "--strategies", "ddp", "--steps", "4"]
    result = horizonml(
        folder, "bench", "scaling", "--data", "digits", "--set", "batch_size=16", *options, "--out", "out"
    )
    assert result.returncode == 0, result.stderr
    assert "Weak scaling" in result.stdout
    for rank in (0, 1):
        about = json.loads((folder / f"out/runs/ddp-2/rank-{rank}.jsonl").read_text().splitlines()[0])
        assert about["threads"] == 1
        assert about["job"]["batch_size"] == 32


def test_mistakes_are_told_without_a_traceback(folder: Path) -> None:
    for arguments, code, message in (
        ("bench compare job.yaml --strategies single ddq", 2, "'ddq' is not one of"),
        ("bench compare --data digitz", 2, "'digitz' is not one of cifar10, digits, synthetic; did you mean"),
        ("bench compare job.yaml --samples 4", 2, "--samples: 4 is less than a batch, which has 32 samples"),
        ("bench scaling --mode wide", 2, "'wide' is neither weak nor strong"),
        ("report nowhere", 1, "nowhere is not a folder"),
        (
            "train job.yaml --set parallel.strategy=pipeline --set parallel.gradient_compression=fp16",
            2,
            "gradient_compression: strategy pipeline cannot use fp16; set it to none",
        ),
        ("train job.yaml --set parallel.activations=int8", 2, "strategy ddp sends none between stages"),
        ("train job.yaml --set parallel.replan=true", 2, "only strategy auto makes new plans, not ddp"),
        (
            "train job.yaml --set parallel.strategy=tensor --set model.name=tests.models:narrow",
            1,
            "layer 1 has 2 channels, which cannot be split over 3 ranks; use at most 2 workers",
        ),
        ("rendezvous -- no-such-command", 2, "cannot start no-such-command: No such file or directory"),
    ):
        result = horizonml(folder, *arguments.split())
        assert result.returncode == code
        assert message in result.stderr
        assert "Traceback" not in result.stderr


def test_a_rendezvous_before_a_command_lives_as_long_as_it(folder: Path) -> None:
    train = f"{shlex.quote(sys.executable)} -m horizonml train job.yaml -n 2"
    script = f"RANK=0 WORLD_SIZE=2 {train} & RANK=1 WORLD_SIZE=2 {train} && wait $!"
    result = horizonml(folder, "rendezvous", "--", "bash", "-c", script)
    assert result.returncode == 0, result.stderr
    assert "done: records and checkpoints are in runs/test" in result.stdout
    code = horizonml(
        folder, "rendezvous", "--advertise", "10.1.2.3", "--", "bash", "-c", "echo at $HORIZONML_RENDEZVOUS; exit 7"
    )
    assert code.returncode == 7
    assert code.stdout.startswith("at 10.1.2.3:")


def test_a_terminated_rendezvous_ends_its_command(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start(
        "rendezvous",
        "--",
        "bash",
        "-c",
        "sleep 60 > /dev/null & trap 'kill $!; echo ended; exit 3' TERM; echo begun > begun; wait",
    )
    wait_for(lambda: (folder / "begun").exists(), "the command")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=80)
    assert process.returncode == 3
    assert "ended" in output


def test_a_plan_for_devices_on_paper_is_trained_by(folder: Path) -> None:
    job = folder / "job.yaml"
    # With that many samples a step, all three devices are of use, however fast the machine under test is.
    job.write_text(job.read_text().replace("batch_size: 32", "batch_size: 512").replace("300", "1400"))
    measured = horizonml(folder, "plan", "job.yaml", "--profile", "--out", "here.yaml", "--threads", "1")
    assert measured.returncode == 0, measured.stderr
    slow = "{name: slow, profile: here.yaml, speed: 0.5, memory: 1GiB, count: 2, bandwidth: 1Gbit}"
    (folder / "devices.yaml").write_text(f"devices: [{{name: fast, memory: 4GiB}}, {slow}]")
    planned = horizonml(
        folder, "plan", "job.yaml", "--devices", "devices.yaml", "--out", "plan.yaml", "--picture", "plan.png"
    )
    assert planned.returncode == 0, planned.stderr
    assert "whatever the job says (parallel.strategy: ddp)" in planned.stderr
    assert "plan for 3 ranks:" in planned.stdout
    assert "The bottleneck: " in planned.stdout
    assert "Simpler plans: with ddp and equal shares a step would take" in planned.stdout
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    simulated = horizonml(folder, "plan", "job.yaml", "--given", "plan.yaml", "--devices", "devices.yaml")
    assert simulated.returncode == 0, simulated.stderr
    assert planned.stdout.split("predicted: ")[1].split(" a step")[0] in simulated.stdout
    trained = horizonml(folder, "train", "job.yaml", "--plan", "plan.yaml", "--set", "epochs=1")
    assert trained.returncode == 0, trained.stderr
    assert "epoch 1/1" in trained.stdout


def test_auto_measures_plans_and_trains(folder: Path) -> None:
    result = horizonml(folder, "train", "job.yaml", "--set", "parallel.strategy=auto", "--set", "epochs=1")
    assert result.returncode == 0, result.stderr
    assert "predicted to be fastest, with " in result.stdout
    assert "epoch 1/1: held-out loss" in result.stdout
    plans = {
        json.dumps(json.loads((folder / f"runs/test/rank-{rank}.jsonl").read_text().splitlines()[0])["plan"])
        for rank in range(3)
    }
    assert len(plans) == 1
