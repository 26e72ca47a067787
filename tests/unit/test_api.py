"""The Python interface without ranks: its names, what it costs to import, and what it makes of what it is given."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import horizonml
from horizonml.api.given import Given, in_this_process
from horizonml.api.history import Evaluation, Step, Table, read_run
from horizonml.api.jobs import make_job
from horizonml.api.training import Objects, packed, unpack
from horizonml.data.choose import describe
from horizonml.data.choose import load as load_data
from horizonml.data.workers import Processes, workers_for
from horizonml.errors import DataError, HorizonError, JobError, ModelError
from horizonml.machine import code
from horizonml.machine.code import find
from horizonml.runtime.launch import check_memory, run_ranks
from horizonml.tasks.regression import Regression
from tests.runs import append, write_run

NAMES = {
    "Evaluation", "HorizonError", "Job", "PlannedJob", "Run", "Step", "Task", "__version__", "evaluate", "export",
    "generate", "load", "plan", "predict", "train",
}  # fmt: skip


class Net(nn.Module):
    """A model that every process can import."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.layers(images)
        return result


def test_the_interface_has_these_names_and_no_others() -> None:
    assert set(horizonml.__all__) == NAMES
    for name in NAMES:
        assert getattr(horizonml, name) is not None
    assert set(dir(horizonml)) >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        horizonml.trian  # type: ignore[attr-defined]  # noqa: B018


def test_functions_are_typed_and_explain_every_parameter() -> None:
    for name in ("evaluate", "export", "generate", "load", "plan", "predict", "train"):
        module = {"plan": "planning", "train": "training", "generate": "predictions"}.get(name, "evaluation")
        function = getattr(importlib.import_module(f"horizonml.api.{module}"), name)
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(one.annotation is not inspect.Parameter.empty for one in signature.parameters.values())
        if len(signature.parameters) > 4:
            explained = inspect.getdoc(function) or ""
            assert not [one for one in signature.parameters if f"{one}:" not in explained], name


def test_importing_the_package_loads_neither_torch_nor_anything_else_that_is_large() -> None:
    program = "import sys, horizonml; print(*sorted(name for name in sys.modules if '.' not in name))"
    run = [sys.executable, "-c", program]
    loaded = set(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())
    assert "horizonml" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "yaml", "rich", "typer", "cloudpickle", "matplotlib"}


def test_the_package_of_plans_can_be_called_and_stays_a_package() -> None:
    from horizonml.plan.plan import Plan

    assert callable(horizonml.plan)
    assert sys.modules["horizonml.plan.plan"].Plan is Plan
    assert pickle.loads(pickle.dumps(Plan)) is Plan


def test_a_job_is_made_of_a_file_a_mapping_a_job_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: mine\nepochs: 3\noptimizer: {name: sgd, lr: 0.5}\n")
    from_file, _ = make_job(tmp_path / "job.yaml", workers=2, fields={"optimizer": {"momentum": 0.5}})
    assert (from_file.name, from_file.epochs, from_file.parallel.workers) == ("mine", 3, 2)
    assert from_file.optimizer.model_dump()["lr"] == 0.5
    assert from_file.optimizer.model_dump()["momentum"] == 0.5
    changed, _ = make_job(from_file, fields={"optimizer": {"name": "adam"}})
    assert changed.optimizer.name == "adam"  # of a section whose name changes, nothing stays
    assert make_job("digits")[0].name == "digits"
    assert make_job({"seed": 5})[0].seed == 5
    assert make_job(None)[0] == horizonml.Job()


def test_the_planner_decides_what_several_workers_share_unless_the_job_does() -> None:
    assert make_job(None, workers=3)[0].parallel.strategy == "auto"
    assert make_job(None, workers=1)[0].parallel.strategy == "single"
    assert make_job(None, workers=3, fields={"parallel": {"strategy": "ddp"}})[0].parallel.strategy == "ddp"
    with pytest.raises(JobError, match="strategy single trains on 1 rank, not 3"):
        make_job({"parallel": {"strategy": "single"}}, workers=3)


def test_sections_are_named_by_texts_and_folders(tmp_path: Path) -> None:
    job, _ = make_job(None, model="resnet18", data=str(tmp_path), task="regression")
    assert (job.model.name, job.data.name, job.data.folder) == ("resnet18", "folder", str(tmp_path))
    assert job.task.name == "regression"
    job, _ = make_job({"model": {"name": "resnet50", "options": {"weights": None}}}, model="resnet18")
    assert job.model.options == {}
    job, _ = make_job({"model": {"options": {"num_classes": 3}}}, model=Net)
    assert job.model.options == {"num_classes": 3}


