"""Reads tables: columns of CSV and Parquet files, which fit into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonml.data.columns import Column, Problems, as_input, as_target, check_precision, with_scale
from horizonml.data.dataset import Data, DataInfo, Split, TensorSpec
from horizonml.data.sampler import divide, hold_out, in_order
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, is_out_of_memory
from horizonml.machine.code import require
from horizonml.machine.host import memory_left
from horizonml.text import human_bytes, nearest

_ENDINGS = (".csv", ".parquet")


@dataclass(frozen=True)
class _Content:
    """Holds the columns of a table: inputs `[rows, values]`, targets, and what is wrong with either, by row.

    Numbers are float64, until they are scaled.
    """

    inputs: tuple[Tensor, ...]  # of each column, not scaled yet
    targets: Tensor | None  # None in a table for predictions, which need none
    input_columns: tuple[Column, ...]
    target_columns: tuple[Column, ...]
    input_problems: Problems
    target_problems: Problems
    known: bool = False  # whether the columns are those of an earlier table, and not learned from this one

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.inputs[0])

    @property
    def classes(self) -> int:
        """Return the number of classes that are learned; 0 for numbers."""
        how = self.target_columns[0]
        return max(2, len(how.words)) if how.words is not None else how.classes

    def encoding(self, rows: Tensor, scaled: bool) -> dict[str, object]:
        """Return how content becomes numbers, with a scale that is learned from the complete rows among these."""
        complete = [row for row in rows.tolist() if row not in self.input_problems and row not in self.target_problems]
        if scaled and not complete:
            problems = self.input_problems or self.target_problems
            row = min(problems)
            raise DataError(f"data.path: no row to train on is complete; row {row + 1} has {problems[row]}")
        used, columns = torch.tensor(complete, dtype=torch.int64), []
        for how, values in zip(self.input_columns, self.inputs, strict=True):
            if how.words is None and scaled:
                how = with_scale(how, values[used, 0])
            elif how.words is None:
                check_precision(how.name, values[used, 0], "inputs", "leave data.normalize at true")
            columns.append(how.to_json())
        if self.targets is not None and not self.classes:
            for how, values in zip(self.target_columns, self.targets[used].T, strict=True):
                check_precision(how.name, values, "targets", "subtract a number from the column, or learn differences")
        return {"inputs": columns, "targets": [how.to_json() for how in self.target_columns]}


_kept: dict[str, _Content] = {}  # what was read to be described, until it is loaded


def describe(spec: DataSpec, channels: int | None = None, encoding: Mapping[str, Any] | None = None) -> DataInfo | None:
    """Return a description of the table, or None if this machine does not have it.

    With the `encoding` of an earlier table, the columns are those of that table, and the targets may be missing. Raises
    DataError.
    """
    if not Path(spec.path or "").exists():
        return None
    content = _read(spec, encoding)
    _kept.clear()
    _kept[spec.model_dump_json()] = content
    train, held_out = divide(spec, content.rows, 0)
    if encoding is None:
        encoding = content.encoding(hold_out(content.rows, train, held_out)[0], spec.normalize)
    inputs = TensorSpec((sum(values.shape[1] for values in content.inputs),))
    found = DataInfo(train, held_out, (inputs,), encoding=encoding)
    if content.targets is None:
        return found
    target = TensorSpec((), torch.int64) if content.classes else TensorSpec(tuple(content.targets.shape[1:]))
    task = "classification" if content.classes else "regression"
    words = content.target_columns[0].words or ()
    labels = words if len(words) == content.classes else ()
    return replace(found, outputs=content.classes or content.targets.shape[1], target=target, task=task, labels=labels)


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool, targets: bool) -> Data:
    """Read the wanted parts of the table that `info` describes. Raises DataError."""
    content = _kept.pop(spec.model_dump_json(), None)
    if not inputs and not targets:
        nothing = TableSplit(torch.empty(0), torch.empty(0), {}, {}, torch.empty(0, dtype=torch.int64), spec)
        return Data(info, nothing, nothing)
    if content is None:
        if not Path(spec.path or "").exists():
            raise DataError(f"data.path: {spec.path} is not there, but this rank's stage reads it")
        content = replace(_read(spec, info.encoding), known=False)
    members = hold_out(content.rows, info.train, info.held_out)
    encoding = info.encoding or content.encoding(members[0], spec.normalize)  # an old checkpoint has none
    values = _scaled(content.inputs, encoding) if inputs else torch.empty(content.rows, 0)
    goals = content.targets if content.targets is None or content.classes else content.targets.float()
    problems = content.target_problems | content.input_problems
    own = content.input_problems if content.known else problems
    train, held_out, whole = (
        TableSplit(values, goals, own, problems, rows, spec, content.known) for rows in (*members, in_order(*members))
    )
    return Data(info, train, held_out, whole=whole)


def _scaled(values: Sequence[Tensor], encoding: Mapping[str, Any]) -> Tensor:
    """Return the inputs as float32, with each column of numbers scaled as all ranks have agreed."""
    ways = map(Column.from_json, encoding["inputs"])
    return torch.cat([how.scaled(column) for how, column in zip(ways, values, strict=True)], 1)


class TableSplit(Split):
    """Provides rows of a table by index, counted from 0 within the split."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor | None,
        input_problems: Problems,
        problems: Problems,
        members: Tensor,
        spec: DataSpec,
        known: bool = False,
    ) -> None:
        """Prepare the split; `members` are its rows, and `input_problems` what keeps their inputs from being used.

        `known` says whether the model has been trained before, on another table.
        """
        self._inputs, self._targets, self._members = inputs, targets, members
        self._input_problems, self._problems, self._spec = input_problems, problems, spec
        self._advice = "complete it, or remove it" + ("" if known else ", or set data.corrupt: skip")

    def _rows(self, indices: Tensor, problems: Problems) -> Tensor:
        rows = self._members[indices]
        if problems:
            for row in rows.tolist():
                if row in problems:
                    raise DataError(f"data.path: {self._spec.path}: row {row + 1} has {problems[row]}; {self._advice}")
        return rows

    def inputs(self, indices: Tensor) -> Tensor:
        """Return the columns that the model gets. Raises DataError for a row that cannot be used."""
        return self._inputs[self._rows(indices, self._input_problems)]

    def targets(self, indices: Tensor) -> Tensor:
        """Return the columns that are learned. Raises DataError for a row that cannot be used."""
        if self._targets is None:
            names = ", ".join(map(repr, self._spec.targets or ()))
            raise DataError(f"data.targets: {self._spec.path} has not {names}, so it can be used for predictions only")
        return self._targets[self._rows(indices, self._problems)]


