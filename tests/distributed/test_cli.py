"""The command line as a user meets it: real processes, signals and mistakes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from horizonml.plan.schedules import SCHEDULES
from horizonml.report.records import load_run
from tests.commands import command
from tests.distributed.processes import environment, horizonml, ours, rank_process, steps, wait_for

ENDLESS = ["-n", "2", "--set", "epochs=10000"]


def test_training_here_ends_well_is_shown_elsewhere_and_its_model_is_exported(folder: Path) -> None:
    options = ["--set", "parallel.strategy=pipeline", "--set", "telemetry.tensorboard=true", "--workers", "2"]
    result = horizonml(folder, "train", "job.yaml", *options)
    assert result.returncode == 0, result.stderr
    assert "epoch 2/2: held-out loss" in result.stdout
    assert "done: records and checkpoints are in runs/test" in result.stdout
    assert result.stderr == ""
    run = folder / "runs" / "test"
    worth = load_run("test", run).worth
    assert worth is not None
    assert worth.together > 0
    assert len(worth.alone) == 1, "both ranks are on this device"
    assert worth.words in result.stdout
    assert list((run / "tensorboard").glob("events.*"))
    again = horizonml(folder, "train", "job.yaml", "--workers", "2")
    assert again.returncode == 0
    assert "trained to the end already" in again.stdout
    fresh = horizonml(folder, "train", "job.yaml", "--fresh", "--set", "epochs=1", "--set", "parallel.strategy=hybrid")
    assert fresh.returncode == 0, fresh.stderr
    assert "epoch 1/1" in fresh.stdout
    assert (folder / "runs" / "test.previous" / "checkpoints").is_dir()
    exported = command(folder, "export", "runs/test", "model.pt")
    assert exported.returncode == 0
    assert re.search(r"\(step 10, held-out accuracy [\d.]+% after epoch 1\)", exported.stdout)
    assert "conv1a.weight" in torch.load(folder / "model.pt", weights_only=True)
    page = command(folder, "report", "runs/test", "--page", "job.yaml/p.html")
    assert page.returncode == 2
    assert "error: cannot write job.yaml/p.html: " in page.stderr


def test_ctrl_c_saves_a_checkpoint_and_the_same_command_goes_on(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("train", "job.yaml", *ENDLESS)
    wait_for(lambda: steps(folder) > 5, "the first steps")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped as asked: a checkpoint is saved" in output
    assert ours(folder) == []
    (saved,) = sorted((folder / "runs" / "test" / "checkpoints").iterdir())[-1:]
    step = json.loads((saved / "checkpoint.json").read_text())["step"]
    process = start("train", "job.yaml", *ENDLESS)
    wait_for(lambda: steps(folder) > step + 5, "the steps after it")
    rank_process(folder, 1).terminate()  # which makes all save and leave
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert f"resumed from step {step} of" in output
    assert "stopped as asked" in output


def test_warnings_are_shown_once_and_a_checkpoint_that_cannot_be_saved_is_an_error(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    run = folder / "runs" / "test"
    model = ["--set", "model.name=tests.models:complaining"]
    process = start("train", "job.yaml", *ENDLESS, *model)
    wait_for(lambda: steps(folder) > 5, "the first steps")
    wait_for(lambda: obstructed(run / "checkpoints"), "the folder to go away, as a disk does")
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 10, "an epoch whose checkpoint cannot be saved")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert output.count("UserWarning: of the model's own") == 1
    assert "was not saved: rank 0: " in output
    assert "could not be saved" in output.rpartition("error: ")[2]
    assert "Traceback" not in output
    for rank in range(2):
        assert "UserWarning: of the model's own" in (run / f"rank-{rank}.log").read_text()
    assert "a checkpoint is saved" not in output


def obstructed(folder: Path) -> bool:
    """Put a file in the place of a folder, which a rank may make again at any moment."""
    try:
        folder.rename(folder.with_name(f"gone-{time.monotonic_ns()}"))
        folder.write_text("in the way")
    except OSError:
        return folder.is_file()
    return True


def test_training_goes_on_when_nobody_reads_what_it_prints(folder: Path) -> None:
    shell = f"{shlex.quote(sys.executable)} -m horizonml train job.yaml 2>errors | head -1"
    subprocess.run(["sh", "-c", shell], cwd=folder, env=environment(), check=True, timeout=400, capture_output=True)
    wait_for(lambda: steps(folder) == 20, "the last step")
    wait_for(lambda: (folder / "runs" / "test" / "checkpoints" / "step-00000020").exists(), "the last checkpoint")
    assert (folder / "errors").read_text() == ""


def test_a_rank_that_hangs_ends_all_and_is_named_with_its_line(folder: Path) -> None:
    (folder / "job.yaml").write_text(
        "{name: test, epochs: 2, batch_size: 16, model: {name: tests.tasks:perceptron}, parallel: {workers: 2}, "
        "data: {name: tests.datasets:Stuck, options: {rank: 1}, workers: 0}, rendezvous: {step_timeout: 2}}"
    )
    result = horizonml(folder, "train", "job.yaml", "--set", "parallel.strategy=ddp")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "error: rank 1: its main thread has made no progress for" in result.stderr
    assert "tests/datasets.py:" in result.stderr
    assert "(in __getitem__)" in result.stderr


def test_a_rank_that_fails_by_itself_ends_all_with_its_reason(folder: Path) -> None:
    result = horizonml(folder, "train", "job.yaml", "-n", "2", "--set", "optimizer.lr=1e30")
    assert result.returncode == 1
    assert "the loss is" in result.stderr
    assert "lower optimizer.lr" in result.stderr
    assert "Traceback" not in result.stderr


MISTAKES = (
    (["train", "nothing.yaml"], 2, "nothing.yaml: No such file"),
    (["train", "job.yaml", "--set", "model.name=digits_cn"], 2, "did you mean 'digits_cnn'?"),
    (["train", "job.yaml", "--device", "tpu"], 2, "error: --device: 'tpu' is not one of auto, cpu, cuda, cuda:N"),
    (["train", "job.yaml", "--set", "device=cuda:99"], 2, "error: device: cuda:99, but "),
    (["train", "job.yaml", "--seeds", "0,x"], 2, "is not a list of different seeds, for example 0,1,2"),
    (["train", "job.yaml", "--seeds", "1,1"], 2, "is not a list of different seeds, for example 0,1,2"),
    (["train", "job.yaml", "-n", "1", "--set", "parallel.stages=[{ranks: [0], layers: [0, 3]}]"], 2, "at layer 3"),
    (["plan", "job.yaml", "--set", "device=cuda:99"], 2, "error: device: cuda:99, but "),
    (["plan", "job.yaml", "--set", "parallel.strategy=pipeline", "--workers", "18"], 2, "at most 17 stages"),
    (["plan", "job.yaml", "--picture", "p.svg"], 2, "--picture: p.svg must end in .png"),
    (["plan", "job.yaml", "--out", "job.yaml/p.yaml"], 2, "cannot write job.yaml/p.yaml: "),
    (["plan", "job.yaml", "--picture", "job.yaml/p.png"], 2, "cannot write job.yaml/p.png: "),
    (["validate", "job.yaml", "--set", "sead=1"], 2, "sead: unknown key; did you mean 'seed'?"),
    (["export", "nowhere", "model.pt"], 1, "no checkpoint in nowhere"),
    (["bench", "compare", "job.yaml", "--out", "job.yaml"], 2, "cannot write job.yaml: File exists"),
)
MISTAKES_OF_RANKS = (
    (["data.samples=5000"], "digits has 1438 training samples"),
    (["data={name: cifar10, download: false}"], "cifar10 is missing"),
    (["model.name=tests.models:two_outputs"], "returns [1, 8, 8] and [1, 8, 8] values per sample"),
    (["data.samples=33", "model.name=resnet18"], "with one sample"),
)


def test_mistakes_are_explained_without_a_traceback(folder: Path) -> None:
    cache = {"HORIZONML_CACHE": str(folder / "cache")}
    for arguments, code, words in MISTAKES:
        result = command(folder, *arguments, **cache)
        assert words in result.stderr
        assert "Traceback" not in result.stderr
        assert result.returncode == code
    alone = ["--set", "parallel.strategy=single", "-n", "1"]
    for changes, words in MISTAKES_OF_RANKS:
        options = [part for one in changes for part in ("--set", one)]
        result = horizonml(folder, "train", "job.yaml", *alone, *options, RANK="0", WORLD_SIZE="1", **cache)
        assert words in result.stderr
        assert "Traceback" not in result.stderr
        assert result.returncode == 1


@pytest.mark.slow
def test_another_package_of_this_name_in_the_working_directory_is_left_alone(folder: Path) -> None:
    (folder / "horizonml").mkdir()
    (folder / "horizonml" / "__init__.py").write_text("raise SystemExit('this is another package')\n")
    (folder / "mine").mkdir()
    (folder / "mine" / "sizes.py").write_text("PIXELS = 64\n")
    (folder / "mine" / "net.py").write_text(
        "from torch import nn\nfrom mine.sizes import PIXELS\n\n\n"
        "def build(num_classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, num_classes))\n"
    )
    options = ["--workers", "2", "--set", "epochs=1", "--set", "model.name=mine.net:build"]
    words = [sys.executable, "-P", "-m", "horizonml", "train", "job.yaml", *options]
    result = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=400, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "epoch 1/1" in result.stdout


def test_a_wrong_environment_is_refused_before_any_socket_opens(folder: Path) -> None:
    for env, words in (
        ({"RANK": "0"}, "RANK is set (0) but WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the job is for 3 ranks, but RANK says that the world size is 2"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "start `horizonml rendezvous`"),
        ({"RANK": "0", "WORLD_SIZE": "3", "HORIZONML_RENDEZVOUS": "x"}, "'x' is not host:port"),
    ):
        result = command(folder, "train", "job.yaml", **env)
        assert result.returncode == 2
        assert words in result.stderr


def test_ranks_started_by_hand_meet_at_a_service(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    service = start("rendezvous", "--port", "0")
    assert service.stdout is not None
    address = service.stdout.readline().split()[-1]
    ranks = [
        start("train", "job.yaml", "-n", "2", RANK=str(rank), WORLD_SIZE="2", HORIZONML_RENDEZVOUS=address)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "done: records" in outputs[0]
    assert "rank 1: connected to 1 other rank; trains stage 1 of 1" in outputs[1]
    assert "rank 1: done: records" in outputs[1]
    service.terminate()
    service.communicate(timeout=10)
    assert service.returncode == 0


@pytest.mark.slow
def test_torchrun_starts_the_ranks(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    service = start("rendezvous", "--port", "0")
    assert service.stdout is not None
    address = service.stdout.readline().split()[-1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    result = subprocess.run(
        [*torchrun, "-m", "horizonml", "train", "job.yaml", "-n", "2", "--set", "epochs=1"],
        cwd=folder,
        env=environment(HORIZONML_RENDEZVOUS=address),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "done: records" in result.stdout


@pytest.mark.slow
def test_ranks_stay_light(folder: Path) -> None:
    """The compiler would cost every rank 70 MB and a second; --help must not load torch at all."""
    code = (
        "import sys; from horizonml.cli.app import app\n"
        "try: app(ARGS)\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    )
    helped = subprocess.run(
        [sys.executable, "-c", code.replace("ARGS", "['--help']")], capture_output=True, text=True, check=True
    )
    assert "'torch'" not in helped.stdout.splitlines()[-1]
    arguments = "['train', 'job.yaml', '--workers', '1', '--set', 'parallel.strategy=single']"
    trained = subprocess.run(
        [sys.executable, "-c", code.replace("ARGS", arguments)],
        cwd=folder,
        env=environment(RANK="0", WORLD_SIZE="1", HORIZONML_CACHE=str(folder / "cache")),  # threads are tried, too
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = trained.stdout.splitlines()[-1]
    assert "'torch'" in loaded
    for heavy in ("torch._dynamo", "torch._inductor", "torchvision", "matplotlib", "sympy"):
        assert f"'{heavy}'" not in loaded


def test_the_plan_is_shown_for_people_and_for_programs(folder: Path) -> None:
    shown = command(folder, "plan", "job.yaml", "--set", "parallel.strategy=pipeline")
    assert shown.returncode == 0, shown.stderr
    assert re.search(rf"plan for 3 ranks on this machine: ({'|'.join(SCHEDULES)}), ", shown.stdout)
    assert "\n    2  " in shown.stdout
    assert "predicted:" in shown.stdout
    answer = json.loads(command(folder, "plan", "job.yaml", "--set", "parallel.strategy=pipeline", "--json").stdout)
    stages = answer["plan"]["stages"]  # one or two for each rank, as is fastest here
    assert len(stages) in (3, 6)
    assert {rank for stage in stages for rank in stage["ranks"]} == {0, 1, 2}
    assert answer["worth"]["speed_up"] == answer["worth"]["efficiency"] > 0, "all ranks are on this device"
    assert "Predicted: the ranks of this device train" in shown.stdout
    assert len(answer["profile"]["layers"]) == 17


def test_validate_and_schema(folder: Path) -> None:
    shown = command(folder, "validate", "job.yaml", "--set", "optimizer.lr=1e-2")
    assert shown.returncode == 0
    assert "lr: 0.01" in shown.stdout
    schema = json.loads(command(folder, "validate", "--schema").stdout)
    assert schema["properties"]["epochs"]["type"] == "integer"
