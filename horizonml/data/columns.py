"""Turns columns of a table into tensors, and remembers how, so that other tables are turned in the same way."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from horizonml.errors import DataError

_log = logging.getLogger(__name__)
_SHOWN = 5  # words of a column that an error lists
_MANY = 10  # words of a column, from which on it is worth a look whether most of them are numbers
_MOST_ROUNDED = 0.01  # of a column's standard deviation, by which 32-bit numbers may differ from what the table has


@dataclass(frozen=True)
class Column:
    """Says how a column becomes numbers.

    A column with `words` is text, of which each word has a number; one with `classes` holds whole numbers below that.
    Any other holds numbers, which are scaled by `mean` and `deviation` if these are known.
    """

    name: str
    words: tuple[str, ...] | None = None
    classes: int = 0
    mean: float | None = None
    deviation: float | None = None

    def to_json(self) -> dict[str, object]:
        """Return what differs from a plain column of numbers as a JSON object."""
        found: dict[str, object] = {"column": self.name}
        if self.words is not None:
            found["words"] = list(self.words)
        if self.classes:
            found["classes"] = self.classes
        if self.mean is not None:
            found |= {"mean": self.mean, "deviation": self.deviation}
        return found

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Column:
        """Return the column from which `to_json` made `value`."""
        words = value.get("words")
        return cls(
            str(value["column"]),
            None if words is None else tuple(map(str, words)),
            int(value.get("classes", 0)),
            *(None if value.get(key) is None else float(value[key]) for key in ("mean", "deviation")),
        )

    def scaled(self, values: Tensor) -> Tensor:
        """Return float32 numbers, scaled before they are rounded to that if the scale is known."""
        if self.mean is None or self.deviation is None:
            return values.float()
        return ((values.double() - self.mean) / self.deviation).float()


Problems = dict[int, str]  # what is wrong with rows, by row


def as_input(known: Column | str, column: Any, problems: Problems, place: str) -> tuple[Tensor, Column]:
    """Return a column of inputs as `[rows, values]` that are not scaled yet; text has a value for each word.

    Numbers are float64, since they may be large and differ by little. `known` is the column's name, or how it was
    turned into numbers before. Raises DataError.
    """
    how = known if isinstance(known, Column) else Column(known, _words(column) if _is_text(column) else None)
    if how.words is not None and how is not known:
        _warn_of_numbers(how, column, place)
    if how.words is not None:
        return functional.one_hot(_places(how, column, problems, place), max(1, len(how.words))).float(), how
    return _numbers(how.name, column, problems, place)[:, None], how


def as_target(
    known: Column | str, column: Any, alone: bool, classes: int | None, problems: Problems, place: str
) -> tuple[Tensor, Column]:
    """Return a column of targets: classes, int64 `[rows]`, or numbers, float64 `[rows]`; and how it became them.

    A column that is `alone` has classes if it holds text or truth values, or whole numbers if `classes` is given.
    Raises DataError.
    """
    from pyarrow import types

    if isinstance(known, Column):
        how = known
    elif alone and _is_text(column):
        how = Column(known, _words(column))
    elif alone and types.is_boolean(column.type):
        how = Column(known, classes=2)
    else:
        how = Column(known, classes=(classes or 0) if alone and types.is_integer(column.type) else 0)
    if how.words is not None:
        return _places(how, column, problems, place), how
    values = _numbers(how.name, column, problems, place)
    if not how.classes:
        return values, how
    numbers = values.nan_to_num().long()
    least, most, are_whole = int(numbers.min()), int(numbers.max()), torch.equal(numbers.double(), values.nan_to_num())
    if least < 0 or most >= how.classes or not are_whole:
        what = f"the classes {least} to {most}" if are_whole else "fractions"
        raise DataError(f"data.classes: {how.classes}, but the column {how.name!r} has {what}")
    return numbers, how


def with_scale(how: Column, values: Tensor) -> Column:
    """Return how to scale a column by the mean and the standard deviation of some of its numbers `[rows]`.

    All ranks must find the same scale, whatever their processors, so the numbers are added in a fixed order.
    """
    numbers = values.double()
    mean = _sum(numbers) / len(numbers)
    deviation = (_sum((numbers - mean).square()) / len(numbers)).sqrt()
    return replace(how, mean=float(mean), deviation=float(deviation) if deviation > 0 else 1.0)


def check_precision(name: str, values: Tensor, field: str, advice: str) -> None:
    """Raise DataError for a column whose numbers vary by less than float32, in which networks compute, tells apart."""
    numbers = values.double()
    rounded = float((numbers.float().double() - numbers).abs().max()) if len(numbers) else 0.0
    deviation = float(numbers.std(unbiased=False)) if rounded else 0.0
    if math.isinf(rounded) or rounded > _MOST_ROUNDED * deviation > 0:
        raise DataError(
            f"data.{field}: the column {name!r} holds numbers such as {float(numbers[0]):.15g}, whose standard "
            f"deviation is {deviation:.3g}, and 32-bit numbers, in which networks compute, are wrong there by up to "
            f"{rounded:.3g}; {advice}"
        )


def _sum(values: Tensor) -> Tensor:
    """Return the sum of the values, added in pairs: an order that does not depend on the machine, as `sum`'s does."""
    while len(values) > 1:
        half = len(values) // 2
        values = torch.cat([values[:half] + values[half : 2 * half], values[2 * half :]])
    return values[0]