def _read(spec: DataSpec, encoding: Mapping[str, Any] | None) -> _Content:
    """Read the columns of a table; those of an encoding if there is one. Raises DataError."""
    wanted = {name: _wanted(spec, name, encoding) for name in ("inputs", "targets")}
    texts = [how.name for part in wanted.values() for how in part if isinstance(how, Column) and how.words is not None]
    table = _load(Path(spec.path or ""), texts)
    known, place = table.column_names, str(spec.path)
    targets = wanted["targets"]
    inputs = wanted["inputs"] or [name for name in known if name not in targets]
    absent = encoding is not None and not any(_name(how) in known for how in targets)
    for field, columns in (("inputs", inputs), ("targets", () if absent else targets)):
        for name in map(_name, columns):
            if name not in known:
                why = ", on which the model was trained" if encoding is not None else ""
                raise DataError(f"data.{field}: {place} has no column {name!r}{why}{nearest(name, known)}")
    if not table.num_rows or not inputs:
        raise DataError(f"data.path: {place} has no {'rows' if inputs else 'columns but the targets'}")
    input_problems: Problems = {}
    target_problems: Problems = {}
    parts = [as_input(how, table.column(_name(how)).combine_chunks(), input_problems, place) for how in inputs]
    values = tuple(part for part, _ in parts)
    ways = tuple(how for _, how in parts)
    if absent:
        found = tuple(how for how in targets if isinstance(how, Column))
        return _Content(values, None, ways, found, input_problems, {}, True)
    given = (len(targets) == 1, spec.classes, target_problems, place)
    learned = [as_target(how, table.column(_name(how)).combine_chunks(), *given) for how in targets]
    has_classes = len(learned) == 1 and learned[0][0].dtype == torch.int64
    goals = learned[0][0] if has_classes else torch.stack([values for values, _ in learned], 1)
    return _Content(
        values, goals, ways, tuple(how for _, how in learned), input_problems, target_problems, encoding is not None
    )


def _wanted(spec: DataSpec, field: str, encoding: Mapping[str, Any] | None) -> Sequence[Column | str]:
    """Return the columns to read: those of the encoding, or the names that the job gives. Raises DataError."""
    named = list((spec.inputs if field == "inputs" else spec.targets) or ())
    if encoding is None:
        return named
    columns = [Column.from_json(value) for value in encoding[field]]
    names = [column.name for column in columns]
    if named and sorted(named) != sorted(names):
        raise DataError(
            f"data.{field}: {', '.join(named)}, but the model was trained on the columns {', '.join(names)}; "
            f"name these, or leave data.{field} out"
        )
    return columns


def _name(how: Column | str) -> str:
    return how.name if isinstance(how, Column) else how


def _check_room(file: Path) -> None:
    """Raise DataError for what is not a file, or what takes more memory than is left; Parquet says how much that is."""
    from pyarrow import ArrowException, parquet

    if not file.is_file():
        raise DataError(f"data.path: {file} is not a regular file; name a table")
    size = file.stat().st_size
    if file.suffix == ".parquet":
        try:
            about = parquet.read_metadata(file)
            groups = (about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            size = max(sum(groups), about.num_rows * about.num_columns)
        except (ArrowException, OSError, ValueError, OverflowError) as error:
            raise DataError(f"data.path: {file} cannot be read as a table: {error}") from error
    if size > memory_left():
        raise DataError(
            f"data.path: {file} takes {human_bytes(size)}, and {human_bytes(memory_left())} of memory are left; take "
            "a part of it, or write it as the shards of a stream"
        )


def _load(path: Path, texts: Sequence[str]) -> Any:
    """Read a file, or all files of a folder in the order of their names; `texts` hold text, whatever it looks like.

    Raises DataError.
    """
    require("pyarrow", "data: table")
    import pyarrow
    from pyarrow import csv, parquet

    files = sorted(file for file in path.iterdir() if file.suffix in _ENDINGS) if path.is_dir() else [path]
    if not files:
        raise DataError(f"data.path: there is no {' or '.join(_ENDINGS)} file in {path}")
    for file in files:
        _check_room(file)
    options = csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
    try:
        read = [
            parquet.read_table(file) if file.suffix == ".parquet" else csv.read_csv(file, convert_options=options)
            for file in files
        ]
        return pyarrow.concat_tables(read, promote_options="permissive")
    except Exception as error:  # pyarrow has many errors, most of them subclasses of ValueError
        if is_out_of_memory(error):
            raise
        raise DataError(f"data.path: {path} cannot be read as a table: {error}") from error
