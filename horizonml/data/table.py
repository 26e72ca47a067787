"""Reads tables: columns of CSV and Parquet files, which fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.data.dataset import Data, DataInfo, Inputs
from horizonml.data.holdout import divide, hold_out
from horizonml.data.spec import DataSpec
from horizonml.data.tensors import TensorSpec
from horizonml.errors import DataError, is_out_of_memory
from horizonml.machine.extras import require
from horizonml.text import nearest

_ENDINGS = (".csv", ".parquet")


@dataclass(frozen=True)
class _Content:
    """Holds the columns of a table: inputs `[rows, values]`, targets, and what is wrong with rows, by row."""

    inputs: Tensor
    scaled: Tensor  # bool `[values]`: which of the inputs are numbers
    targets: Tensor
    classes: int  # 0 for numbers
    labels: tuple[str, ...]  # the classes' names, if they are words
    problems: dict[int, str]


_kept: dict[str, _Content] = {}  # what was read to be described, until it is loaded


def describe(spec: DataSpec) -> DataInfo | None:
    """Return a description of the table, or None if this machine does not have it. Raises DataError."""
    if not Path(spec.path or "").exists():
        return None
    content = _read(spec)
    _kept.clear()
    _kept[spec.model_dump_json()] = content
    train, held_out = divide(spec, len(content.inputs), 0)
    inputs, target = (TensorSpec(tuple(part.shape[1:]), part.dtype) for part in (content.inputs, content.targets))
    outputs = content.classes or content.targets.shape[1]
    task = "classification" if content.classes else "regression"
    return DataInfo(train, held_out, (inputs,), (), outputs, target, task, labels=content.labels)


def load(spec: DataSpec, info: DataInfo, inputs: bool, targets: bool) -> Data:
    """Read the wanted parts of the table that `info` describes. Raises DataError."""
    content = _kept.pop(spec.model_dump_json(), None)
    if not inputs and not targets:
        nothing = TableSplit(torch.empty(0), torch.empty(0), {}, torch.empty(0, dtype=torch.int64), spec)
        return Data(info, nothing, nothing)
    if content is None:
        if not Path(spec.path or "").exists():
            raise DataError(f"data.path: {spec.path} is not there, but this rank's stage reads it")
        content = _read(spec)
    members = hold_out(len(content.inputs), info.train, info.held_out)
    values = content.inputs
    if inputs and spec.normalize and bool(content.scaled.any()):
        values = _scaled(values, content, members[0])
    train, held_out = (TableSplit(values, content.targets, content.problems, rows, spec) for rows in members)
    return Data(info, train, held_out)


def _scaled(values: Tensor, content: _Content, members: Tensor) -> Tensor:
    """Return the inputs with each number scaled by the mean and the deviation of the complete training rows."""
    complete = torch.tensor([row for row in members.tolist() if row not in content.problems])
    known = values[complete].double()
    mean, deviation = known.mean(0), known.std(0, unbiased=False)
    deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
    scaled = ((values.double() - mean) / deviation).to(values.dtype)
    return torch.where(content.scaled, scaled, values)


class TableSplit:
    """Provides rows of a table by index, counted from 0 within the split."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, problems: dict[int, str], members: Tensor, spec: DataSpec
    ) -> None:
        """Prepare the split; `members` are its rows."""
        self._inputs, self._targets, self._problems, self._members = inputs, targets, problems, members
        self._path = spec.path

    def _rows(self, indices: Tensor) -> Tensor:
        rows = self._members[indices]
        if self._problems:
            for row in rows.tolist():
                if row in self._problems:
                    raise DataError(
                        f"data.path: {self._path}: row {row + 1} has {self._problems[row]}; complete it, remove it, or "
                        "set data.corrupt: skip"
                    )
        return rows

    def inputs(self, indices: Tensor) -> Tensor:
        """Return the columns that the model gets. Raises DataError for a row in which a value is missing."""
        return self._inputs[self._rows(indices)]

    def targets(self, indices: Tensor) -> Tensor:
        """Return the columns that are learned. Raises DataError for a row in which a value is missing."""
        return self._targets[self._rows(indices)]

    def augment(self, inputs: Inputs, batch: int, start: int, seed: int) -> Inputs:
        """Return the inputs as they are."""
        return inputs