MISTAKES: list[tuple[Any, str]] = [
    (lambda: make_job({"epoch": 3}), "epoch"),
    (lambda: make_job(None, fields={"epochs": 0}), "epochs"),
    (lambda: make_job(3), "job: give the path of a job file"),  # type: ignore[arg-type]
    (lambda: make_job("digitz"), "did you mean 'digits'?"),
    (lambda: make_job(None, model="resnet19"), "did you mean"),
    (lambda: make_job(None, data="digit"), "data: 'digit' is no folder that is here, .*did you mean 'digits'?"),
    (lambda: make_job(None, data=__file__), "data: .*test_api.py is a file, and a folder of images is expected"),
    (lambda: make_job(None, workers="2"), "parallel.workers: '2'"),  # type: ignore[arg-type]
    (lambda: horizonml.train(on_step=3), "on_step: give a function"),  # type: ignore[arg-type]
    (lambda: horizonml.evaluate("runs", batch_size=0), "batch_size: 0 is not a number of samples"),
    (lambda: horizonml.predict("runs", Net, batch_size=0), "batch_size: 0 is not a number of samples"),
]


def test_mistakes_in_jobs_name_the_field() -> None:
    for call, words in MISTAKES:
        with pytest.raises(JobError, match=words.replace("?", r"\?")):
            call()


def test_what_can_be_imported_is_named_and_everything_else_is_carried_along() -> None:
    given = Given()
    assert given.add("model", Net) == f"{__name__}:Net"
    assert not given.objects
    inner = type("Inner", (Net,), {})
    name = given.add("model", inner)
    assert name == "horizonml.api.given:Inner"
    given.install()
    assert find(name, "model.name", ModelError) is inner


def test_models_may_be_anything_that_makes_one() -> None:
    from horizonml.models.source import find as find_model

    net = Net(3)
    things = (functools.partial(Net, num_classes=3), lambda: Net(3), net, lambda num_classes=3: Net(num_classes))
    for thing in things:
        given = Given()
        name = given.add("model", thing)
        given.install()
        build = find_model(name)
        built = build()
        assert built.layers[1].out_features == 3  # type: ignore[union-attr, index]
        assert ("num_classes" in inspect.signature(build).parameters) == (
            thing is not net and "num_classes" in inspect.signature(thing).parameters
        )
        assert build() is not built
        if thing is net:
            assert torch.equal(built.layers[1].weight, net.layers[1].weight)  # type: ignore[arg-type, union-attr, index]


def test_a_task_may_be_an_instance() -> None:
    given, task = Given(), Regression()
    name = given.add("task", task)
    given.install()
    found = find(name, "task.name", JobError)
    assert isinstance(found, type)
    assert found() is task
    with pytest.raises(TypeError, match="takes no options"):
        found(delta=1)


def test_objects_travel_to_children_and_are_made_when_they_are_needed() -> None:
    job, given = make_job(None, model=lambda: Net(4), data=[1, 2, 3])
    with packed(job, given, fresh=True) as descriptor:
        given.objects.clear()
        arrived, fresh = unpack(descriptor)
    assert arrived == job
    assert fresh
    assert find(job.model.name, "model.name", ModelError)().layers[1].out_features == 4
    assert find(job.data.name, "data.name", DataError)() == [1, 2, 3]


def test_objects_travel_on_to_the_processes_that_load_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_inheritance", [])
    points = [(torch.full((3,), float(number)), torch.zeros(1)) for number in range(10)]
    job, given = make_job(None, data=points, fields={"data": {"worker_kind": "processes", "workers": 1}})
    given.install()
    with packed(job, given, fresh=True) as descriptor:
        code.hand_down(Objects(descriptor))
        info = describe(job.data)
        assert info is not None
        data = load_data(job.data, info, Path("unused"))
        workers = workers_for(job.data, data, Path("unused"), True, True)
        rows = workers.read(data.batch(True, torch.arange(8)), 0, 8, True, False).rows()
        workers.close()
    assert isinstance(workers, Processes)
    assert isinstance(rows.inputs, Tensor)
    assert torch.equal(rows.inputs, data.train.inputs(torch.arange(8)))


def test_an_object_that_cannot_travel_is_named() -> None:
    import threading

    job, given = make_job(None, data=[threading.Lock()])
    with pytest.raises(JobError, match=r"data: the object cannot be sent .* give a function that makes it"):
        packed(job, given, False).__enter__()


