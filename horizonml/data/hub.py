"""Reads columns of Hugging Face data sets: folders written by `save_to_disk`, or local folders of data files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonml.data.columns import check_precision
from horizonml.data.own import Opened
from horizonml.data.pictures import PHOTO_SIZE, photo_of
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError
from horizonml.machine.extras import require
from horizonml.text import nearest

_WIDE = ("int32", "int64", "uint32", "uint64", "float64")  # dtypes of columns that float32 may not hold exactly
_CHECKED = 1000  # rows at the beginning, in which such a column is looked at
_HELD_OUT = ("test", "validation", "valid", "val")


def open_hub(spec: DataSpec, encoding: Mapping[str, Any] | None = None) -> Opened:
    """Open the data set of a job; with an `encoding`, words have the numbers that they had in an earlier data set.

    Raises DataError, or FileNotFoundError if this machine does not have it.
    """
    require("datasets", "data: huggingface")
    path = Path(spec.path or "")
    if not path.exists():
        raise FileNotFoundError(str(path))
    found = _read(path)
    parts = found if isinstance(found, dict) else {"train": found}
    train = parts.get("train", next(iter(parts.values())) if len(parts) == 1 else None)
    if train is None:
        raise DataError(f"data.path: {path} has the splits {', '.join(parts)}, and none is called 'train'")
    held_out = next((parts[name] for name in _HELD_OUT if name in parts), None)
    columns = Columns(train, spec, (encoding or {}).get("words", {}))
    other = Columns(held_out, spec, columns.words) if held_out is not None else None
    return Opened(columns, other, f"data.path: {path}", {"words": columns.words} if columns.words else None)


def _read(path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        return datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except FileNotFoundError:
        raise
    except Exception as error:  # the library fails on damaged files in any way
        raise DataError(f"data.path: {path} cannot be read as a Hugging Face data set: {error}") from error


class Columns:
    """Provides the rows of a table of features as samples."""

    def __init__(self, rows: Any, spec: DataSpec, words: Mapping[str, Sequence[str]]) -> None:
        """Choose the columns; `words` are the values of those of text, if another part has them. Raises DataError."""
        known = list(rows.column_names)
        self._targets = list(spec.targets or ())
        self._inputs = list(spec.inputs or (name for name in known if name not in self._targets))
        for field, names in (("inputs", self._inputs), ("targets", self._targets)):
            for name in names:
                if name not in known:
                    raise DataError(f"data.{field}: {spec.path} has no column {name!r}{nearest(name, known)}")
        self._features, self._spec = rows.features, spec
        self._rows = rows.with_format(None)
        self._parts = {
            name: self._rows.select_columns(columns)
            for name, columns in (("input", self._inputs), ("target", self._targets))
        }
        texts = [name for name in self._targets if getattr(self._features[name], "dtype", "") == "string"]
        found = words or {name: sorted(word for word in rows.unique(name) if word is not None) for name in texts}
        self.words = {name: list(some) for name, some in found.items()}
        self._numbers = {name: {word: place for place, word in enumerate(found)} for name, found in self.words.items()}
        numbers = self._inputs if spec.classes is not None else [*self._inputs, *self._targets]
        for name in numbers:
            if getattr(self._features[name], "dtype", "") in _WIDE and not hasattr(self._features[name], "names"):
                some = [number for number in self._rows[:_CHECKED][name] if number is not None]
                advice = "subtract a number from the column before the data set is saved"
                field = "inputs" if name in self._inputs else "targets"
                check_precision(name, torch.tensor(some, dtype=torch.float64), field, advice)

    @property
    def classes(self) -> Sequence[str] | None:
        """Return the names of the classes, if there is one target column and it has classes."""
        if len(self._targets) != 1:
            return None
        name = self._targets[0]
        names: Sequence[str] | None = getattr(self._features[name], "names", None)
        return names or self.words.get(name)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        return {"inputs": self._join(row, self._inputs, True), "targets": self._join(row, self._targets, False)}

    def input(self, index: int) -> Any:
        """Return what the model gets of a row, without decoding the rest."""
        return self._join(self._parts["input"][index], self._inputs, True)

    def target(self, index: int) -> Any:
        """Return what is learned of a row, without decoding the rest."""
        return self._join(self._parts["target"][index], self._targets, False)

    def _join(self, row: dict[str, Any], names: Sequence[str], inputs: bool) -> Any:
        """Return the only column, numbers as one vector, or several columns by name."""
        values = {name: self._value(name, row[name], inputs) for name in names}
        if len(values) == 1:
            value = next(iter(values.values()))
            return value[None] if inputs and not value.shape else value
        if all(not value.shape for value in values.values()):
            return torch.stack([value.float() for value in values.values()])
        return values

    def _value(self, name: str, value: Any, inputs: bool) -> Tensor:
        """Return a column's value as a tensor. Raises DataError."""
        if value is None:
            raise DataError(f"the column {name!r} has no value")
        if hasattr(value, "getbands"):
            return photo_of(value, self._spec.image_size or PHOTO_SIZE, self._spec.channels or 3)
        if isinstance(value, str):
            if name not in self._numbers or value not in self._numbers[name]:
                reason = "is text" if name not in self._numbers else f"has {value!r}, which the training part has not"
                raise DataError(f"the column {name!r} {reason}")
            return torch.tensor(self._numbers[name][value])
        tensor = torch.tensor(value)
        is_class = hasattr(self._features[name], "names") or (not inputs and self._spec.classes is not None)
        if tensor.dtype == torch.float64 or (not tensor.shape and not is_class):
            return tensor.float()
        return tensor
