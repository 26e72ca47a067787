"""TensorBoard and MLflow: they show what the records say, and never hold up or end a training."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from horizonml.errors import JobError
from horizonml.telemetry.fields import Point
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.record import StateSource, StepRecord
from horizonml.telemetry.recorder import Display, Outage, Recorder
from horizonml.telemetry.run_info import RunInfo
from horizonml.telemetry.sinks import Feed, Feeds, check_packages, scalars
from horizonml.telemetry.spec import TelemetrySpec
from tests.commands import command
from tests.runs import append, write_run
from tests.unit.test_metrics import INFO, STEP, record

# MLflow uses what SQLAlchemy has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore::DeprecationWarning:sqlalchemy")
LEAD = replace(INFO, rank=0)
Found = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for MLflow to make a database, however busy the machine is, and leave its loggers as they were."""
    monkeypatch.setattr("horizonml.telemetry.sinks._CLOSE_SECONDS", 200.0)
    levels = {name: logging.getLogger(name).level for name in ("mlflow", "alembic")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a database of MLflow that has no runs: making one takes seconds."""
    folder = tmp_path_factory.mktemp("empty")
    MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder


@pytest.fixture
def flow(tmp_path: Path, empty: Path) -> Path:
    return shutil.copytree(empty, tmp_path / "flow")


def expected(folder: Path) -> Found:
    """What the records of rank 0 say, read without the code that is tested."""
    names = {
        "loss": "train/loss", "accuracy": "train/accuracy", "lr": "train/learning_rate", "wall": "time/step_seconds",
        "compute": "time/compute_seconds", "transfer": "time/transfer_seconds", "wait": "time/wait_seconds",
        "divergence": "train/gradient_divergence",
    }  # fmt: skip
    found: Found = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in read_lines(path):
            if line["kind"] == "run":
                leads = line["rank"] == 0
            if not leads:
                continue
            if line["kind"] == "step":
                for key, name in names.items():
                    if line.get(key) is not None:
                        found.setdefault(name, []).append((line["step"], line[key]))
                speed = line["batch"] / line["wall"]
                found.setdefault("time/samples_per_second", []).append((line["step"], speed))
            if line["kind"] == "evaluation":
                found.setdefault("held_out/loss", []).append((line["step"], line["loss"]))
                found.setdefault("held_out/accuracy", []).append((line["step"], line["accuracy"]))
    return found


def in_tensorboard(folder: Path) -> Found:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def in_mlflow(folder: Path, runs: int = 1) -> Found:
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments()]
    found = client.search_runs(experiments)
    assert len(found) == runs
    identifier = found[0].info.run_id
    return {
        name: sorted((one.step, one.value) for one in client.get_metric_history(identifier, name))
        for name in found[0].data.metrics
    }


def check(found: Found, wanted: Found) -> None:
    """Compare; event files hold 32-bit floats."""
    assert wanted
    for name, unsorted in wanted.items():
        values = sorted(unsorted)
        assert [step for step, _ in found[name]] == [step for step, _ in values], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in values], rel=1e-6), name


def test_a_finished_run_is_shown_as_it_was_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", ranks=2)
    append(tmp_path / "runs" / "one" / "rank-0.jsonl", {"kind": "end", "time": 200.0, "outcome": "complete"})
    done = command(tmp_path, "report", "runs/one", "--tensorboard", "board", "--mlflow", "flow")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "logged 6 steps to TensorBoard: tensorboard --logdir board\nlogged 6 steps to MLflow at flow\n"
    )
    assert done.stderr == ""
    wanted = expected(tmp_path / "runs" / "one")
    check(in_tensorboard(tmp_path / "board" / "one"), wanted)
    check(in_mlflow(tmp_path / "flow"), wanted)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/flow/mlflow.db")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    assert run.data.params["data.name"] == "digits"
    assert run.data.params["batch_size"] == "32"
    assert run.data.tags["horizonml.torch"] == "2"
    assert "stages" in run.data.tags["horizonml.plan"]

    assert "flow" not in (tmp_path / "runs" / "one" / "mlflow.json").read_text()  # a URI may hold a password

    # Once more: MLflow's run is completed and not repeated, and TensorBoard's files are not mixed.
    again = command(tmp_path, "report", "runs/one", "--mlflow", "flow")
    assert again.returncode == 0, again.stderr
    check(in_mlflow(tmp_path / "flow"), wanted)
    refused = command(tmp_path, "report", "runs/one", "--tensorboard", "board")
    assert refused.returncode == 2
    assert "error: --tensorboard: board/one has event files already" in refused.stderr


def record_run(folder: Path, feeds: Feeds | None, generation: int, start: int, stop: int) -> None:
    info = replace(LEAD, generation=generation, resumed_at=start)
    recorder = Recorder(folder / "rank-0.jsonl", Display(), info, 0, feeds=feeds)
    for number in range(start + 1, stop + 1):
        if generation and number == stop:
            recorder.after(Outage(time.monotonic() - 1.5, [1], None, start + 3), generation, StateSource.REPLICA, start)
        totals = replace(STEP.totals, loss=generation + 1 / number)
        recorder.step(replace(STEP, wall=0.2 + generation, totals=totals), number, 1, 64, 0.1)
    recorder.evaluation(STEP.totals, stop, 1, 0.5)
    recorder.close("complete" if generation else "failed")


def test_a_running_job_is_shown_while_it_trains_and_goes_on_after_a_loss(tmp_path: Path, flow: Path) -> None:
    feeds = Feeds(TelemetrySpec(tensorboard=True, mlflow=str(flow)), tmp_path)
    record_run(tmp_path, feeds, 0, 0, 8)
    record_run(tmp_path, feeds, 1, 5, 12)  # three steps were lost
    feeds.close()
    found, logged = in_tensorboard(tmp_path / "tensorboard"), in_mlflow(flow)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 13))
    walls = [value for _, value in found["time/step_seconds"]]
    assert walls == pytest.approx([0.2] * 5 + [1.2] * 7)
    assert found["group/generation"][-1] == (5, 1.0)
    assert found["group/recovery_seconds"] == [(12, pytest.approx(1.5, abs=0.5))]
    assert found["group/ranks"][-1] == (5, float(LEAD.world_size))
    assert [step for step, _ in logged["train/loss"]] == [1, 2, 3, 4, 5, 6, 6, 7, 7, 8, 8, *range(9, 13)]
    again = {name: values for name, values in expected(tmp_path).items() if name in ("train/loss", "time/step_seconds")}
    check(logged, again)

    # And the command makes the same of the records.
    shown = command(tmp_path, "report", ".", "--tensorboard", "board")
    assert shown.returncode == 0, shown.stderr
    assert in_tensorboard(tmp_path / "board" / tmp_path.name) == found


def step(number: int) -> StepRecord:
    return replace(record(number), metrics={})


def test_whatever_is_a_number_in_a_step_s_record_is_shown() -> None:
    """A field that is added to the records is either shown or named here."""
    numbers = {field.name: 2 for field in fields(StepRecord) if field.name not in ("links", "metrics", "unit")}
    left_out = {"step", "time", "samples", "batch", "units"}
    values = scalars(StepRecord(**numbers, unit="tokens", metrics={"mean iou": 0.5}))
    of_its_own = {"time/samples_per_second", "time/tokens_per_second", "train/mean_iou"}
    assert len(set(values) - of_its_own) == len(set(numbers) - left_out)
    assert values.keys() >= {*of_its_own, "train/gradient_norm", "train/skipped_samples", "time/loading_seconds"}
    assert values["time/tokens_per_second"] == 1.0


class Stuck:
    """A sink that does not return before it is told to."""

    def __init__(self, go_on: threading.Event) -> None:
        self._go_on = go_on
        self.points = 0

    def describe(self, run: RunInfo) -> None: ...

    def write(self, points: Sequence[Point]) -> None:
        self._go_on.wait()
        self.points += len(points)

    def close(self, outcome: str) -> None: ...


def test_a_sink_that_hangs_holds_nothing_up_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    go_on = threading.Event()
    sink = Stuck(go_on)
    feed = Feed("TensorBoard", lambda: sink)
    for number in range(30_000):  # many more than wait for it
        feed.put(step(number))
    assert sink.points == 0
    (message,) = caplog.messages
    assert message.startswith("TensorBoard is slower than the training, and records are left out; `horizonml report`")
    go_on.set()
    feed.close()
    assert 10_000 <= sink.points <= 10_200
    assert len(caplog.messages) == 1


def test_a_sink_that_hangs_at_the_end_is_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizonml.telemetry.sinks._CLOSE_SECONDS", 0.3)
    go_on = threading.Event()
    feed = Feed("MLflow", lambda: Stuck(go_on))
    feed.put(step(1))
    feed.close()
    assert "MLflow has not taken everything within" in caplog.text
    go_on.set()


def test_a_sink_that_fails_is_named_once_and_the_records_are_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    feeds = Feeds(TelemetrySpec(tensorboard=True, mlflow="sqlite:////proc/none/x.db"), tmp_path)
    feeds.put(step(1))
    deadline = time.monotonic() + 60
    while len(caplog.messages) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    record_run(tmp_path, feeds, 0, 0, 6)
    feeds.close()
    assert len(caplog.messages) == 2
    assert any("TensorBoard failed: " in message and "File exists" in message for message in caplog.messages)
    assert any("MLflow failed: " in message for message in caplog.messages)
    assert sum(line["kind"] == "step" for line in read_lines(tmp_path / "rank-0.jsonl")) == 6


def test_mistakes_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    empty = command(tmp_path, "report", "nothing", "--tensorboard", "board")
    assert (empty.returncode, "nothing has no steps of a run" in empty.stderr) == (1, True)
    refused = command(tmp_path, "report", "run", "--mlflow", "sqlite:////proc/none/x.db")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: run cannot be logged: ")
    strange = command(tmp_path, "report", "run", "--mlflow", "50%")
    assert strange.returncode == 2
    assert "50%: MLflow cannot keep a database below a folder whose name has ? or %" in strange.stderr
    with pytest.raises(JobError, match=r"telemetry\.mlflow: .*what\?: MLflow cannot keep a database"):
        check_packages(TelemetrySpec(mlflow=str(tmp_path / "what?")))
    check_packages(TelemetrySpec(mlflow="http://server/?a=%41"))
    assert "Traceback" not in refused.stderr