def _read(spec: DataSpec) -> _Content:
    """Read the columns of a table. Raises DataError."""
    table = _load(Path(spec.path or ""))
    known, targets = table.column_names, list(spec.targets or ())
    inputs = list(spec.inputs or (name for name in known if name not in targets))
    for field, names in (("inputs", inputs), ("targets", targets)):
        for name in names:
            if name not in known:
                raise DataError(f"data.{field}: {spec.path} has no column {name!r}{nearest(name, known)}")
    if not table.num_rows or not inputs:
        raise DataError(f"data.path: {spec.path} has no {'rows' if inputs else 'columns but the targets'}")
    problems: dict[int, str] = {}
    parts = [_input(name, table.column(name).combine_chunks(), problems, spec) for name in inputs]
    values = torch.cat([part for part, _ in parts], 1)
    scaled = torch.cat([torch.full((part.shape[1],), numbers) for part, numbers in parts])
    columns = {name: table.column(name).combine_chunks() for name in targets}
    found, classes = _targets(columns, problems, spec)
    text = columns[targets[0]] if classes and len(targets) == 1 else None
    labels = tuple(_words(text)[1]) if text is not None and _is_text(text) else ()
    return _Content(values, scaled, found, classes, labels if len(labels) == classes else (), problems)


def _load(path: Path) -> Any:
    """Read a file, or all files of a folder in the order of their names. Raises DataError."""
    require("pyarrow", "data: table")
    import pyarrow
    from pyarrow import csv, parquet

    files = sorted(file for file in path.iterdir() if file.suffix in _ENDINGS) if path.is_dir() else [path]
    if not files:
        raise DataError(f"data.path: there is no {' or '.join(_ENDINGS)} file in {path}")
    try:
        read = [parquet.read_table(file) if file.suffix == ".parquet" else csv.read_csv(file) for file in files]
        return pyarrow.concat_tables(read, promote_options="permissive")
    except Exception as error:  # pyarrow has many errors, most of them subclasses of ValueError
        if is_out_of_memory(error):
            raise
        raise DataError(f"data.path: {path} cannot be read as a table: {error}") from error


def _is_text(column: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(column.type) or types.is_large_string(column.type))


def _note_missing(name: str, column: Any, problems: dict[int, str]) -> None:
    """Note the rows in which a column has no value."""
    if column.null_count:
        missing = torch.from_numpy(column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)).nonzero()
        for row in missing.flatten().tolist():
            problems.setdefault(row, f"no value in the column {name!r}")


def _input(name: str, column: Any, problems: dict[int, str], spec: DataSpec) -> tuple[Tensor, bool]:
    """Return a column as `[rows, values]`, and whether it holds numbers; text has a value for each word."""
    _note_missing(name, column, problems)
    if _is_text(column):
        numbers, words = _words(column)
        return functional.one_hot(numbers, len(words)).float(), False
    return _numbers(name, column, problems, spec)[:, None], True


def _numbers(name: str, column: Any, problems: dict[int, str], spec: DataSpec) -> Tensor:
    """Return a column of numbers as float32; missing values are NaN. Raises DataError."""
    from pyarrow import types

    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)):
        raise DataError(f"data.path: {spec.path}: the column {name!r} holds {kind}; numbers and text can be used")
    values = torch.from_numpy(column.cast("float64").to_numpy(zero_copy_only=False).copy())
    for row in (~torch.isfinite(values)).nonzero().flatten().tolist():
        problems.setdefault(row, f"no finite number in the column {name!r}")
    return values.float()


def _words(column: Any) -> tuple[Tensor, Sequence[str]]:
    """Return the number of each row's word, among the sorted words; a missing one is 0."""
    words = sorted(word for word in column.unique().to_pylist() if word is not None)
    places = {word: place for place, word in enumerate(words)}
    return torch.tensor([places.get(word, 0) for word in column.to_pylist()]), words


def _targets(columns: dict[str, Any], problems: dict[int, str], spec: DataSpec) -> tuple[Tensor, int]:
    """Return what is learned: classes `[rows]` and their number, or numbers `[rows, columns]` and 0.

    A single column of text or of truth values has classes, and one of whole numbers if `data.classes` is given.
    """
    from pyarrow import types

    for name, column in columns.items():
        _note_missing(name, column, problems)
    (first, column), *others = columns.items()
    if not others and _is_text(column):
        numbers, words = _words(column)
        return numbers, max(2, len(words))
    if not others and types.is_boolean(column.type):
        return _numbers(first, column, problems, spec).nan_to_num().long(), 2
    if not others and spec.classes is not None and types.is_integer(column.type):
        classes = _numbers(first, column, problems, spec).nan_to_num().long()
        if int(classes.min()) < 0 or int(classes.max()) >= spec.classes:
            found = f"{int(classes.min())} to {int(classes.max())}"
            raise DataError(f"data.classes: {spec.classes}, but the column {first!r} has the classes {found}")
        return classes, spec.classes
    return torch.stack([_numbers(name, one, problems, spec) for name, one in columns.items()], 1), 0