def test_an_object_that_this_process_was_never_given_is_asked_for() -> None:
    with pytest.raises(HorizonError, match=r"Absent was given to horizonml\.train as an object"):
        find("horizonml.api.given:Absent", "model.name", ModelError)


def row(number: int, **metrics: float) -> Step:
    return Step(number, 1, 1 / number, metrics, 0.5, 32, 0.1)


def test_tables_have_a_column_for_each_metric() -> None:
    table = Table([row(1, accuracy=0.5), row(2, accuracy=0.75, f1=0.25)], Step)
    assert table.columns == ("step", "epoch", "loss", "accuracy", "f1", "seconds", "samples", "learning_rate")
    assert table.column("loss") == [1.0, 0.5]
    assert table.column("f1") == [None, 0.25]
    assert table[-1].step == 2
    assert list(table[:1]) == [row(1, accuracy=0.5)]
    assert list(table.to_pandas()["accuracy"]) == [0.5, 0.75]
    with pytest.raises(KeyError, match="'los' is not a column"):
        table.column("los")
    assert str(table).splitlines()[1].split() == ["1", "1", "1", "0.5", "-", "0.5", "32", "0.1"]
    assert "<td>0.75</td>" in table._repr_html_()
    long = Table([row(number) for number in range(1, 31)], Step)
    assert "the last 10 of 30 rows" in str(long)
    assert str(Table([], Evaluation)) == "(no evaluations)"


def test_a_run_is_a_picture_in_a_notebook(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1, steps=600, epochs=3)
    picture = ElementTree.fromstring(f"<div>{horizonml.Run(tmp_path)._repr_html_()}</div>")
    training, held_out = (
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in picture.iter("polyline")
    )
    assert (len(training), len(held_out)) == (200, 3)
    assert training[0][1] == 0.0 < training[-1][1] <= 160.0  # 2 at first, and less and less
    assert training == sorted(training)
    assert "loss from 2 to 0.00333 (logarithmic) over 600 steps" in "".join(picture.itertext())


def test_models_are_used_as_the_ranks_do_whatever_the_script_has_chosen() -> None:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with in_this_process():
            assert (torch.zeros(1).device.type, torch.zeros(1).dtype) == ("cpu", torch.float32)
        assert (torch.zeros(1).device.type, torch.zeros(1).dtype) == ("meta", torch.float64)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_more_ranks_than_fit_into_memory_are_refused_before_any_is_started() -> None:
    check_memory(4, 1000, 250)
    with pytest.raises(JobError, match=r"parallel\.workers: 5 ranks .* need at least 1\.2 KiB of memory.* at most 4"):
        check_memory(5, 1000, 250)
    with pytest.raises(JobError, match="10,000 ranks on this machine need at least"):
        run_ranks(make_job({"parallel": {"strategy": "ddp", "workers": 10_000}})[0], ["false"], False, {})


def test_every_step_of_a_history_counts_once_as_it_was_done_last(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=3, steps=6)
    (tmp_path / "rank-2.jsonl").write_text(
        (tmp_path / "rank-2.jsonl").read_text().replace('"loss": 2.0', '"loss": 7.0')
    )
    lines = [json.loads(line) for line in (tmp_path / "rank-1.jsonl").read_text().splitlines()]
    again = [{**line, "time": 500.0 + line["step"], "loss": 9.0} for line in lines if line.get("step", 0) > 4]
    append(tmp_path / "rank-1.jsonl", {**lines[0], "time": 500.0, "rank": 0, "host": "another"})  # which is rank 0 now
    append(tmp_path / "rank-1.jsonl", *(line for line in again if line["kind"] in ("step", "evaluation")))
    about, steps, evaluations = read_run(tmp_path)
    assert about is not None
    assert about.host == "another"
    assert steps.column("step") == [1, 2, 3, 4, 5, 6]
    assert steps.column("loss") == [2.0, 1.0, pytest.approx(2 / 3), 0.5, 9.0, 9.0]
    assert [(one.step, one.loss) for one in evaluations] == [(3, 0.3), (6, 9.0)]
    assert steps.column("joules") == [3.0, 3.0, 3.0, 3.0, 3.0, 3.0] or steps.column("joules")[-1] is None
    (tmp_path / "rank-0.jsonl").unlink()
    (tmp_path / "rank-1.jsonl").unlink()
    assert read_run(tmp_path)[1].column("loss")[0] == 7.0  # on the disk of a machine without rank 0
