"""Data sets of the user's own: how they are described, checked, divided and read."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset, random_split

from horizonml.api.jobs import make_job
from horizonml.data.choose import agree, describe, load
from horizonml.data.dataset import Data, DataInfo, TensorSpec
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, JobError
from horizonml.job.jobfile import parse
from tests.datasets import Points


def spec(name: str, classes: int | None = None, **options: Any) -> DataSpec:
    return DataSpec(name=f"tests.datasets:{name}", options=options, classes=classes)


def described(of: DataSpec, encoding: Mapping[str, Any] | None = None) -> DataInfo:
    info = describe(of, encoding=encoding)
    assert info is not None
    return info


def loaded(of: DataSpec, encoding: Mapping[str, Any] | None = None, **parts: bool) -> Data:
    return load(of, described(of, encoding), Path("unused"), **parts)


def read_all(data: Data) -> torch.Tensor:
    """Return the inputs of both parts."""
    parts = (data.train, data.info.train), (data.held_out, data.info.held_out)
    return torch.cat([part.inputs(torch.arange(count)) for part, count in parts])


def test_a_data_set_describes_itself_by_its_first_sample() -> None:
    info = described(spec("Points"))
    assert info == DataInfo(49, 12, (TensorSpec((5,)),), (), 2, TensorSpec((2,)), "regression")
    assert DataInfo.from_json(info.to_json()) == info
    named = described(spec("Named"))
    assert named.names == ("left", "right")
    assert named.inputs == (TensorSpec((3,)), TensorSpec((), torch.int64))
    assert (named.outputs, named.target) == (7, None)
    classes = described(spec("Classes"))
    assert (classes.task, classes.outputs, classes.target) == ("classification", 3, TensorSpec((), torch.int64))
    assert described(spec("part")).outputs == 3
    assert described(spec("numbers", classes=5)).outputs == 5  # as the job says


def test_samples_are_those_of_the_data_set_and_none_is_in_both_parts() -> None:
    data, whole = loaded(spec("Points")), Points()
    assert torch.equal(read_all(data).sort(0).values, whole.points.sort(0).values)
    point, value = data.train.inputs(torch.tensor([7]))[0], data.train.targets(torch.tensor([7]))
    assert torch.equal(value[0], whole.values[(whole.points == point).all(1)][0])
    fewer = DataSpec(name="tests.datasets:Points", samples=10)
    assert described(fewer).train == 10
    assert torch.equal(loaded(fewer).train.inputs(torch.arange(10)), data.train.inputs(torch.arange(10)))


def test_a_pair_or_a_list_of_two_is_a_training_and_a_held_out_part() -> None:
    data = loaded(spec("pair"))
    assert (data.info.train, data.info.held_out) == (20, 5)
    assert torch.equal(data.train.inputs(torch.arange(20)), Points(20).points)
    assert torch.equal(data.held_out.targets(torch.arange(5)), Points(5).values)
    data = loaded(spec("split"))
    assert (data.info.train, data.info.held_out) == (50, 11)


def test_any_tree_of_numbers_and_arrays_becomes_rows_of_tensors() -> None:
    for swap in (False, True):
        data = loaded(spec("Named", swap=swap))
        left, right = data.train.inputs(torch.arange(3))
        assert (left.shape, left.dtype) == ((3, 3), torch.float32)
        assert torch.equal(left[:, 0].long(), right)
        targets = data.train.targets(torch.arange(3))
        assert torch.equal(targets["value"] * 2, right.float())
        assert torch.equal(targets["pair"][0], right)
        assert targets["pair"][1][0].dtype == torch.bool


def test_tensors_of_any_kind_become_dense_ones_without_a_history() -> None:
    plain = loaded(spec("Points")).batch(True, torch.arange(9)).rows(0, 9, True, True)
    for how in ("sparse", "gradient"):
        found = loaded(spec("Strange", how=how)).batch(True, torch.arange(9)).rows(0, 9, True, True)
        for one, other in ((found.inputs, plain.inputs), (found.targets, plain.targets)):
            assert isinstance(one, torch.Tensor)
            assert isinstance(other, torch.Tensor)
            assert not one.requires_grad
            assert torch.equal(one, other)
    whole = loaded(spec("Strange", how="uint16"))
    assert whole.info.inputs == (TensorSpec((5,), torch.int32),)
    assert whole.train.inputs(torch.arange(3)).dtype == torch.int32


def test_targets_are_read_alone_where_the_data_set_can_do_that(tmp_path: Path) -> None:
    data = loaded(spec("Classes"), inputs=False)
    assert data.train.targets(torch.arange(24)).bincount().tolist() == [8, 8, 8]
    marks = tmp_path / "marks"
    data = loaded(spec("Points", marks=str(marks)))
    marks.write_text("")
    rows = data.batch(True, torch.arange(4)).rows(0, 4, inputs=True, targets=True)
    assert rows.inputs is not None
    assert rows.targets is not None
    assert len(marks.read_text().split()) == 4  # each sample once, for inputs and targets


def test_random_numbers_of_a_sample_depend_on_the_seed_and_on_nothing_else() -> None:
    data = loaded(spec("Points", noise=1.0))
    assert data.draws
    assert not loaded(spec("Points")).draws
    indices = torch.tensor([5, 6, 7])
    before = torch.get_rng_state(), random.getstate()
    whole = data.batch(True, indices, 11).inputs(0, 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.rand(10)
    assert torch.equal(data.batch(True, indices, 11).inputs(1, 3), whole[1:])
    assert not torch.equal(data.batch(True, indices, 12).inputs(0, 3), whole)


def test_a_rank_without_the_files_still_takes_part(tmp_path: Path) -> None:
    away, here = spec("from_files", folder=str(tmp_path / "nowhere")), spec("from_files", folder=str(tmp_path))
    (tmp_path / "count").write_text("30")
    info = described(here)
    assert describe(away) is None
    assert agree([None, info, None], away) == info
    assert load(away, info, tmp_path, inputs=False, targets=False).info == info
    with pytest.raises(DataError, match="its stage reads targets"):
        load(away, info, tmp_path, inputs=False)
    with pytest.raises(DataError, match=r"no rank has the files that tests.datasets:from_files reads: .*nowhere/count"):
        agree([None, None], away)


def test_mistakes_are_told_with_their_place() -> None:
    for of, words in (
        (spec("Points", size=3), r"with data.options {'size': 3} failed: .*unexpected keyword argument 'size'"),
        (spec("failing", reason="my mistake"), r"failed: .*tests/datasets\.py:\d+: RuntimeError: my mistake"),
        (spec("three"), "returned 3 things"),
        (spec("Endless"), "returned a Endless without __getitem__ and __len__"),
        (spec("Sized"), "returned a Sized without __getitem__ and __len__"),
        (spec("Lengthless"), r"does not tell its length: .*datasets\.py:\d+: TypeError: how should I know"),
        (spec("Strange", how="complex"), r"sample 0: the input has the dtype complex64; convert it to bfloat16 or"),
        (spec("Strange", how="meta"), r"sample 0: the input is a tensor on the device meta"),
        (spec("Strange", how="word"), r"sample 0: the target is a str, which is no tensor"),
        (spec("numbers"), r"of how many classes\? Set data.classes"),
        (spec("Points", broken=[0]), r"sample 0 cannot be read: .*tests/datasets\.py:\d+: ValueError: the disk lost"),
        (spec("Points", samples=0), "has no samples"),
    ):
        with pytest.raises(DataError, match=words):
            describe(of)


def test_samples_that_differ_are_told_by_their_index() -> None:
    data = loaded(spec("Ragged"))
    with pytest.raises(DataError, match=r"sample 9 has an input of .* shape \[4\], but sample 0 has .* shape \[5\]"):
        read_all(data)


def test_the_first_sample_may_be_one_that_is_skipped() -> None:
    of = DataSpec(name="tests.datasets:Points", options={"broken": [0, 1]}, corrupt="skip")
    assert described(of).inputs == (TensorSpec((5,)),)
    assert not loaded(of).draws
    with pytest.raises(DataError, match="no sample can be read"):
        described(DataSpec(name="tests.datasets:Points", options={"broken": list(range(61))}, corrupt="skip"))


def test_mistakes_in_the_job_name_the_field() -> None:
    for text, words in (
        ("{name: digit}", "data.name: 'digit' is not one of digits, .*, or module:callable; did you mean 'digits'"),
        ("{name: table, targets: [y]}", "data.path: say where the table data lies"),
        ("{name: table, path: a.csv}", "data.targets: name the columns"),
        ("{name: table, path: a.csv, inputs: [a], targets: [a]}", "data.targets: 'a' is one of the inputs"),
        ("{name: stream, path: a, inputs: [jpg], targets: [cls], corrupt: skip}", "data.corrupt: a stream"),
    ):
        with pytest.raises(JobError, match=words):
            parse(f"data: {text}", "job")


ROWS, SUMS = torch.arange(40.0).reshape(20, 2), torch.arange(20.0).reshape(20, 1)


def given(data: Any, job: dict[str, Any] | None = None) -> DataSpec:
    made, objects = make_job(job, data=data)
    objects.install()
    return made.data


def test_tensors_and_arrays_are_data_with_a_sample_in_each_row() -> None:
    for values in (
        [ROWS, SUMS],
        (ROWS.double().numpy(), SUMS.double().numpy()),
        {"inputs": ROWS, "targets": SUMS},
        lambda: (ROWS, SUMS),
    ):
        of = given(values)
        info = described(of)
        assert (info.train, info.held_out, info.inputs, info.task) == (16, 4, (TensorSpec((2,)),), "regression")
        data = loaded(of, inputs=True, targets=True)
        assert torch.equal(read_all(data).sort(0).values, ROWS)
        some = torch.tensor([3, 5])
        assert torch.equal(data.train.targets(some), data.train.inputs(some)[:, :1] / 2)
    for parts in (
        random_split(TensorDataset(ROWS, SUMS), [12, 8]),  # a list
        (TensorDataset(ROWS[:12], SUMS[:12]), (ROWS[12:], SUMS[12:])),
    ):
        of = given(parts)
        assert (described(of).train, described(of).held_out) == (12, 8)
    with pytest.raises(DataError, match="inputs and targets have 20, 9 rows; give a row for each sample"):
        describe(given((ROWS, SUMS[:9])))


def test_inputs_and_targets_may_consist_of_several_tensors() -> None:
    info = described(given(({"left": ROWS, "right": SUMS}, numpy.arange(20) % 3)))
    assert (info.names, info.task, info.outputs) == (("left", "right"), "classification", 3)
    info = described(given(((ROWS, SUMS), torch.arange(20) % 3), {"data": {"classes": 5}}))
    assert (info.outputs, len(info.inputs)) == (5, 2)
