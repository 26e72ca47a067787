"""Exports of trained models: complete, checked against the model before they are kept, and explained by a card."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from horizonml.api.exports import formats
from horizonml.api.exports.export import Exported, export
from horizonml.api.exports.formats import ComparedSamples, ExportFormat, check_weights, compare
from horizonml.api.exports.trained import Trained, load_trained
from horizonml.data.dataset import DataInfo, TensorSpec
from horizonml.errors import CheckpointError, ExportError, JobError
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.state.shards import check, describe
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec
from tests.checkpoints import checkpoint, checkpoint_of
from tests.commands import command
from tests.exported import TwoInputs
from tests.unit.test_shards import GOOD

DIGITS = {"name": "numbers", "epochs": "2", "data": "{name: digits}", "optimizer": "{name: adam, lr: 0.003}"}
IMAGES = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def job(**fields: str) -> Job:
    given = DIGITS | fields
    return parse("\n".join(f"{key}: {value}" for key, value in given.items()), "job")


def only(folder: Path, *names: str) -> bool:
    """Whether a folder has these files, and no draft of another."""
    return {path.name for path in folder.iterdir()} == {"run", *names}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().abs().max())


@dataclass
class Made:
    """What was exported of one checkpoint in every format, and what the command said of it."""

    folder: Path
    path: Path  # the checkpoint
    model: nn.Module
    said: dict[str, list[str]]  # by the name of the file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    path, model = checkpoint_of(folder / "run", job())
    said = {}
    for name in ("model.onnx", "model.pt2", "model.pt", "model.safetensors"):
        done = command(folder, "export", "run", name, "--verify", "7")
        assert (done.returncode, done.stderr) == (0, "")
        said[name] = done.stdout.splitlines()
    return Made(folder, path, model, said)


def test_weights_are_those_of_all_stages_bit_for_bit(made: Made) -> None:
    expected = made.model.state_dict()
    for name in ("model.pt", "model.safetensors"):
        read = load_file(made.folder / name) if "safe" in name else torch.load(made.folder / name, weights_only=True)
        assert made.said[name][0] == (
            f"verified: {len(expected)} tensors read back, bit for bit those of the checkpoint"
        )
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[key], value) for key, value in expected.items())


def test_the_command_says_what_it_found_and_leaves_no_draft(made: Made) -> None:
    assert only(made.folder, *(f"{name}{ending}" for name in made.said for ending in ("", ".md")))
    for name, form in (("model.onnx", "ONNX"), ("model.pt2", "torch.export archive")):
        verified, wrote, card = made.said[name]
        assert re.fullmatch(
            r"verified: 7 held-out samples of digits: largest difference \d\.\de[-+]\d\d in outputs of up to [\d.]+ "
            r"\(tolerance \d\.\de-0[3-6]\)",
            verified,
        )
        assert wrote == f"wrote {name}, {form} (step 30, held-out accuracy 98.75% after epoch 2)"
        assert card == f"wrote {name}.md, its model card: fill in the licence"


def test_all_or_nothing_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"model/a": torch.ones(2), "model/b": torch.zeros(3), "optimizer/a/momentum_buffer": torch.ones(2)}
    folder = checkpoint(tmp_path / "run", tensors)
    assert export(folder, tmp_path / "out.pt").card is None
    assert "no model card is written: " in caplog.text
    assert set(torch.load(tmp_path / "out.pt", weights_only=True)) == {"a", "b"}

    with pytest.raises(ExportError, match=r"cannot write .*out\.pt/m\.pt: (File exists|Not a directory)$"):
        export(folder, tmp_path / "out.pt" / "m.pt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # a disk with so little left
    try:
        for name in ("full.pt", "full.safetensors"):
            with pytest.raises(ExportError, match=rf"cannot write .*{name}: ."):
                export(folder, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert only(tmp_path, "out.pt")

    # A tensor is gone, and the file's digest was made to fit.
    kept = load_file(folder / "stage-0.safetensors")
    del kept["model/b"]
    save_file(kept, folder / "stage-0.safetensors")
    metadata = json.loads((folder / "checkpoint.json").read_text())
    lying = describe(folder / "stage-0.safetensors", len(tensors)).model_dump()
    metadata["shards"]["stage-0.safetensors"] = lying
    (folder / "checkpoint.json").write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match="has 2 tensors instead of 3"):
        export(folder, tmp_path / "second.pt")
    assert only(tmp_path, "out.pt")


MEASURE = """
import threading
from pathlib import Path
from horizonml.api.exports.export import export

def held():  # without what is mapped from files
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        seen.append(held())

export(Path("small"), Path("small.pt"))  # everything is loaded
for name in ("model.pt", "model.safetensors"):
    before, seen, done = held(), [], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    export(Path("run"), Path(name))
    done.set()
    thread.join()
    print(max(seen) - before)