def _is_text(column: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(column.type) or types.is_large_string(column.type))


def _words(column: Any) -> tuple[str, ...]:
    """Return the different words of a column; a cell that is empty, or holds nothing but spaces, has none."""
    return tuple(sorted(word for word in column.unique().to_pylist() if word is not None and word.strip()))


def _warn_of_numbers(how: Column, column: Any, place: str) -> None:
    """Warn of a column that was probably meant to hold numbers, and is text because of a few of its cells."""
    words = how.words or ()
    others = {word for word in words if not _is_number(word)}
    if len(words) > _MANY and others and len(others) * _MANY <= len(words):
        row = next(row for row, word in enumerate(column.to_pylist()) if word in others)
        _log.warning(
            "%s: the column %r is text, because row %d of it holds %r: each of its %d different cells becomes a "
            "category. If it is to hold numbers, correct that cell, or leave it empty",
            place,
            how.name,
            row + 1,
            column[row].as_py(),
            len(words),
        )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _places(how: Column, column: Any, problems: Problems, place: str) -> Tensor:
    """Return the number of each row's word; rows without one that is known are noted, and have 0. Raises DataError."""
    if not _is_text(column):
        try:
            column = column.cast("string")
        except Exception as error:  # pyarrow's errors have no common base
            raise DataError(f"data.path: {place}: the column {how.name!r} holds {column.type}, and not text") from error
    words = how.words or ()
    numbers = {word: number for number, word in enumerate(words)}
    found = column.to_pylist()
    for row, word in enumerate(found):
        if word is None or (not word.strip() and word not in numbers):
            problems.setdefault(row, f"no value in the column {how.name!r}")
        elif word not in numbers:
            known = ", ".join(words[:_SHOWN]) + (", ..." if len(words) > _SHOWN else "")
            problems.setdefault(
                row,
                f"{word!r} in the column {how.name!r}, which the training had not (it had {known})",
            )
    return torch.tensor([numbers.get(word, 0) for word in found])


def _numbers(name: str, column: Any, problems: Problems, place: str) -> Tensor:
    """Return a column of numbers as float64; missing values are NaN. Raises DataError."""
    from pyarrow import types

    kind = column.type
    if _is_text(column):
        raise DataError(
            f"data.path: {place}: the column {name!r} holds text, such as {column[0].as_py()!r}, where numbers are "
            "needed"
        )
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)):
        raise DataError(f"data.path: {place}: the column {name!r} holds {kind}; numbers and text can be used")
    if column.null_count:
        missing = torch.from_numpy(column.is_null(nan_is_null=True).to_numpy(zero_copy_only=False))
        for row in missing.nonzero().flatten().tolist():
            problems.setdefault(row, f"no value in the column {name!r}")
    values = torch.from_numpy(column.cast("float64", safe=False).to_numpy(zero_copy_only=False).copy())
    for row in (~torch.isfinite(values)).nonzero().flatten().tolist():
        problems.setdefault(row, f"no finite number in the column {name!r}")
    return values
