"""`horizonml evaluate` and `predict`: a trained model on its own data, on other data, and on files."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from horizonml import Run
from tests.commands import command
from tests.distributed.processes import horizonml
from tests.programs import need_package

pytestmark = pytest.mark.slow

ONE = ("--set", "epochs=1", "--set", "parallel.strategy=single", "--workers", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network that was trained on three classes of images."""
    folder = tmp_path_factory.mktemp("flowers")
    for brightness, name in enumerate(("dark", "grey", "white")):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(12):
            image = Image.new("RGB", (20, 16), (120 * brightness + number,) * 3)
            image.save(folder / "images" / name / f"{number}.png")
    assert horizonml(folder, "init", "--data", "images").returncode == 0
    result = horizonml(folder, "train", "job.yaml", *ONE, "--set", "data.image_size=16")
    assert result.returncode == 0, result.stderr
    (folder / "recorded").write_text(re.findall(r"held-out (.*samples\))", result.stdout)[0])
    return folder


def test_held_out_samples_are_measured_as_the_training_did(trained: Path) -> None:
    result = horizonml(trained, "evaluate", "runs/first")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (trained / "recorded").read_text()
    everything = json.loads(horizonml(trained, "evaluate", "runs/first", "--part", "all", "--json").stdout)
    assert everything["samples"] == 36
    assert everything.keys() == {"loss", "accuracy", "samples"}


def test_files_are_predicted_with_the_names_of_the_classes(trained: Path) -> None:
    files = [f"images/{name}/3.png" for name in ("white", "dark")]
    result = horizonml(trained, "predict", "runs/first", *files, "--out", "new/table.csv")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "wrote new/table.csv (2 samples)\n"
    with (trained / "new" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["sample"] for row in rows] == files
    probabilities = [
        {name.removeprefix("probability of "): float(value) for name, value in row.items() if " of " in name}
        for row in rows
    ]
    for row, found in zip(rows, probabilities, strict=True):
        assert found.keys() == {"dark", "grey", "white"}
        assert sum(found.values()) == pytest.approx(1, abs=1e-4)
        assert row["class"] == max(found, key=lambda name: found[name])
    held_out = horizonml(trained, "predict", "runs/first", "--part", "held-out", "--out", "held.csv")
    assert held_out.stdout == "wrote held.csv (7 samples)\n"
    loss = json.loads(horizonml(trained, "evaluate", "runs/first", "--json").stdout)
    assert loss["samples"] == 7


def test_mistakes_name_the_file_or_the_field(trained: Path) -> None:
    for name in ("dark", "grey"):
        shutil.copytree(trained / "images" / name, trained / "two" / name)
    for arguments, code, words in (
        (["evaluate", "runs/none"], 1, "no checkpoint in runs/none"),
        (["evaluate", "runs/first", "--part", "half"], 2, "part: 'half' is not one of held-out, train and all"),
        (["evaluate", "runs/first", "--data", "digitz"], 2, "did you mean 'digits'?"),
        (
            ["evaluate", "runs/first", "--data", "two"],
            1,
            "classes dark, grey, but the model was trained on dark, grey, ",
        ),
        (["evaluate", "runs/first", "--set", "data.folder=gone"], 1, "data: gone is not here"),
        (["predict", "runs/first", "gone.png"], 1, "gone.png is not a file"),
        (["predict", "runs/first", "job.yaml"], 1, "job.yaml is not a readable image"),
    ):
        result = command(trained, *arguments)
        assert result.returncode == code, result.stderr
        assert words in result.stderr
        assert result.stderr.startswith("error: ")
        assert len(result.stderr.splitlines()) <= 2


