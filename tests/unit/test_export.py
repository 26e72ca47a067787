"""Exports of trained models: complete, checked against the model before they are kept, and explained by a card."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from horizonml.api.exports import graphs
from horizonml.api.exports.export import Exported, export
from horizonml.api.exports.formats import ComparedSamples, ExportFormat, check_weights, compare, find_samples, noise
from horizonml.api.exports.trained import Trained, load_trained
from horizonml.data.dataset import DataInfo
from horizonml.data.tensors import TensorSpec
from horizonml.errors import CheckpointError, ExportError, JobError
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.state.shards import check, describe
from horizonml.tasks.classification import Classification
from horizonml.tasks.task import InputSpec
from tests.checkpoints import checkpoint, checkpoint_of
from tests.exported import TwoInputs
from tests.unit.test_package import command
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


def test_weights_are_those_of_all_stages_bit_for_bit(tmp_path: Path) -> None:
    path, model = checkpoint_of(tmp_path / "run", job())
    for name in ("model.pt", "model.safetensors"):
        done = export(path, tmp_path / name)
        assert done.check == f"{len(model.state_dict())} tensors read back, bit for bit those of the checkpoint"
        read = load_file(tmp_path / name) if "safe" in name else torch.load(tmp_path / name, weights_only=True)
        assert read.keys() == model.state_dict().keys()
        assert all(torch.equal(read[key], value) for key, value in model.state_dict().items())
    assert only(tmp_path, "model.pt", "model.pt.md", "model.safetensors", "model.safetensors.md")


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


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_model_is_never_in_memory_twice(tmp_path: Path, name: str) -> None:
    size = 192 << 20
    stages = [{f"model/{number}": torch.ones(size // 16)} for number in range(4)]  # 4 bytes each
    checkpoint(tmp_path / "run", *stages)
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom horizonml.api.exports.export import export\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "export(Path('run'), Path(sys.argv[1]))\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, name], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert (tmp_path / name).stat().st_size >= size
    assert int(result.stdout) < 1.5 * size


def code_of(card: Path) -> str:
    """The lines of Python in a model card."""
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)
    return code


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2", "model.pt", "model.safetensors"])
def test_what_the_card_says_loads_the_model(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = checkpoint_of(tmp_path / "run", job())
    done = export(path, tmp_path / name)
    assert done.card == tmp_path / f"{name}.md"
    assert only(tmp_path, name, f"{name}.md")
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 8), (200, 100, 0)).save("picture.png")
    found = {"input": IMAGES}
    exec(code_of(done.card), found)
    outputs = torch.as_tensor(found["outputs"] if "outputs" in found else found["model"](IMAGES))  # type: ignore[operator]
    inputs = torch.as_tensor(found["input"])
    assert outputs.shape == (len(inputs), 10)
    assert difference(outputs, model(inputs)) < 1e-4


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_a_graph_is_verified_on_held_out_samples(tmp_path: Path, name: str) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job())
    found = export(path, tmp_path / name, verify=7).check
    assert re.fullmatch(
        r"7 held-out samples of digits: largest difference \d\.\de[-+]\d\d in outputs of up to [\d.]+ "
        r"\(tolerance \d\.\de-0[3-6]\)",
        found,
    )
    assert export(path, tmp_path / name, verify=0, card=False).check == "not verified"


def test_an_onnx_file_has_named_inputs_a_free_batch_and_the_weights(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job())
    export(path, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    (taken,), (returned,) = graph.input, graph.output
    assert (taken.name, returned.name) == ("input", "output")
    shape = [dim.dim_param or dim.dim_value for dim in taken.type.tensor_type.shape.dim]
    assert shape == ["batch", 1, 8, 8]
    assert len(graph.initializer) > 0
    assert only(tmp_path, "model.onnx", "model.onnx.md")


def trained_of(path: Path) -> tuple[Trained, ComparedSamples]:
    trained = load_trained(path)
    return trained, find_samples(trained.job.data, trained.info, 6, path)


def test_a_tampered_onnx_file_is_refused(tmp_path: Path) -> None:
    trained, samples = trained_of(checkpoint_of(tmp_path / "run", job())[0])
    file = tmp_path / "model.onnx"
    graphs.write(ExportFormat.ONNX, trained, samples, file)
    assert graphs.verify(ExportFormat.ONNX, trained, samples, file).difference < 1e-4
    graph = onnx.load(file)
    weights = max(graph.graph.initializer, key=lambda one: len(one.raw_data))
    values = onnx.numpy_helper.to_array(weights) * 1.01
    weights.CopyFrom(onnx.numpy_helper.from_array(values.astype("float32"), weights.name))
    onnx.save(graph, file)
    with pytest.raises(
        ExportError, match=r"on 6 held-out samples of digits, the output differs from the model's, larg"
    ):
        graphs.verify(ExportFormat.ONNX, trained, samples, file)


def test_an_archive_of_another_model_is_refused(tmp_path: Path) -> None:
    trained, samples = trained_of(checkpoint_of(tmp_path / "run", job())[0])
    other, _ = trained_of(checkpoint_of(tmp_path / "other", job(seed="1"))[0])
    graphs.write(ExportFormat.TORCH_EXPORT, other, samples, tmp_path / "model.pt2")
    assert graphs.verify(ExportFormat.TORCH_EXPORT, other, samples, tmp_path / "model.pt2").difference < 1e-4
    with pytest.raises(ExportError, match="the output differs from the model's"):
        graphs.verify(ExportFormat.TORCH_EXPORT, trained, samples, tmp_path / "model.pt2")


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_a_file_that_fails_the_verification_is_not_kept(tmp_path: Path, name: str) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job(model="{name: 'tests.exported:restless'}"))
    with pytest.raises(ExportError, match=rf"{name} is not written: on 16 held-out samples of digits, the output diff"):
        export(path, tmp_path / name)
    assert only(tmp_path)
    (tmp_path / name).write_text("what was there before")
    with pytest.raises(ExportError, match="is not written"):
        export(path, tmp_path / name)
    assert only(tmp_path, name)
    assert (tmp_path / name).read_text() == "what was there before"


def test_the_command_says_what_it_found_and_fails_with_one_line(tmp_path: Path) -> None:
    checkpoint_of(tmp_path / "run", job())
    good = command(tmp_path, "export", "run", "out/model.onnx", "--verify", "4")
    assert good.returncode == 0, good.stderr
    first, second, third = good.stdout.splitlines()
    assert first.startswith("verified: 4 held-out samples of digits: largest difference ")
    assert second == "wrote out/model.onnx, ONNX (step 30, held-out accuracy 98.75% after epoch 2)"
    assert third == "wrote out/model.onnx.md, its model card: fill in the licence"
    assert good.stderr == ""
    checkpoint_of(tmp_path / "bad", job(model="{name: 'tests.exported:restless'}"))
    bad = command(tmp_path, "export", "bad", "bad.onnx")
    assert bad.returncode == 1
    assert bad.stdout == ""
    assert re.fullmatch(r"error: bad\.onnx is not written: on 16 held-out .* \(tolerance .*\)\n", bad.stderr)
    assert not (tmp_path / "bad.onnx").exists()


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
    return trained, ComparedSamples(inputs, "6 samples", True)


def test_several_inputs_and_outputs_keep_their_names(tmp_path: Path) -> None:
    trained, samples = two_inputs()
    graphs.write(ExportFormat.ONNX, trained, samples, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [one.name for one in graph.input] == ["words", "mask"]
    assert [one.name for one in graph.output] == ["logits", "pooled"]
    graphs.write(ExportFormat.TORCH_EXPORT, trained, samples, tmp_path / "model.pt2")
    for kind, name in ((ExportFormat.ONNX, "model.onnx"), (ExportFormat.TORCH_EXPORT, "model.pt2")):
        assert graphs.verify(kind, trained, samples, tmp_path / name).difference < 1e-5
        swapped = replace(samples, inputs=(samples.inputs[0].flip(1), samples.inputs[1] * torch.rand(6, 6)))
        changed = replace(trained, module=nn.Module())
        changed.module.forward = lambda words, mask: {  # type: ignore[method-assign]
            key: value + (key == "pooled") for key, value in trained.module(words, mask).items()
        }
        assert graphs.verify(kind, trained, swapped, tmp_path / name).difference < 1e-5
        with pytest.raises(ExportError, match="output 1 differs"):
            graphs.verify(kind, changed, samples, tmp_path / name)


def test_without_the_data_it_is_noise_and_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "empty"))
    path, _ = checkpoint_of(tmp_path / "run", job(data="{name: mnist, image_size: 8}"))
    done = export(path, tmp_path / "model.onnx", verify=3)
    assert re.match(r"3 samples of noise \(the held-out data cannot be read: .*\): largest difference ", done.check)
    assert done.check in (tmp_path / "model.onnx.md").read_text()


def test_noise_of_words_is_words() -> None:
    tokens = TensorSpec((50,), torch.int64)
    info = DataInfo(9, 1, (tokens, tokens), ("input_ids", "attention_mask"), 7, None, "language_model")
    words, mask = noise(info, 20, "because").inputs
    assert (int(words.min()), int(words.max())) == (0, 6)
    assert bool((mask == 1).all())
    assert torch.equal(noise(info, 20, "because").inputs[0], words)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([[1.0, 2.0]], [[1.0, 2.1]], "differs from the model's, largest difference 1.0e-01 in outputs of up to 2 "),
        ([[1.0, 2.0]], [[1.0, float("nan")]], "infinite values or NaN in other places"),
        ([[1.0, float("inf")]], [[1.0, float("-inf")]], "infinite values or NaN in other places"),
        ([[1.0, 2.0]], [[1.0], [2.0]], r"float32 of shape \[2, 1\], but the model returns float32 of shape \[1, 2\]"),
        ([[1]], [[1.0]], "the output is float32 of shape"),
    ],
)
def test_outputs_that_differ_are_refused(ours: list[list[float]], theirs: list[list[float]], words: str) -> None:
    with pytest.raises(ExportError, match=f"file is not written: on 1 sample, .*{words}"):
        compare("file", "1 sample", [torch.tensor(ours)], [torch.tensor(theirs)])
    same = torch.tensor([[1.0, float("nan"), float("inf")]])
    assert compare("file", "1 sample", [same], [same.clone()]).difference == 0
    with pytest.raises(ExportError, match="it returns 2 tensors instead of 1"):
        compare("file", "1 sample", [same], [same, same])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": torch.tensor([1.0, 2.0])}, "it lacks b"),
        ({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([float("nan")]), "c": torch.ones(1)}, "it also has c"),
        ({"a": torch.tensor([1.0, 2.1]), "b": torch.tensor([float("nan")])}, "its a differs"),
        ({"a": torch.tensor([1.0, 2.0]).double(), "b": torch.tensor([float("nan")])}, "its a differs"),
        ({"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([float("nan")])}, "its a differs"),
    ],
)
def test_weights_that_differ_are_refused(found: dict[str, torch.Tensor], words: str) -> None:
    expected = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([float("nan")])}
    assert check_weights("file", expected, expected).startswith("2 tensors read back")
    with pytest.raises(ExportError, match=f"^file is not written: read back, {words}"):
        check_weights("file", expected, found)


def test_formats_go_by_the_ending(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job())
    assert load_file(tmp_path / str(export(path, tmp_path / "weights.bin", "safetensors").output.name))
    with pytest.raises(JobError, match=r"weights\.bin: the ending names no format; use one of \.pt \(PyTorch state di"):
        export(path, tmp_path / "weights.bin")
    with pytest.raises(JobError, match=r"--format: 'onxn' is not one of auto, .*; did you mean 'onnx'\?"):
        export(path, tmp_path / "weights.bin", "onxn")
    with pytest.raises(JobError, match=r"--verify: -1 is negative"):
        export(path, tmp_path / "model.pt", verify=-1)


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, package: str) -> None:
    refused = command(tmp_path, "export", "run", "model.onnx", without=package)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: an export to ONNX needs {package}, which is not installed: pip install 'horizonml[onnx]'\n"
    )


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


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx"])
def test_moving_averages_take_the_place_of_parameters_that_have_them(tmp_path: Path, name: str) -> None:
    path, model = checkpoint_of(tmp_path / "run", job())
    with pytest.raises(CheckpointError, match="has no averages of the parameters: train with"):
        export(path, tmp_path / name, average=True)
    shard = path / "stage-0.safetensors"
    tensors = load_file(shard)
    average = torch.full_like(tensors["model/conv1a.weight"], 0.5)
    save_file(tensors | {"optimizer/conv1a.weight/average": average}, shard)
    metadata = json.loads((path / "checkpoint.json").read_text())
    metadata["shards"]["stage-0.safetensors"] = describe(shard, len(tensors) + 1).model_dump()
    (path / "checkpoint.json").write_text(json.dumps(metadata))
    done = export(path, tmp_path / name, average=True)
    assert done.card is not None
    assert "in parameters and buffers, moving averages |" in done.card.read_text()
    if name == "model.safetensors":
        exported = load_file(tmp_path / name)
        assert torch.equal(exported["conv1a.weight"], average)
        assert torch.equal(exported["head.weight"], model.state_dict()["head.weight"])
    else:
        session = onnxruntime.InferenceSession(tmp_path / name)
        outputs = torch.from_numpy(session.run(None, {"input": IMAGES.numpy()})[0])
        model.get_parameter("conv1a.weight").data.copy_(average)
        assert difference(outputs, model(IMAGES)) < 1e-4


def test_what_a_checkpoint_does_not_have_is_named_and_never_exported(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job())
    metadata = json.loads((path / "checkpoint.json").read_text())
    shard = path / "stage-1.safetensors"
    tensors = load_file(shard)
    del tensors["model/head.bias"]
    save_file(tensors, shard)
    metadata["shards"]["stage-1.safetensors"] = describe(shard, len(tensors)).model_dump()
    (path / "checkpoint.json").write_text(json.dumps(metadata))
    for target in ("model.pt", "model.safetensors", "model.onnx", "model.pt2"):
        with pytest.raises(CheckpointError, match=r"has no values for head.bias, which digits_cnn computes with"):
            export(path, tmp_path / target)
    with pytest.raises(CheckpointError, match=r"has no values for head.bias"):
        load_trained(path)
    assert only(tmp_path)
