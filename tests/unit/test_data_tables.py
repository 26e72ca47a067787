"""Columns of CSV and Parquet files, and of Hugging Face data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from horizonml.data.choose import agree, describe, load
from horizonml.data.columns import Column, with_scale
from horizonml.data.dataset import Data, DataInfo, TensorSpec
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError
from tests.programs import need_package
from tests.unit.test_data_own import described, loaded, read_all

ROWS = 40


def spec(path: Path, name: str = "table", **fields: Any) -> DataSpec:
    return DataSpec(name=name, path=str(path), **{"targets": ["y"], **fields})


def write(path: Path, header: str, rows: list[str]) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    """40 rows: an area, a town of three, and a price."""
    need_package("pyarrow")
    towns = ("Bern", "Aarau", "Chur")
    return write(tmp_path / "houses.csv", "area,town,y", [f"{n},{towns[n % 3]},{n / 4}" for n in range(ROWS)])


def test_columns_of_a_csv_file(houses: Path) -> None:
    data = loaded(spec(houses))
    assert (data.info.train, data.info.held_out, data.info.task, data.info.outputs) == (32, 8, "regression", 1)
    assert data.info.inputs == (TensorSpec((4,)),)
    inputs, targets = data.train.inputs(torch.arange(32)), data.train.targets(torch.arange(32))
    assert targets.shape == (32, 1)
    # The numbers are scaled by the training part; each word of the text has a column of its own.
    assert abs(float(inputs[:, 0].mean())) < 1e-6
    assert abs(float(inputs[:, 0].std(unbiased=False)) - 1) < 1e-5
    rows = (targets[:, 0] * 4).long()
    places = torch.tensor([1, 0, 2])  # Bern, Aarau and Chur in the order of the alphabet
    assert torch.equal(inputs[:, 1:].argmax(1), places[rows % 3])
    plain = loaded(spec(houses, normalize=False, inputs=["area"]))
    assert torch.equal(plain.held_out.inputs(torch.arange(8)), plain.held_out.targets(torch.arange(8)) * 4)


def test_text_truth_values_and_numbers_as_classes(tmp_path: Path) -> None:
    need_package("pyarrow")
    names = write(tmp_path / "a.csv", "x,y", [f"{n},{'dog' if n % 4 else 'cat'}" for n in range(ROWS)])
    data = loaded(spec(names, normalize=False))
    assert (data.info.task, data.info.outputs, data.info.target) == ("classification", 2, TensorSpec((), torch.int64))
    every = torch.arange(32)
    assert torch.equal(data.train.targets(every), (data.train.inputs(every)[:, 0] % 4 != 0).long())
    truths = loaded(spec(write(tmp_path / "b.csv", "x,y", [f"{n},{'true' if n % 2 else 'false'}" for n in range(9)])))
    assert truths.info.outputs == 2
    whole = write(tmp_path / "c.csv", "x,y", [f"{n},{n % 5}" for n in range(ROWS)])
    assert loaded(spec(whole)).info.task == "regression"
    assert loaded(spec(whole, classes=6)).info.outputs == 6
    with pytest.raises(DataError, match=r"data.classes: 4, but the column 'y' has the classes 0 to 4"):
        describe(spec(whole, classes=4))


def test_parquet_files_of_a_folder_are_one_table(tmp_path: Path) -> None:
    need_package("pyarrow")
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(2):
        values = [float(10 * part + n) for n in range(10)]
        parquet.write_table(pyarrow.table({"x": values, "y": values, "z": values}), folder / f"{part}.parquet")
    data = loaded(spec(folder, normalize=False, inputs=["x"], targets=["y", "z"]))
    assert (data.info.train + data.info.held_out, data.info.outputs) == (20, 2)
    assert torch.equal(data.train.inputs(torch.arange(16)).expand(-1, 2), data.train.targets(torch.arange(16)))


def test_a_row_without_a_value_is_named_and_counts_neither_for_the_scale_nor_as_a_category(tmp_path: Path) -> None:
    need_package("pyarrow")
    words = r"row 8 has no value in the column 'x'.*data.corrupt: skip"
    data = loaded(spec(write(tmp_path / "a.csv", "x,y", [f"{'' if n == 7 else n},{n}" for n in range(ROWS)])))
    with pytest.raises(DataError, match=words):
        read_all(data)
    good = torch.tensor([n for n in range(32) if data.train._members[n] != 7])
    assert bool(torch.isfinite(data.train.inputs(good)).all())
    for empty in ("", " "):
        path = write(tmp_path / "b.csv", "x,y", [f"{empty if n == 7 else 'ab'[n % 2]},{n}" for n in range(ROWS)])
        data = loaded(spec(path))
        assert data.info.inputs == (TensorSpec((2,)),)
        with pytest.raises(DataError, match=words):
            read_all(data)
        # A run of an earlier version may have learned it as a category, which it keeps.
        earlier = {"inputs": [{"column": "x", "words": [empty, "a", "b"]}], "targets": [{"column": "y"}]}
        assert read_all(loaded(spec(path), earlier)).sum(0).tolist() == [1, 20, 19]
    with pytest.raises(DataError, match=r"no row to train on is complete; row 1 has no value in the column 'x'"):
        describe(spec(write(tmp_path / "c.csv", "x,y", [f",{n}" for n in range(9)])))


TIMES = [1_700_000_000 + 10 * n for n in range(ROWS)]  # of Unix, which float32 rounds to multiples of 128


def test_large_numbers_that_differ_by_little_stay_apart(tmp_path: Path) -> None:
    need_package("pyarrow")
    import pyarrow
    from pyarrow import parquet

    seconds = write(tmp_path / "a.csv", "x,y", [f"{time},{time - TIMES[0]}" for time in TIMES])
    nanoseconds = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"x": [time * 10**9 for time in TIMES], "y": range(ROWS)}), nanoseconds)
    for path in (seconds, nanoseconds):
        data = loaded(spec(path))
        assert read_all(data).unique().numel() == ROWS
        assert read_all(data).dtype == torch.float32
        assert torch.equal(read_all(loaded(spec(path), data.info.encoding)), read_all(data))  # as predictions are read


def test_numbers_that_float32_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    need_package("pyarrow")
    path = write(tmp_path / "a.csv", "x,y,z", [f"{time},{n},1700000001" for n, time in enumerate(TIMES)])
    assert describe(spec(path, normalize=False, inputs=["z"])) is not None  # which is the same everywhere
    with pytest.raises(DataError, match=r"data.inputs: the column 'x' holds numbers such as 17.*normalize at true"):
        describe(spec(path, normalize=False))
    with pytest.raises(DataError, match=r"data.targets: the column 'x' holds .* wrong there by up to 6\d; subtract"):
        describe(spec(path, targets=["x"]))
    huge = write(tmp_path / "b.csv", "x,y", [f"{n}e60,{n}" for n in range(ROWS)])
    assert bool(read_all(loaded(spec(huge))).isfinite().all())
    with pytest.raises(DataError, match=r"data.inputs: the column 'x' holds numbers such as"):
        describe(spec(huge, normalize=False))


def test_a_column_that_a_few_cells_make_text_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    need_package("pyarrow")
    described(spec(write(tmp_path / "a.csv", "x,y", [f"{'?' if n == 7 else n},{n}" for n in range(ROWS)])))
    assert "the column 'x' is text, because row 8 of it holds '?': each of its 40 different cells" in caplog.text
    caplog.clear()
    describe(spec(write(tmp_path / "b.csv", "x,y", [f"{n if n % 2 else 'n'}{n},{n}" for n in range(ROWS)])))
    assert not caplog.text


def test_mistakes_in_columns_and_files(tmp_path: Path, houses: Path) -> None:
    with pytest.raises(DataError, match=r"data.inputs: .*houses.csv has no column 'are'; did you mean 'area'"):
        describe(spec(houses, inputs=["are"]))
    with pytest.raises(DataError, match="cannot be read as a table"):
        describe(spec(write(tmp_path / "b.csv", "a,y", ["1,2,3"])))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"there is no .csv or .parquet file in"):
        describe(spec(tmp_path / "empty"))
    away = spec(tmp_path / "nowhere.csv")
    assert describe(away) is None
    with pytest.raises(DataError, match=r"data.path: .*nowhere.csv does not exist on any rank"):
        agree([None], away)
    info = described(spec(houses))
    assert load(away, info, tmp_path, inputs=False, targets=False).info == info
    with pytest.raises(DataError, match="this rank's stage reads it"):
        load(away, info, tmp_path, targets=False)


def write_flats(folder: Path, rows: list[str], header: str = "town,area,y") -> DataSpec:
    return spec(write(folder / "flats.csv", header, rows))


def test_another_table_is_read_as_the_one_that_was_trained_on(houses: Path, tmp_path: Path) -> None:
    info = described(spec(houses))
    known = DataInfo.from_json(json.loads(json.dumps(info.to_json())))
    assert known == info
    # Its columns have another order and it has one more, other numbers, and only one of the towns.
    flats = write_flats(tmp_path, [f"Chur,{n},{n},x" for n in (100, 300, 500, 700)], "town,area,y,note")
    data = loaded(flats, known.encoding)
    other = data.info
    assert (other.inputs, other.outputs, other.task, other.encoding) == (info.inputs, 1, "regression", info.encoding)
    members = loaded(spec(houses)).train._members.double()
    areas = data.train.targets(torch.arange(3))[:, 0].double()
    expected = (areas - members.mean()) / members.std(unbiased=False)
    assert torch.allclose(data.train.inputs(torch.arange(3))[:, 0], expected.float())
    assert data.train.inputs(torch.arange(3))[:, 1:].tolist() == [[0.0, 0.0, 1.0]] * 3


def test_what_another_table_lacks_is_told(houses: Path, tmp_path: Path) -> None:
    known = described(spec(houses)).encoding

    def other(*rows: str, header: str = "town,area,y") -> Data:
        return loaded(write_flats(tmp_path, list(rows), header), known)

    with pytest.raises(DataError, match=r"no column 'area', on which the model was trained; did you mean 'areas'"):
        other("Chur,1,2", "Chur,1,2", header="town,areas,y")
    with pytest.raises(DataError, match=r"the column 'area' holds text, such as 'big', where numbers are needed"):
        other("Chur,big,2", "Chur,1,2")
    with pytest.raises(DataError, match=r"row \d has 'Basel' in the column 'town', .* training had not \(it had"):
        read_all(other("Basel,1,2", "Basel,1,2"))
    with pytest.raises(DataError, match=r"data.inputs: town, but the model was trained on the columns area, town"):
        describe(spec(houses, inputs=["town"]), encoding=known)
    # Predictions need no targets: neither the column nor, where it is there, its values.
    for header, rows in (("town,area", ("Bern,1", "Chur,2")), ("town,area,y", ("Bern,1,", "Chur,2,"))):
        data = other(*rows, header=header)
        assert read_all(data).shape == (2, 4)
        with pytest.raises(DataError, match=r"so it can be used for predictions|no value in the column 'y'"):
            data.train.targets(torch.tensor([0]))


def test_classes_of_another_table_have_their_numbers_of_the_training(tmp_path: Path) -> None:
    """Codes that look like numbers are words, as in the training."""
    need_package("pyarrow")
    codes = [f"{('007', '1b', '12')[n % 3]},{n % 2},{('ant', 'bee', 'cow')[n % 3]}" for n in range(ROWS)]
    info = described(spec(write(tmp_path / "a.csv", "code,z,y", codes)))
    assert info.labels == ("ant", "bee", "cow")
    data = loaded(spec(write(tmp_path / "b.csv", "code,z,y", ["007,1,cow", "12,1,bee", "007,1,bee"])), info.encoding)
    assert (data.info.outputs, data.info.labels) == (3, info.labels)
    assert read_all(data)[:, :3].argmax(1).sort().values.tolist() == [0, 0, 1]
    targets = torch.cat([data.train.targets(torch.arange(2)), data.held_out.targets(torch.arange(1))])
    assert sorted(targets.tolist()) == [1, 1, 2]
    data = loaded(spec(write(tmp_path / "c.csv", "code,z,y", ["12,1,dog", "12,1,bee"])), info.encoding)
    with pytest.raises(DataError, match="'dog' in the column 'y', which the training had not"):
        torch.cat([part.targets(torch.tensor([0])) for part in (data.train, data.held_out)])


def test_a_scale_is_the_same_on_every_processor() -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(5)).mul(1e4)
    how = with_scale(Column("x"), values)
    assert how.mean == pytest.approx(float(values.double().mean()), rel=1e-9)
    assert how.deviation == pytest.approx(float(values.double().std(unbiased=False)), rel=1e-9)
    assert with_scale(Column("x"), torch.full((3,), 7.0)).deviation == 1.0
    pairs = torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)
    assert with_scale(Column("x"), pairs).mean == 0.5  # (1e16 - 1e16) + (1 + 1), and never another order


# Hugging Face --------------------------------------------------------------------------------------------------------


def hub(folder: Path, columns: dict[str, Any], **features: Any) -> Path:
    """A data set as `save_to_disk` writes it."""
    need_package("datasets")
    import datasets

    made = datasets.Dataset.from_dict(columns)
    for name, feature in features.items():
        made = made.cast_column(name, feature)
    made.save_to_disk(str(folder))
    return folder


def test_images_and_class_labels_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    need_package("datasets")
    import datasets
    from PIL import Image

    images = [Image.new("RGB", (20, 12), (20 * n, 0, 0)) for n in range(10)]
    labels = datasets.ClassLabel(names=["cat", "cow", "dog"])
    folder = hub(tmp_path / "d", {"image": images, "y": [n % 3 for n in range(10)]}, image=datasets.Image(), y=labels)
    of = spec(folder, "huggingface", image_size=8)
    data = loaded(of)
    assert (data.info.inputs, data.info.outputs) == ((TensorSpec((3, 8, 8)),), 3)
    every = torch.arange(8)
    shades = (data.train.inputs(every)[:, 0].mean((1, 2)) * 0.226 + 0.449) * 255 / 20
    assert torch.equal(shades.round().long() % 3, data.train.targets(every))
    assert loaded(of, inputs=False).held_out.targets(torch.arange(2)).shape == (2,)


def test_numbers_text_and_lists_of_a_hugging_face_data_set(tmp_path: Path) -> None:
    need_package("datasets")
    import datasets

    columns = {"a": [float(n) for n in range(10)], "b": list(range(10)), "y": ["even", "odd"] * 5}
    data = loaded(spec(hub(tmp_path / "text", columns), "huggingface"))
    assert (data.info.inputs, data.info.outputs) == ((TensorSpec((2,)),), 2)
    odd = spec(hub(tmp_path / "odd", {"a": [1.0] * 5, "b": [1] * 5, "y": ["odd"] * 5}), "huggingface")
    assert described(odd, data.info.encoding).outputs == 2
    assert loaded(odd, data.info.encoding).train.targets(torch.arange(4)).tolist() == [1] * 4
    every = torch.arange(8)
    assert torch.equal(data.train.inputs(every)[:, 0].long() % 2, data.train.targets(every))
    lists = {"ids": [[n, n + 1, 3] for n in range(10)], "mask": [[1, 1, 0]] * 10, "y": [n / 2 for n in range(10)]}
    data = loaded(spec(hub(tmp_path / "lists", lists), "huggingface"))
    assert data.info.names == ("ids", "mask")
    assert [one.dtype for one in data.train.inputs(every)] == [torch.int64, torch.int64]
    assert torch.equal(data.train.inputs(every)[0][:, 0], (data.train.targets(every) * 2).long())
    made = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "parts"))
    data = loaded(spec(tmp_path / "parts", "huggingface"))
    assert (data.info.train, data.info.held_out) == (10, 10)
    with pytest.raises(DataError, match=r"data.targets: .* has no column 'why'"):
        describe(spec(tmp_path / "parts", "huggingface", targets=["why"]))
    assert describe(spec(tmp_path / "nowhere", "huggingface")) is None
    times = hub(tmp_path / "times", {"x": TIMES, "y": list(range(ROWS))})
    with pytest.raises(DataError, match=r"data.inputs: the column 'x' holds .* are wrong there by up to 6\d; subtract"):
        describe(spec(times, "huggingface"))