def test_another_text_has_the_numbers_of_the_training(tmp_path: Path) -> None:
    small = ("--set", "data.samples=64", "--set", "model.options={layers: 1, heads: 1, width: 16}")
    (tmp_path / "other.txt").write_text("what a text consists of is known from the text itself " * 40)
    (tmp_path / "foreign.txt").write_text("a text\nwith 100 €" * 40)
    assert horizonml(tmp_path, "init", "--data", "text").returncode == 0
    trained = horizonml(tmp_path, "train", "job.yaml", *ONE, *small)
    assert trained.returncode == 0, trained.stderr
    assert "(unigram baseline 22.6)" in trained.stdout
    recorded = horizonml(tmp_path, "evaluate", "runs/first")
    assert recorded.stdout.strip() in trained.stdout
    again = json.loads(horizonml(tmp_path, "evaluate", "runs/first", "--json").stdout)
    (last,) = Run(tmp_path / "runs" / "first").evaluations[-1:]
    assert again == pytest.approx({"loss": last.loss, **last.metrics, "samples": last.samples}, rel=1e-4)
    measured = horizonml(tmp_path, "evaluate", "runs/first", "--data", "other.txt")
    assert measured.returncode == 0, measured.stderr
    assert re.match(r"loss [\d.]+, accuracy [\d.]+%, perplexity [\d.]+ \(\d+ samples\)", measured.stdout)
    refused = horizonml(tmp_path, "evaluate", "runs/first", "--data", "foreign.txt")
    assert refused.returncode == 1
    unknown = "the text has characters that the model was not trained on: '1', '0', '€' (the first in line 2)"
    assert f"error: data.path: foreign.txt: {unknown}" in refused.stderr
    written = [horizonml(tmp_path, "generate", "runs/first", "Shall I", "--tokens", "90") for _ in range(2)]
    assert written[0].stdout == written[1].stdout
    assert written[0].stdout.startswith("Shall I")
    assert len(written[0].stdout) == len("Shall I") + 90 + 1
    elsewhere = [f"--set={one}" for one in ("data.path=other.txt", "data.samples=20", "batch_size=16", "epochs=2")]
    assert "characters was 61 (SHA-256" in horizonml(tmp_path, "train", "job.yaml", *ONE, *small, *elsewhere).stderr


SUMS = """
from torch import nn


def build(num_outputs):
    return nn.Linear(4, num_outputs)
"""


def test_another_table_is_predicted_row_by_row_with_the_scale_and_the_words_of_the_training(tmp_path: Path) -> None:
    need_package("pyarrow")
    worth = {"Bern": 5, "Aarau": 2, "Chur": 1}
    rows = [(20 + 7 * number % 180, list(worth)[number % 3]) for number in range(120)]
    sold = "".join(f"{area},{town},{area / 100 + worth[town]}\n" for area, town in rows)
    (tmp_path / "sold.csv").write_text(f"area,town,price\n{sold}")
    (tmp_path / "sums.py").write_text(SUMS)
    (tmp_path / "job.yaml").write_text(
        "{folder: run, epochs: 80, batch_size: 16, model: {name: 'sums:build'}, optimizer: {name: adam, lr: 0.05}, "
        "data: {name: table, path: sold.csv, targets: [price]}, parallel: {strategy: single}}"
    )
    result = horizonml(tmp_path, "train", "job.yaml")
    assert result.returncode == 0, result.stderr
    many = [(area, town) for area in (150, 30, 90) for town in ("Chur", "Bern")]
    for name, asked in (("many", many), ("one", [(80, "Bern")])):
        (tmp_path / f"{name}.csv").write_text("town,area\n" + "".join(f"{town},{area}\n" for area, town in asked))
        result = horizonml(tmp_path, "predict", "run", "--data", f"{name}.csv", "--out", f"{name}-prices.csv")
        assert result.returncode == 0, result.stderr
        with (tmp_path / f"{name}-prices.csv").open() as file:
            found = [float(row["value 0"]) for row in csv.DictReader(file)]
        assert found == pytest.approx([area / 100 + worth[town] for area, town in asked], abs=0.05)
    refused = horizonml(tmp_path, "evaluate", "run", "--data", "one.csv")
    assert refused.returncode == 1
    assert refused.stderr == "error: data.targets: one.csv has not 'price', so it can be used for predictions only\n"
