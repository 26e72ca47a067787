"""A job file that came over the network: which of its fields are code, and which are places on this machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import horizonml
from horizonml.job.foreign import code_fields, place_fields
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.models import libraries
from horizonml.models.spec import LIBRARIES
from horizonml.spec.base import Code, Place, Words

PACKAGE = Path(horizonml.__file__).parent


def job(text: str) -> Job:
    return parse(text, "job.yaml")


def sections(section: type[BaseModel] = Job, within: str = "") -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield every field of the schema: the section that holds it, its own name, and its description."""
    for name, info in section.model_fields.items():
        yield within, name, info
        for inner in inside(info.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from sections(inner, f"{within}{name}.")


def inside(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation, without the values of literals."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for inner in get_args(annotation):
            yield from inside(inner)


def notes(info: FieldInfo) -> list[Any]:
    """Return what is noted with a field, and with the types that its own is made of."""
    return [*info.metadata, *(note for inner in inside(info.annotation) for note in getattr(inner, "__metadata__", ()))]


def is_free_text(info: FieldInfo) -> bool:
    """Return whether a field takes any text, rather than one of some names or text that a pattern describes."""
    parts: list[Any] = [*notes(info)]
    fields = [note for note in parts if isinstance(note, FieldInfo)]
    parts += [note for field in fields for note in field.metadata]
    has_pattern = any(getattr(note, "pattern", None) for note in parts)
    return str in list(inside(info.annotation)) and not has_pattern


def test_a_plain_job_names_no_code_and_no_place() -> None:
    plain = job("model: {name: digits_cnn}\ndata: {name: digits}\n")

    assert code_fields(plain) == []
    assert place_fields(plain) == []


@pytest.mark.parametrize("name", ["transformers:GPT2LMHeadModel", "timm:resnet18"])
def test_a_model_of_an_installed_library_is_not_code_of_the_job(name: str) -> None:
    assert code_fields(job(f"model: {{name: '{name}'}}")) == []


def test_every_field_that_names_code_is_reported() -> None:
    text = "model: {name: 'evil.model:build'}\ndata: {name: 'evil:data'}\ntask: 'evil:Task'\n"

    assert sorted(code_fields(job(text))) == [
        "data.name: evil:data",
        "model.name: evil.model:build",
        "task.name: evil:Task",
    ]


def test_code_that_only_looks_like_a_library_is_reported() -> None:
    assert code_fields(job("model: {name: 'transformers.evil:build'}")) == ["model.name: transformers.evil:build"]
    assert code_fields(job("data: {name: 'timm:data'}")) == ["data.name: timm:data"]


def test_every_place_on_this_machine_is_reported() -> None:
    text = (
        "folder: /etc\ndata: {name: table, path: /etc/passwd, targets: [x], folder: /root, tokens: /t.json}\n"
        "telemetry: {mlflow: /srv}\nmodel: {weights: http://169.254.169.254/x}\n"
    )

    assert {line.split(":")[0] for line in place_fields(job(text))} == {
        "folder", "data.path", "data.folder", "data.tokens", "telemetry.mlflow", "model.weights.source",
    }  # fmt: skip
    assert {line.split(":")[0] for line in place_fields(job(text), written=True)} == {
        "folder", "data.folder", "telemetry.mlflow",
    }  # fmt: skip


def test_every_field_of_free_text_says_what_it_leads_to() -> None:
    """A new field of free text fails here until it is marked as code, as a place, or as words."""
    unmarked = [
        f"{within}{name}"
        for within, name, info in sections()
        if is_free_text(info) and not any(isinstance(note, Code | Place | Words) for note in notes(info))
    ]

    # Options are keyword arguments: they are code's own, or go to a library or task that checks them.
    named = {within for within, name, info in sections() if any(isinstance(note, Code) for note in notes(info))}
    assert [field for field in unmarked if not (field.endswith("options") and field[: -len("options")] in named)] == []


def test_every_import_of_a_jobs_code_belongs_to_a_marked_field() -> None:
    """The fields that `machine.code.find` is called for, in the whole package, are those that are marked as code."""
    marked = {f"{within}{name}" for within, name, info in sections() if any(isinstance(n, Code) for n in info.metadata)}

    assert set(found_fields()) == marked
    assert marked == {"model.name", "data.name", "task.name"}


def found_fields() -> Iterator[str]:
    """Yield the field that each call of `machine.code.find` names; every call must name one."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "horizonml.machine.code"
            for alias in node.names
            if alias.name == "find"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                assert isinstance(node.args[1], ast.Constant), f"{file.name}:{node.lineno} names no field"
                yield str(node.args[1].value)


def test_no_other_module_imports_by_a_name_that_is_not_its_own() -> None:
    """`importlib` and `__import__` take names from a job in one file only, which checks them."""
    dynamic = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", "") == "import_module" or getattr(node.func, "id", "") in _IMPORTERS)
        and not (node.args and isinstance(node.args[0], ast.Constant))
    }

    assert dynamic == {
        "__init__.py",  # a table of its own names
        "machine/code.py",
        "plan/schedules/__init__.py",  # the files beside it
    }


_IMPORTERS = ("__import__", "import_module")


def test_the_libraries_of_the_schema_are_those_that_are_built() -> None:
    assert set(LIBRARIES) == set(libraries.LIBRARIES)
