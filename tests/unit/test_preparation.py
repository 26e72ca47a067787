"""How pictures become inputs, as model cards and ONNX files tell it: what is told is what the training did."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest
import torch
from PIL import ExifTags, Image

from horizonml.api.exports.card import how_to_load
from horizonml.api.exports.export import export
from horizonml.api.exports.formats import ExportFormat, preparation_of, properties
from horizonml.data.choose import describe
from horizonml.data.files import FolderSource
from horizonml.data.images import ImageSplit
from horizonml.job.schema import Job
from tests.checkpoints import checkpoint_of
from tests.records import image_info
from tests.unit.test_card import rows
from tests.unit.test_export import code_of, difference, job


def picture(path: Path, size: tuple[int, int], seed: int) -> None:
    """Write a picture of noise in colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.manual_seed(seed))
    Image.fromarray(pixels.numpy()).save(path)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_the_card_does_with_a_picture_is_what_predictions_do(
    tmp_path: Path, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("a|b", "moth")):
        for index in range(4):
            picture(tmp_path / "photos" / name / f"{index}.png", (20, 16), 10 * number + index)
    given = job(data=f"{{name: folder, folder: {tmp_path / 'photos'}, image_size: 12, channels: {channels}}}")
    path, model = checkpoint_of(tmp_path / "run", given)
    done = export(path, tmp_path / "model.onnx")
    assert done.card is not None
    found = rows(done.card.read_text())
    assert found["preparation"].startswith("turn a picture as its EXIF orientation says, scale grey values of 16 bits ")
    assert "lay transparency over white, crop the middle and resize it to 12 by 12 pixels, " in found["preparation"]
    assert found["preparation"].endswith("divide by 255, subtract 0.449, divide by 0.226")
    assert found["classes"] == "0: a&#124;b, 1: moth"

    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "picture.png", (25, 14), 3)
    with Image.open(tmp_path / "picture.png") as noise:
        exif = noise.getexif()
        exif[ExifTags.Base.Orientation] = 6
        noise.putalpha(noise.convert("L"))
        noise.save(tmp_path / "picture.png", exif=exif)
    names: dict[str, object] = {}
    exec(code_of(done.card), names)
    source = FolderSource([(tmp_path / "picture.png", 0)], [], 12)
    info = describe(given.data)
    assert info is not None
    expected = ImageSplit(source, torch.arange(1), info, given.data).inputs(torch.arange(1))
    assert difference(torch.as_tensor(names["input"]), expected) < 1e-5
    assert difference(torch.as_tensor(names["outputs"]), model(expected)) < 1e-4

    told = onnxruntime.InferenceSession("model.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(told["labels"]) == ["a|b", "moth"]
    assert json.loads(told["preparation"]) == {"size": [12, 12], "mean": [0.449] * channels, "std": [0.226] * channels}


def test_only_pictures_are_prepared() -> None:
    info = image_info(7, (3, 32, 32), 10, 5)
    assert preparation_of(job(data="{name: synthetic}"), info) is None
    assert preparation_of(job(), None) is None
    assert properties(job(data="{name: text}"), info) == {}


def test_weights_with_adapters_are_not_said_to_fit_the_model_without_them() -> None:
    given = Job.model_validate({"model": {"name": "resnet18", "lora": {"targets": ["layer4.*"]}}})
    text = how_to_load(ExportFormat.SAFETENSORS, "m.safetensors", given, None)
    assert 'weights = load_file("m.safetensors")' in text
    assert "load_state_dict" not in text
    assert "horizonml export --adapters" in text
