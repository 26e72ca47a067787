"""Reads what other ranks have sent: values of the kind that is expected, within bounds, or an error.

A rank that has the token may spoil a training, but what it sends must neither crash the others with a traceback nor
make them take memory. Each function here returns the value that it is given, or raises ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from horizonml.text import shown

T = TypeVar("T")
Reader = Callable[[Any], T]

MOST_WHOLE = (1 << 62) - 1
_MOST_TEXT = 1 << 16  # characters of an error or a name


def anything(value: Any) -> Any:
    """Return a value that is checked elsewhere, or only compared."""
    return value


def boolean(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} is neither true nor false")
    return value


def whole(low: int = 0, high: int = MOST_WHOLE) -> Reader[int]:
    """Return a reader of whole numbers from `low` to `high`."""

    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:  # True would be an int, too
            raise ValueError(f"{shown(value)} is not a whole number from {low} to {high}")
        return value

    return read


def number(value: Any) -> float:
    """Return a number, which may be infinite; not-a-number is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{shown(value)} is not a number")
    return float(value)


def measure(value: Any) -> float:
    """Return a number that is only recorded or shown, and may be not-a-number."""
    return value if isinstance(value, float) else number(value)


def text(value: Any) -> str:
    """Return a text of bounded length."""
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError(f"{shown(value)} is not a text of at most {_MOST_TEXT} characters")
    return value


def optional(reader: Reader[T]) -> Reader[T | None]:
    """Return a reader of what `reader` reads, or of null."""
    return lambda value: None if value is None else reader(value)


def items(reader: Reader[T]) -> Reader[list[T]]:
    """Return a reader of lists of what `reader` reads."""

    def read(value: Any) -> list[T]:
        if not isinstance(value, list):
            raise ValueError(f"{shown(value)} is not a list")
        return [reader(one) for one in value]

    return read


def fields(*readers: Reader[Any]) -> Reader[list[Any]]:
    """Return a reader of lists of as many values as there are readers, one for each."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(readers):
            raise ValueError(f"{shown(value)} is not a list of {len(readers)} values")
        return [reader(one) for reader, one in zip(readers, value, strict=True)]

    return read


def mapping(reader: Reader[T]) -> Reader[dict[str, T]]:
    """Return a reader of objects whose values are what `reader` reads."""

    def read(value: Any) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError(f"{shown(value)} is not an object")
        return {str(key): reader(one) for key, one in value.items()}

    return read


class AsJson:
    """Marks a field of a dataclass that is told to other ranks, whose class has `to_json` and `from_json`."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(lambda value: value.to_json())
        return core_schema.no_info_plain_validator_function(self._kind.from_json, serialization=write)


_adapters: dict[type, TypeAdapter[Any]] = {}  # which take a moment to make


def adapter(kind: type) -> TypeAdapter[Any]:
    """Return what turns a dataclass, by the types of its fields, into JSON values and back."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def plain(value: Any) -> Any:
    """Return a dataclass as JSON values."""
    return adapter(type(value)).dump_python(value, mode="json")


def instance(kind: type[T]) -> Reader[T]:
    """Return a reader of what `plain` returns for a dataclass, which refuses values that its fields cannot have."""

    def read(value: Any) -> T:
        try:
            found: T = adapter(kind).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc'])) or shown(value)}: {first['msg']}") from None
        return found

    return read
