"""The Python interface as a script uses it: classes that only the script has, real ranks, errors and signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.processes import environment, horizonml, ours, steps, wait_for

CLASSES = """
import os
import warnings
import numpy
import torch
from torch import nn
from horizonml.tasks.task import InputSpec, OutputSpec
from torch.utils.data import Dataset
import horizonml

WIDTH = 16


class Curves(Dataset):
    def __init__(self, samples=120):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, 8, generator=generator)
        self.targets = self.inputs.cumsum(1)[:, -2:]

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, values):
        return torch.tanh(self.linear(values))


class MyNet(nn.Module):
    def __init__(self, num_outputs):
        super().__init__()
        self.first, self.second = Block(8, WIDTH), Block(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, num_outputs)

    def forward(self, curves):
        return self.last(self.second(self.first(curves)))

"""
TRAIN = """
import json
seen = []
job = {
    "name": "test", "epochs": 2, "batch_size": 32, "parallel": {"strategy": "pipeline"}, "ema": {"decay": 0.9},
    "checkpoint": {"keep_best": "held_out_loss", "best_is": "highest"},  # so that the best is not the newest
}
run = horizonml.train(
    job,
    model=MyNet, data=Curves(), task="regression", workers=2, on_step=seen.append,
)
found = {
    "seen": [(one.step, one.loss, one.samples) for one in seen],
    "history": [(one.step, one.loss, one.samples) for one in run.history],
    "metrics": run.metrics,
    "evaluated": horizonml.evaluate(run),
    "all": horizonml.evaluate("runs/test", Curves(50), model=MyNet, part="all"),
    "plan": [list(stage.ranks) for stage in run.plan.stages],
    "pid": os.getpid(),
}
model = run.model()
assert type(model) is MyNet and not model.training
torch.save(model.state_dict(), "from-run.pt")
torch.save(horizonml.load("runs/test", model=MyNet).state_dict(), "loaded.pt")
horizonml.export(run, "exported.pt")
horizonml.export(run, "parameters.pt", average=False)
torch.save(run.model(average=False).state_dict(), "from-run-parameters.pt")
best = run.checkpoint(best=True)
found["best"] = [best.name, horizonml.evaluate(best), {"loss": run.evaluations[0].loss, **run.evaluations[0].metrics}]
torch.save(run.model(best=True).state_dict(), "from-run-best.pt")
torch.save(horizonml.load(best).state_dict(), "best.pt")
outputs = horizonml.predict(run, torch.zeros(5, 8))
assert torch.equal(outputs, model(torch.zeros(5, 8)).detach())
assert outputs.shape == horizonml.predict(run, Curves(5)).shape
assert torch.equal(outputs, torch.from_numpy(horizonml.predict(run, numpy.zeros((5, 8))).numpy()))
found["as tensors"] = horizonml.evaluate(run, (Curves(50).inputs, Curves(50).targets))
try:
    horizonml.predict(run, torch.zeros(8))
except horizonml.HorizonError as error:
    found["refused"] = str(error)
with warnings.catch_warnings(record=True) as found_warnings:
    warnings.simplefilter("always")
    again = horizonml.train(
        job,
        model=MyNet, data=Curves(), task="regression", workers=2, on_step=seen.append, progress=False,
    )
found["again"] = [(one.category.__name__, str(one.message), one.filename) for one in found_warnings]
assert len(again.history) == len(run.history) == len(seen)
print(repr(run))
fresh = horizonml.train(
    job, model=MyNet, data=Curves(), task="regression", workers=1, parallel={"strategy": "single"}, epochs=1,
    fresh=True, progress=False,
)
found["fresh"] = [len(fresh.history), len(horizonml.Run("runs/test.previous").history)]
print("RESULT " + json.dumps(found))
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """A file for a script in a folder of its own; what the script leaves behind is ended and fails the test."""
    yield tmp_path / "script.py"
    left = ours(tmp_path)
    for process in left:
        process.kill()
    assert not left


def begin(script: Path, text: str) -> subprocess.Popen[str]:
    script.write_text(CLASSES + text)
    command = [sys.executable, "-X", "faulthandler", str(script)]
    env = environment(HORIZONML_TEST=str(script.parent))
    return subprocess.Popen(
        command, cwd=script.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=400)
    return output


