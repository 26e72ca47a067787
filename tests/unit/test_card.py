"""Model cards: everything that somebody who finds the file has to know, from the checkpoint and the records."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import yaml

from horizonml.api.exports.card import how_to_load
from horizonml.api.exports.export import export
from horizonml.api.exports.formats import ExportFormat
from horizonml.data.dataset import DataInfo
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from tests.checkpoints import checkpoint_of
from tests.records import image_info
from tests.runs import write_run
from tests.unit.test_export import job


def rows(card: str) -> dict[str, str]:
    """The card's first table."""
    table = card.partition("| | |\n|---|---|\n")[2].partition("\n\n")[0]
    return {cells[1].strip(): cells[2].strip() for line in table.splitlines() if (cells := line.split("|"))}


def test_a_card_says_what_was_trained_on_what_and_how_good_it_is(tmp_path: Path) -> None:
    path, model = checkpoint_of(tmp_path / "run", job())
    write_run(tmp_path / "run", "pipeline", ranks=2, wall=0.5, steps=6)
    export(tmp_path / "run", tmp_path / "model.safetensors")
    text = (tmp_path / "model.safetensors.md").read_text()
    found = rows(text)
    size = sum(tensor.numel() for tensor in model.state_dict().values())
    assert found["model"] == f"`digits_cnn`, {size:,} values in parameters and buffers"
    assert found["task"] == "classification"
    assert found["data"] == "digits, 1,438 training and 359 held-out samples"
    assert found["inputs"] == "`input`: float32 `[batch, 1, 8, 8]`; 10 outputs"
    assert found["on held-out data"] == "loss 0.2500, accuracy 98.75%, after epoch 2"
    digest = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert digest in found["file"]
    assert found["check"].endswith("tensors read back, bit for bit those of the checkpoint")
    assert "fill in" in found["licence"]
    assert text.startswith("---\nlicense: unknown # fill in")
    assert "30 updates of 64 samples, by ADAM with a learning rate of 0.003" in text
    assert "Its steps took 3.0 s altogether." in text
    assert "- stage 0: rank 0: layer 0\n- stage 1: rank 1: layer 1\n- 1f1b, 2 micro-batches" in text
    assert "| 0 | here | a test | 2 | - |\n| 1 | here | a test | 2 | - |" in text
    assert "Energy: 18 J (5e-06 kWh) in the recorded steps, by all devices." in text
    assert "Software: horizonml 1, python 3, torch 2." in text
    written = yaml.safe_load(text.rpartition("```yaml\n")[2].partition("```")[0])
    assert Job.model_validate(written) == job()
    assert path.name == "step-00000030"


def test_a_card_without_records_says_so(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job())
    metadata = json.loads((path / "checkpoint.json").read_text())
    del metadata["data"], metadata["metrics"], metadata["complete"]
    metadata["job"]["data"] |= {"name": "folder", "folder": str(tmp_path / "gone")}
    (path / "checkpoint.json").write_text(json.dumps(metadata))
    export(path, tmp_path / "model.pt", verify=0)
    text = (tmp_path / "model.pt.md").read_text()
    found = rows(text)
    assert found["data"] == "a folder of images; the checkpoint does not say how many samples"
    assert (found["inputs"], found["on held-out data"], found["check"]) == (
        "not recorded", "not evaluated", "not verified",
    )  # fmt: skip
    assert "its devices are not known" in text
    assert "Energy: no device measured it." in text
    assert "the run had not ended when this checkpoint was saved" in text


def test_a_card_does_not_tell_where_a_job_ran_or_logged(tmp_path: Path) -> None:
    private = {"telemetry": "{mlflow: 'https://me:secret@example.org'}", "folder": "/private/place"}
    path, _ = checkpoint_of(tmp_path / "run", job(**private))
    export(path, tmp_path / "model.pt")
    text = (tmp_path / "model.pt.md").read_text()
    assert "secret" not in text
    assert "private" not in text


LINES: list[tuple[str, list[str]]] = [
    ("{name: resnet18}", ["import torchvision", "model = torchvision.models.resnet18(num_classes=7)"]),
    ("{name: vit_b_16}", ["torchvision.models.vit_b_16(num_classes=7, image_size=32)"]),
    ("{name: 'timm:resnet10t'}", ["import timm", "timm.create_model('resnet10t', num_classes=7, in_chans=3)"]),
    ("{name: digits_cnn, options: {width: 4}}", ["digits_cnn(num_classes=7, channels=3, image_size=32, width=4)"]),
    (
        "{name: 'my.net:Nets.build', options: {width: 3}}",
        ["from my.net import Nets", "model = Nets.build(width=3)", "give it the number of outputs, 7"],
    ),
]


def test_the_lines_build_the_model_that_the_job_names() -> None:
    info: DataInfo = image_info(7, (3, 32, 32), 10, 5)
    for model, expected in LINES:
        text = how_to_load(ExportFormat.STATE_DICT, "m.pt", parse(f"model: {model}", "job"), info)
        assert all(line in text for line in expected), text
