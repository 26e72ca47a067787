"""Reads files that people write, within bounds of size, time, depth and aliases, with errors that name the place.

Job files, files of devices, plans and profiles come from elsewhere as often as not. Whatever they contain, reading them
ends soon, with their values or with a JobError.
"""

from __future__ import annotations

import os
import re
import select
import stat
import time
from pathlib import Path
from typing import Any

import yaml

from horizonml.errors import JobError
from horizonml.text import human_bytes

_MOST_BYTES = 4 << 20
_MOST_VALUES = 100_000  # in a file, with every alias counted as what it stands for
_MOST_DEEP = 40  # levels of nesting
_BITS = 64  # of whole numbers
_SECONDS = 10.0  # until a pipe must have delivered everything


def read_yaml(path: Path, hint: str, text_keys: bool = True) -> Any:
    """Return the content of a YAML file; `hint` tells where to get a right one. Raises JobError."""
    return parse_yaml(read_text(path, hint), str(path), text_keys)


def read_text(path: Path, hint: str) -> str:
    """Return the content of a text file, or of a pipe that the shell passes as `<(COMMAND)`. Raises JobError.

    Other pipes and devices are refused, because reading them may wait for ever.
    """
    try:
        content = _read(path)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror or error}; {hint}") from None
    except ValueError as error:  # a name that no file can have
        raise JobError(f"{str(path)!r}: {error}; {hint}") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: not a text file ({error.reason} at byte {error.start}); {hint}") from None


def _read(path: Path) -> bytes:
    """Return the content of a file or a passed pipe. Raises OSError, which says what is wrong with it."""
    kind = path.stat().st_mode
    if stat.S_ISDIR(kind):
        raise OSError("is a folder, not a file")
    passed = stat.S_ISFIFO(kind) and path.parent in (Path("/dev/fd"), Path("/proc/self/fd"), Path("/dev"))
    if not stat.S_ISREG(kind) and not passed:
        raise OSError(f"is {'a pipe' if stat.S_ISFIFO(kind) else 'a device'}, not a regular file")
    deadline = time.monotonic() + _SECONDS
    content = bytearray()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()  # `select` takes no descriptor beyond 1023
    poll.register(descriptor, select.POLLIN)
    try:
        while len(content) <= _MOST_BYTES:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise OSError(f"delivered no end within {_SECONDS:.0f} s")
            try:
                part = os.read(descriptor, 1 << 16)
            except BlockingIOError:  # another reader was faster
                continue
            if not part:
                return bytes(content)
            content += part
    finally:
        os.close(descriptor)
    raise OSError(f"is larger than {human_bytes(_MOST_BYTES)}")


class _Loader(yaml.SafeLoader):
    """Loads safe YAML of JSON's types, without duplicate keys, cycles and heaps of aliases.

    Unlike YAML 1.1, it reads 1e-3 as a number, and a date or 1:30 as a string.
    """

    text_keys = True
    values = levels = 0  # that have been read, and within which the next one is

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read a value; a file of too many is refused before the rest of it takes time and memory."""
        self.values += 1
        self.levels += 1
        _check_extent(self.values, self.levels, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number; what has `!!int` or `!!float` before it may be anything."""
        if ":" in str(node.value):
            raise yaml.constructor.ConstructorError(None, None, "not a number", node.start_mark)
        found: int | float
        whole = node.tag.endswith(":int")
        found = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if whole and int(found).bit_length() > _BITS:
            raise yaml.constructor.ConstructorError(None, None, f"not a number of {_BITS} bits", node.start_mark)
        return found

    def get_single_data(self) -> Any:
        node = self.get_single_node()
        if node is None:
            return None
        _extent(node, {})
        return self.construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag.endswith(":merge"):  # <<: *alias
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str if self.text_keys else str | int):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
}
for _kind in ("int", "float"):
    _Loader.yaml_constructors[f"tag:yaml.org,2002:{_kind}"] = _Loader.construct_number
# YAML 1.1's numbers to the base of 60 are left out, because reading a long one takes hours.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$", re.ASCII),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^([-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.[\d_]+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))|\.(nan|NaN|NAN))$",
        re.ASCII,
    ),
    list("-+0123456789."),
)


class _LoaderOfTables(_Loader):
    """Loads the same from files whose keys may be numbers."""

    text_keys = False


def _extent(node: yaml.Node, known: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values, and levels of them, a node stands for with its aliases written out.

    Raises MarkedYAMLError if these are too many.
    """
    if node not in known:
        known[node] = (_MOST_VALUES, 0)  # as long as it is being counted: an alias of itself never ends
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        extents = [_extent(part, known) for part in inner]
        known[node] = (
            1 + sum(values for values, _ in extents),
            1 + max((levels for _, levels in extents), default=0),
        )
    _check_extent(*known[node], node.start_mark)
    return known[node]


def _check_extent(values: int, levels: int, mark: yaml.Mark) -> None:
    """Raise MarkedYAMLError if these are too many."""
    if values > _MOST_VALUES or levels > _MOST_DEEP:
        problem = (
            f"more than {_MOST_VALUES:,} values once aliases are written out"
            if values > _MOST_VALUES
            else f"more than {_MOST_DEEP} levels deep"
        )
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def parse_yaml(text: str, source: str, text_keys: bool = True) -> Any:
    """Return what YAML says; keys may be numbers unless `text_keys`. Raises JobError, which names the `source`."""
    try:
        return yaml.load(text, _Loader if text_keys else _LoaderOfTables)  # noqa: S506  (subclasses of SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise JobError(f"{where}: {error.problem or 'not YAML'}") from None
    except RecursionError:
        raise JobError(f"{source}: more than {_MOST_DEEP} levels deep") from None
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError) as error:  # such as !!int x, or the character NUL
        raise JobError(f"{source}: not YAML: {error}") from None