def test_a_script_trains_a_model_and_data_that_only_it_defines(script: Path) -> None:
    import torch

    process = begin(script, TRAIN)
    output = finish(process)
    assert process.returncode == 0, output
    assert "epoch 2/2: held-out loss" in output
    found = json.loads(output.partition("RESULT ")[2])
    assert [step for step, _, _ in found["seen"]] == [1, 2, 3, 4, 5, 6]
    assert found["seen"] == found["history"]
    assert found["plan"][:2] == [[0], [1]]  # with a second stage for each, where that is faster
    assert found["metrics"].keys() == found["evaluated"].keys() == found["all"].keys()
    assert found["evaluated"] == pytest.approx(found["metrics"], rel=1e-5)
    assert found["all"]["loss"] != pytest.approx(found["metrics"]["loss"], rel=1e-3)
    assert found["as tensors"] == found["all"]
    assert found["refused"] == "inputs: [8] is their shape, but the model takes [samples, 8]"
    ((category, message, filename),) = found["again"]
    assert (category, filename) == ("UserWarning", str(script))
    assert message.startswith("runs/test had been trained to the end before")
    assert found["fresh"] == [3, 6]
    name, evaluated, recorded = found["best"]
    assert name == "step-00000003"
    assert evaluated == pytest.approx(recorded, rel=1e-5)
    different = []
    for names in (
        ("from-run.pt", "loaded.pt", "exported.pt"),
        ("from-run-parameters.pt", "parameters.pt"),
        ("from-run-best.pt", "best.pt"),
    ):
        first, *others = (torch.load(script.parent / name, weights_only=True) for name in names)
        different.append(first)
        for other in others:
            assert first.keys() == other.keys()
            assert all(torch.equal(first[name], other[name]) for name in other)
    averages, parameters, best = (state["last.weight"] for state in different)
    assert not torch.equal(averages, parameters)
    assert not torch.equal(averages, best)
    refused = horizonml(script.parent, "evaluate", "runs/test")
    assert refused.returncode == 2
    assert "error: MyNet was given to horizonml.train as an object" in refused.stderr


@pytest.mark.slow
def test_an_error_in_the_users_code_is_raised_in_the_script_and_no_process_stays(script: Path) -> None:
    process = begin(
        script,
        """
class Faulty(Curves):
    def __getitem__(self, index):
        if index == 77:
            raise ValueError("sample 77 is odd")
        return super().__getitem__(index)

class Wrong(MyNet):
    def __init__(self, num_outputs):
        super().__init__(num_outputs)
        self.words = nn.Embedding(4, 8)

    def forward(self, curves):
        return super().forward(self.words(9 * (curves[:, 0] > 50).long()))

large = Curves()
large.inputs *= 1000

class Wronger:
    unit, units_per_sample, metrics = "samples", 1, ()
    def units(self, targets): return len(targets)
    def loss(self, outputs, targets, training): return outputs.sum()
    def judge(self, outputs, targets): raise ZeroDivisionError("in my task")
    def report(self, loss, metrics): return {}
    def input(self, info): return InputSpec(info.inputs)
    def outputs(self, info): return OutputSpec.vector(2)

for model, data, task in ((MyNet, Faulty(), None), (Wrong, large, None), (MyNet, large, Wronger())):
    options = {"model": model, "data": data} | ({"task": task} if task is not None else {})
    try:
        horizonml.train("digits", name="test", workers=2, progress=False, **options)
    except horizonml.HorizonError as error:
        print("CAUGHT", error)

calls = []

def stop(step):
    calls.append(step.step)
    if step.step == 3:
        raise RuntimeError("enough")

endless = {"model": MyNet, "data": Curves(), "workers": 2, "progress": False}
try:
    horizonml.train({"name": "stopped", "epochs": 10000}, on_step=stop, **endless)
except RuntimeError as error:
    print("CAUGHT", error, calls)
import psutil, signal
print("LEFT", [child.name() for child in psutil.Process().children(recursive=True)], flush=True)
end = lambda step: os.kill(os.getpid(), signal.SIGTERM)
horizonml.train({"name": "ended", "epochs": 10000}, on_step=end, **endless)
""",
    )
    output = finish(process)
    caught, _, rest = output.partition("LEFT ")
    left, _, said = rest.partition("\n")
    assert left == "[]"
    nothing, data, model, task, on_step = caught.split("CAUGHT ")
    assert not nothing  # nothing else is printed without progress
    for one in (data, model, task):
        assert one.startswith("rank ")
        assert any("rank-" in line for line in one.splitlines())  # names the log
    assert re.search(r"script\.py:\d+: ValueError: sample 77 is odd", data)
    assert re.search(r"script\.py:\d+ \(in forward\): IndexError: index out of range", model)
    assert re.search(r"script\.py:\d+ \(in judge\): ZeroDivisionError: in my task", task)
    assert on_step == "enough [1, 2, 3]\n"  # and never again
    assert process.returncode == 128 + signal.SIGTERM, said


ENDLESS = """
horizonml.train({"name": "test", "epochs": 100000}, model=MyNet, data=Curves(), workers=2)
"""


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_the_same_call_goes_on_until_it_is_killed(script: Path) -> None:
    process = begin(script, ENDLESS)
    wait_for(lambda: steps(script.parent) > 5, "the first steps")
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == -signal.SIGINT, output  # as for any script that Ctrl-C ends
    assert "stopped as asked: a checkpoint is saved" in output
    assert "KeyboardInterrupt" in output
    assert not ours(script.parent)
    again = begin(script, ENDLESS.replace("100000", "100001"))
    wait_for(lambda: "resumed" in output_so_far(again), "the second run")
    assert len(ours(script.parent)) == 4  # the script, two ranks, and the service at which they meet
    again.kill()
    again.communicate()
    wait_for(lambda: not ours(script.parent), "the end of the ranks", 20)


def output_so_far(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