"""


@pytest.mark.slow
def test_a_model_is_never_in_memory_twice(tmp_path: Path) -> None:
    size = 96 << 20
    stages = [{f"model/{number}": torch.ones(size // 16)} for number in range(4)]  # 4 bytes each
    checkpoint(tmp_path / "run", *stages)
    checkpoint(tmp_path / "small", {"model/0": torch.ones(1)})
    result = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    taken = [int(line) for line in result.stdout.splitlines()]
    for name, most in zip(("model.pt", "model.safetensors"), taken, strict=True):
        assert (tmp_path / name).stat().st_size >= size
        assert most < 1.5 * size, name


def code_of(card: Path) -> str:
    """The lines of Python in a model card."""
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    return code


def test_what_the_card_says_loads_the_model(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 8), (200, 100, 0)).save("picture.png")
    for name in made.said:
        shutil.copy(made.folder / name, name)
        found = {"input": IMAGES}
        exec(code_of(made.folder / f"{name}.md"), found)
        outputs = torch.as_tensor(found["outputs"] if "outputs" in found else found["model"](IMAGES))  # type: ignore[operator]
        inputs = torch.as_tensor(found["input"])
        assert outputs.shape == (len(inputs), 10)
        assert difference(outputs, made.model(inputs)) < 1e-4


def test_a_file_that_fails_the_verification_is_not_kept(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job(model="{name: 'tests.exported:restless'}"))
    with pytest.raises(
        ExportError, match=r"model.pt2 is not written: on 16 held-out samples of digits, the output diff"
    ):
        export(path, tmp_path / "model.pt2")
    assert only(tmp_path)
    (tmp_path / "model.onnx").write_text("what was there before")
    bad = command(tmp_path, "export", "run", "model.onnx")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert re.fullmatch(r"error: model\.onnx is not written: on 16 held-out .* \(tolerance .*\)\n", bad.stderr)
    assert only(tmp_path, "model.onnx")
    assert (tmp_path / "model.onnx").read_text() == "what was there before"


def test_a_forward_pass_that_fixes_the_batch_is_named(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job(model="{name: 'tests.exported:Fixed'}"))
    for name, words in (("model.onnx", "ONNX"), ("model.pt2", "torch.export archive")):
        with pytest.raises(ExportError, match=rf"tests\.exported:Fixed cannot be exported to {words}: .*batch size"):
            export(path, tmp_path / name)
    assert only(tmp_path)
    assert export(path, tmp_path / "model.pt").check


def two_inputs() -> tuple[Trained, ComparedSamples]:
    words, mask = TensorSpec((6,), torch.int64), TensorSpec((6,), torch.float32)
    info = DataInfo(90, 10, (words, mask), ("words", "mask"), 3, TensorSpec((), torch.int64))
    torch.manual_seed(0)
    input = InputSpec(info.inputs, info.names)
    trained = Trained(TwoInputs().eval(), job(), info, Classification(), input, Path("none"), check(GOOD, Path("none")))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 11, (6, 6), generator=generator), torch.ones(6, 6)
    return trained, ComparedSamples(inputs, "6 samples")


def test_several_inputs_and_outputs_keep_their_names(tmp_path: Path) -> None:
    trained, samples = two_inputs()
    formats.write(ExportFormat.ONNX, trained, samples, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [one.name for one in graph.input] == ["words", "mask"]
    assert [one.name for one in graph.output] == ["logits", "pooled"]
    formats.write(ExportFormat.TORCH_EXPORT, trained, samples, tmp_path / "model.pt2")
    for kind, name in ((ExportFormat.ONNX, "model.onnx"), (ExportFormat.TORCH_EXPORT, "model.pt2")):
        assert formats.verify(kind, trained, samples, tmp_path / name).difference < 1e-5
        swapped = replace(samples, inputs=(samples.inputs[0].flip(1), samples.inputs[1] * torch.rand(6, 6)))
        changed = replace(trained, module=nn.Module())
        changed.module.forward = lambda words, mask: {  # type: ignore[method-assign]
            key: value + (key == "pooled") for key, value in trained.module(words, mask).items()
        }
        assert formats.verify(kind, trained, swapped, tmp_path / name).difference < 1e-5
        with pytest.raises(ExportError, match="output 1 differs"):
            formats.verify(kind, changed, samples, tmp_path / name)


def test_without_the_data_it_is_noise_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "empty"))
    path, _ = checkpoint_of(tmp_path / "run", job(data="{name: mnist, image_size: 8}"))
    done = export(path, tmp_path / "model.pt2", verify=3)
    assert re.match(r"3 samples of noise \(the held-out data cannot be read: .*\): largest difference ", done.check)
    assert done.check in (tmp_path / "model.pt2.md").read_text()


def test_outputs_that_differ_are_refused() -> None:
    shapes = r"float32 of shape \[2, 1\], but the model returns float32 of shape \[1, 2\]"
    cases: list[tuple[list[list[float]], list[list[float]], str]] = [
        ([[1.0, 2.0]], [[1.0, 2.1]], "differs from the model's, largest difference 1.0e-01 in outputs of up to 2 "),
        ([[1.0, 2.0]], [[1.0, float("nan")]], "infinite values or NaN in other places"),
        ([[1.0, float("inf")]], [[1.0, float("-inf")]], "infinite values or NaN in other places"),
        ([[1.0, 2.0]], [[1.0], [2.0]], shapes),
        ([[1]], [[1.0]], "the output is float32 of shape"),
    ]
    for ours, theirs, words in cases:
        with pytest.raises(ExportError, match=f"file is not written: on 1 sample, .*{words}"):
            compare("file", "1 sample", [torch.tensor(ours)], [torch.tensor(theirs)])
    same = torch.tensor([[1.0, float("nan"), float("inf")]])
    assert compare("file", "1 sample", [same], [same.clone()]).difference == 0
    with pytest.raises(ExportError, match="it returns 2 tensors instead of 1"):
        compare("file", "1 sample", [same], [same, same])


def test_weights_that_differ_are_refused() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([float("nan")])
    assert check_weights("file", {"a": a, "b": b}, {"a": a, "b": b}).startswith("2 tensors read back")
    for found, words in (
        ({"a": a}, "it lacks b"),
        ({"a": a, "b": b, "c": torch.ones(1)}, "it also has c"),
        ({"a": torch.tensor([1.0, 2.1]), "b": b}, "its a differs"),
        ({"a": a.double(), "b": b}, "its a differs"),
        ({"a": a.view(torch.int32), "b": b}, "its a differs"),
        ({"a": a[None], "b": b}, "its a differs"),
    ):
        with pytest.raises(ExportError, match=f"^file is not written: read back, {words}"):
            check_weights("file", {"a": a, "b": b}, found)


def test_formats_go_by_the_ending(made: Made, tmp_path: Path) -> None:
    assert load_file(export(made.path, tmp_path / "weights.bin", "safetensors").output)
    with pytest.raises(JobError, match=r"weights\.bin: the ending names no format; use one of \.pt \(PyTorch state di"):
        export(made.path, tmp_path / "weights.bin")
    with pytest.raises(JobError, match=r"--format: 'onxn' is not one of auto, .*; did you mean 'onnx'\?"):
        export(made.path, tmp_path / "weights.bin", "onxn")
    with pytest.raises(JobError, match=r"--verify: -1 is negative"):
        export(made.path, tmp_path / "model.pt", verify=-1)


def test_a_model_that_has_changed_since_is_named(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job())
    with pytest.raises(
        CheckpointError, match=r"its weights do not fit digits_cnn, which may have changed since: .*size"
    ):
        export(path, tmp_path / "model.onnx", overrides=["model.options={width: 16}"])
    metadata = json.loads((path / "checkpoint.json").read_text())
    metadata["job"]["epochs"] = "many"
    (path / "checkpoint.json").write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match="its job cannot be read by this version: epochs: "):
        export(path, tmp_path / "model.onnx")
    assert only(tmp_path)


def test_a_checkpoint_of_before_describes_its_data_by_the_data(tmp_path: Path) -> None:
    path, model = checkpoint_of(tmp_path / "run", job())
    metadata = json.loads((path / "checkpoint.json").read_text())
    del metadata["data"]
    (path / "checkpoint.json").write_text(json.dumps(metadata))
    trained = load_trained(tmp_path / "run")
    assert (trained.info.train, trained.info.held_out) == (1438, 359)
    assert torch.equal(trained.module(IMAGES), model(IMAGES))
    assert not trained.module.training
    assert isinstance(export(path, tmp_path / "model.pt"), Exported)


def test_moving_averages_take_the_place_of_parameters_that_have_them(tmp_path: Path) -> None:
    path, model = checkpoint_of(tmp_path / "run", job())
    with pytest.raises(CheckpointError, match="has no averages of the parameters: train with"):
        export(path, tmp_path / "model.onnx", average=True)
    shard = path / "stage-0.safetensors"
    tensors = load_file(shard)
    average = torch.full_like(tensors["model/conv1a.weight"], 0.5)
    save_file(tensors | {"optimizer/conv1a.weight/average": average}, shard)
    metadata = json.loads((path / "checkpoint.json").read_text())
    metadata["shards"]["stage-0.safetensors"] = describe(shard, len(tensors) + 1).model_dump()
    (path / "checkpoint.json").write_text(json.dumps(metadata))
    for name in ("model.safetensors", "model.onnx"):
        done = export(path, tmp_path / name, average=True, verify=0)
        assert done.check == ("not verified" if "onnx" in name else done.check)
        assert done.card is not None
        assert "in parameters and buffers, moving averages |" in done.card.read_text()
    exported = load_file(tmp_path / "model.safetensors")
    assert torch.equal(exported["conv1a.weight"], average)
    assert torch.equal(exported["head.weight"], model.state_dict()["head.weight"])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    outputs = torch.from_numpy(session.run(None, {"input": IMAGES.numpy()})[0])
    model.get_parameter("conv1a.weight").data.copy_(average)
    assert difference(outputs, model(IMAGES)) < 1e-4
