"""The base of every part of a job file, the errors about it, and the reading of files that people write.

A spec stands in the file `spec.py` beside what it configures and imports nothing of its room, so that a job can be
read, checked and documented without PyTorch. What pydantic finds wrong is put into sentences that name the field, the
value and the fix. Durations are read as people write them: 30s, 10m, 1h30m.

Job files, files of devices, plans and profiles come from elsewhere as often as not. Whatever they contain, reading them
ends soon, with their values or with a JobError.
"""

from __future__ import annotations

import os
import re
import select
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from horizonml.errors import JobError
from horizonml.text import human_bytes, nearest


class Spec(BaseModel):
    """A section of the job file: strict about types and unknown keys, and immutable once it is read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Rule:
    """A field's rule in words, which its error message states when a text does not match the field's pattern."""

    text: str
    always: bool = False  # whether the message states it for values of another type, too


@dataclass(frozen=True)
class Code:
    """Marks a field whose text may be `module:callable`, which is imported and run.

    Whoever adds a field that leads to code marks it with this, so that a job that came from elsewhere is not run
    without the user's consent (`horizonml.job.jobfile`).
    """

    libraries: tuple[str, ...] = ()  # what may stand before the colon without being a module of the user's own

    def named_by(self, text: str) -> bool:
        """Return whether a value of the field names code."""
        module, colon, _ = text.partition(":")
        return bool(colon) and module not in self.libraries


PlainName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    Rule("must begin with a letter or digit and contain only letters, digits, '.', '_' and '-'"),
]
"""A name that may become a folder, a label or a part of an address."""

_URL = re.compile(
    r"(?P<scheme>[a-z0-9]+)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(?P<rest>[/?][^\\]*)?"
)
_CONFIGURATION = re.compile(r"[\w .,+*|()=%-]{0,200}")
_FREE = ("id2label", "label2id")  # options of transformers that only name classes


def is_place_elsewhere(text: str) -> bool:
    """Return whether the text of a path has the form of a URL, or of several that a library would chain."""
    return "://" in text or "::" in text


def check_url(text: str, schemes: tuple[str, ...] = ("http", "https")) -> None:
    """Raise ValueError unless a text is a URL of one of these schemes that names a host and a file, and nothing more.

    Libraries understand far more: chains (`a::b`), local files, archives, templates, and names and passwords.
    """
    match = _URL.fullmatch(text)
    if match is None or match["scheme"] not in schemes or "::" in (match["rest"] or "") or not text.isprintable():
        known = ", ".join(f"{scheme}://HOST/..." for scheme in schemes)
        raise ValueError(
            f"{text[:200]!r} is not a URL that is read; use {known}, without a chain (::), a user's name or a password"
        )


def is_configuration(value: Any) -> bool:
    """Return whether an option is made of numbers, truth values and plain words only, at any depth.

    Such a value names no file, server or code, whatever a library makes of it.
    """
    if isinstance(value, str):
        return _CONFIGURATION.fullmatch(value) is not None and ".." not in value
    if isinstance(value, dict):
        return all(
            is_configuration(str(key)) and (str(key) in _FREE or is_configuration(inner))
            for key, inner in value.items()
        )
    if isinstance(value, list | tuple):
        return all(map(is_configuration, value))
    return value is None or isinstance(value, bool | int | float)


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h)\s*")


def duration(text: str, option: str, least: float = 0.0) -> float:
    """Return the seconds that an option asks for, which must be more than `least`. Raises JobError."""
    rest, seconds = text.strip().lower(), 0.0
    if re.fullmatch(r"\d+(\.\d+)?", rest):
        raise JobError(f"{option}: {text!r} has no unit; did you mean {rest}s, or {rest}m?")
    while part := _PART.match(rest):
        seconds += float(part[1]) * _UNITS[part[2]]
        rest = rest[part.end() :]
    if rest or not text.strip():
        raise JobError(f"{option}: {text!r} is not a duration, for example 30s, 10m or 1h30m")
    if seconds <= least:
        raise JobError(f"{option}: {text} is too short; it must be longer than {least:g}s")
    return seconds


_MOST_CHARACTERS = 80  # of a wrong value

_Section = type[BaseModel]


def explain(error: ValidationError, schema: _Section) -> str:
    """Return a line for every mistake in the values of a schema."""
    return "\n".join(f"  {_explain(details, schema)}" for details in error.errors())


def _explain(details: ErrorDetails, schema: _Section) -> str:
    """Return one mistake as a line: the field, what is wrong with which value, and the fix."""
    names, section, info = _locate(schema, details["loc"])
    field, value, kind = ".".join(names), details["input"], details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(section.model_fields)
        return f"{field}: unknown key{nearest(names[-1], known) or '; known here: ' + ', '.join(known)}"
    if kind in ("literal_error", "union_tag_invalid"):
        text = str(context.get("expected") or context.get("expected_tags"))
        if kind == "union_tag_invalid":
            tag = str(context["discriminator"]).strip("'")
            field, value = f"{field}.{tag}", value.get(tag) if isinstance(value, Mapping) else value
        options = re.findall(r"'([^']*)'", text) or text.split(" or ")
        return f"{field}: {_shown(value)} is not one of {', '.join(options)}{nearest(str(value)[:99], options)}"
    if kind == "value_error":
        message = str(context["error"])
        # A section's validator names the field inside it.
        separator = "." if re.match(r"[a-z_.]+: ", message) else ": "
        return f"{field}{separator}{message}" if field else message
    if kind == "missing":
        return f"{field}: missing; give it a value"
    rule = next((note for note in info.metadata if isinstance(note, Rule)), None) if info is not None else None
    if rule is not None and (rule.always or kind == "string_pattern_mismatch"):
        return f"{field}: {_shown(value)} {rule.text}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{field or 'the file'}: {_shown(value)} must be a section of keys and values"
    message = re.sub("^(Input|String|List|Value) should ", "must ", details["msg"])
    message = re.sub(" after validation, not .*", "", message)
    return f"{field}: {_shown(value)} {message}"


def _shown(value: Any) -> str:
    """Return a value as it is written, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _locate(schema: _Section, location: Sequence[int | str]) -> tuple[list[str], _Section, FieldInfo | None]:
    """Return the names on the way to a place, the section that holds it, and its field, if the section has it.

    Where sections take turns, as optimizers do, pydantic puts the tag of the one that is meant behind the field's name;
    that tag is no name that the user has written.
    """
    names: list[str] = []
    section: _Section | None = schema
    holder, info = schema, None
    parts = iter(location)
    for part in parts:
        names.append(str(part))
        if isinstance(part, int):
            continue
        holder, info = section or holder, section.model_fields.get(part) if section is not None else None
        if info is None:
            section = None
            continue
        inside = _sections_in(info.annotation)
        if isinstance(info.discriminator, str):
            tag, name = next(parts, None), info.discriminator
            inside = [one for one in inside if tag in get_args(one.model_fields[name].annotation)] or inside
        section = inside[-1] if inside else None
    return names, holder, info


def _sections_in(annotation: Any) -> list[_Section]:
    """Return the sections inside an annotation such as `list[StageSpec] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections_in(inner)]


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
        grammar = isinstance(error, ScannerError | ParserError)
        advice = "; check the indentation, and put texts with special characters in quotes" if grammar else ""
        raise JobError(f"{where}: {error.problem or 'not YAML'}{advice}") from None
    except RecursionError:
        raise JobError(f"{source}: more than {_MOST_DEEP} levels deep") from None
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError) as error:  # such as !!int x, or the character NUL
        raise JobError(f"{source}: not YAML: {error}") from None
