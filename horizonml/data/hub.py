"""Reads columns of Hugging Face data sets: folders written by `save_to_disk`, or local folders of data files.

A data set may come from another device, so nothing in it may name a file elsewhere: its lists of files are checked, the
library is told which data files to read instead of what a README or a table of metadata says, and pictures are opened
here, where their paths are known to lie within the folder.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonml.data.columns import check_precision
from horizonml.data.dataset import Data, DataInfo
from horizonml.data.files import PHOTO_SIZE, photo_of, read_picture
from horizonml.data.own import Opened, describe_opened, load_opened
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError
from horizonml.files import inside
from horizonml.machine.code import require
from horizonml.text import nearest

_WIDE = ("int32", "int64", "uint32", "uint64", "float64")  # dtypes of columns that float32 may not hold exactly
_CHECKED = 1000  # rows at the beginning, in which such a column is looked at
_HELD_OUT = ("test", "validation", "valid", "val")
_PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
# What reads files of an ending, and with which options: no builder that runs code, or follows what a file names.
_READERS: dict[str, tuple[str, dict[str, object]]] = {
    ".arrow": ("arrow", {}),
    ".csv": ("csv", {}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    **dict.fromkeys(_PICTURES, ("imagefolder", {"drop_metadata": True})),
}
_MOST_JSON = 64 << 20  # bytes


def describe(spec: DataSpec, channels: int | None = None, encoding: Mapping[str, Any] | None = None) -> DataInfo | None:
    """Return a description of the columns, or None if this machine lacks the data set. Raises DataError."""
    return describe_opened(spec, partial(open_hub, encoding=encoding))


def load(spec: DataSpec, info: DataInfo, cache: Path, inputs: bool, targets: bool) -> Data:
    """Open the data set that `info` describes. Raises DataError."""
    return load_opened(spec, info, partial(open_hub, encoding=info.encoding), inputs, targets)


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
    try:
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            _check_saved(path)
            return datasets.load_from_disk(str(path))
        (reader, options), files = _data_files(path)
        return datasets.load_dataset(reader, data_files=files, **options)
    except (FileNotFoundError, DataError):
        raise
    except Exception as error:  # the library fails on damaged files in any way
        raise DataError(f"data.path: {path} cannot be read as a Hugging Face data set: {error}") from error


def _check_saved(folder: Path) -> None:
    """Raise ValueError if what `save_to_disk` has written names files outside of the folder."""
    if (folder / "dataset_dict.json").is_file():
        for split in _json(folder / "dataset_dict.json")["splits"]:
            _check_saved(inside(folder, split))
        return
    for entry in _json(folder / "state.json")["_data_files"]:
        inside(folder, entry["filename"])
    for name in ("state.json", "dataset_info.json"):
        inside(folder, name)


def _json(path: Path) -> Any:
    """Return the content of a JSON file. Raises ValueError if it is too large, or lies in another folder."""
    with inside(path.parent, path.name).open("rb") as file:
        content = file.read(_MOST_JSON + 1)
    if len(content) > _MOST_JSON:
        raise ValueError(f"{path} is too large")
    return json.loads(content)


def _data_files(path: Path) -> tuple[tuple[str, dict[str, object]], dict[str, list[str]]]:
    """Return what reads the data files at a path, with its options, and these files by split. Raises DataError."""
    from datasets.data_files import DataFilesDict, get_data_patterns, sanitize_patterns

    root = path.resolve()
    if root.is_file():
        found: Mapping[str, Sequence[str]] = {"train": [str(root)]}
    else:
        found = DataFilesDict.from_patterns(sanitize_patterns(get_data_patterns(str(root))), str(root))
    files = {split: [name for name in map(str, names) if _is_plain(Path(name), root)] for split, names in found.items()}
    endings = Counter(Path(name).suffix.lower() for names in files.values() for name in names)
    readers = Counter({ending: number for ending, number in endings.items() if ending in _READERS})
    if not readers:
        known = ", ".join(_READERS)
        raise DataError(f"data.path: {path} has no data files that can be read, whose names end in {known}")
    reader = _READERS[readers.most_common(1)[0][0]]
    chosen = {
        split: [one for one in names if _READERS.get(Path(one).suffix.lower()) == reader]
        for split, names in files.items()
    }
    return reader, {split: names for split, names in chosen.items() if names}


def _is_plain(file: Path, root: Path) -> bool:
    """Return whether a file lies within a folder, with links followed, under a name that no library understands."""
    return file.resolve().is_relative_to(root) and "::" not in str(file) and "://" not in str(file)


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
        rows = rows.select_columns(list(dict.fromkeys((*self._inputs, *self._targets)))).with_format(None)
        self._spec, self._root = spec, Path(spec.path or "").resolve()
        for name in rows.column_names:
            if type(rows.features[name]).__name__ == "Image":
                rows = rows.cast_column(name, type(rows.features[name])(decode=False))
            elif (kind := _unread(rows.features[name])) is not None:
                raise DataError(
                    f"data.path: {spec.path}: the column {name!r} is {kind}, which is not read; leave it out"
                )
        self._features, self._rows = rows.features, rows
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

    def __getitem__(self, index: int) -> dict[str, object]:
        row = self._rows[index]
        return {"inputs": self._join(row, self._inputs, True), "targets": self._join(row, self._targets, False)}

    def input(self, index: int) -> Any:
        """Return what the model gets of a row, without decoding the rest."""
        return self._join(self._parts["input"][index], self._inputs, True)

    def target(self, index: int) -> Any:
        """Return what is learned of a row, without decoding the rest."""
        return self._join(self._parts["target"][index], self._targets, False)

    def _join(self, row: dict[str, object], names: Sequence[str], inputs: bool) -> Any:
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
        if type(self._features[name]).__name__ == "Image":
            return self._photo(name, value)
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

    def _photo(self, name: str, value: Mapping[str, Any]) -> Tensor:
        """Return a picture, which is in the data set itself or in a file of its folder. Raises DataError."""
        size, channels = self._spec.image_size or PHOTO_SIZE, self._spec.channels or 3
        content, path = value.get("bytes"), value.get("path")
        if content is not None:
            file: Any = io.BytesIO(content)
        else:
            file = (self._root / str(path)).resolve()
            if not path or not _is_plain(file, self._root) or not file.is_file():
                raise DataError(
                    f"the column {name!r} names {str(path)[:200]!a}, which is no file in the folder of the data"
                )
        return read_picture(file, lambda image: photo_of(image, size, channels))


def _unread(feature: Any) -> str | None:
    """Return the kind of a feature that the library would read from files, or nothing if it holds values only."""
    kind = type(feature).__name__
    if kind in ("Value", "ClassLabel", "Array2D", "Array3D", "Array4D", "Array5D"):
        return None
    if kind in ("List", "LargeList", "Sequence"):
        return _unread(feature.feature)
    if isinstance(feature, list | dict):
        parts = feature.values() if isinstance(feature, dict) else feature
        return next((found for found in map(_unread, parts) if found is not None), None)
    return kind
