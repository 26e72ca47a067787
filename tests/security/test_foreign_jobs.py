"""A job file that came over the network: what a device takes over from it, field by field, and what it refuses."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import horizonml
from horizonml.errors import JobError
from horizonml.job.jobfile import TAKEN, FieldKind, code_fields, parse, places, taken_over
from horizonml.job.schema import Job
from horizonml.models import libraries
from horizonml.models.spec import LIBRARIES
from horizonml.runtime.lobby.offer import accept, is_offered
from horizonml.spec.base import Code, check_url, is_configuration

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


def test_every_field_that_names_code_is_reported_and_a_library_s_model_is_not() -> None:
    text = "model: {name: 'evil.model:build'}\ndata: {name: 'evil:data'}\ntask: 'evil:Task'\n"
    assert sorted(code_fields(job(text))) == [
        "data.name: evil:data",
        "model.name: evil.model:build",
        "task.name: evil:Task",
    ]
    assert code_fields(job("model: {name: 'transformers:GPT2LMHeadModel'}")) == []
    # What only looks like a library.
    assert code_fields(job("model: {name: 'transformers.evil:build'}")) == ["model.name: transformers.evil:build"]
    assert code_fields(job("data: {name: 'timm:data'}")) == ["data.name: timm:data"]


def leaves() -> dict[str, FieldInfo]:
    """Return the fields of the schema that are no sections, by name."""
    found = {}
    for within, name, info in sections():
        inner = [one for one in inside(info.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        if not inner:
            found[f"{within}{name}"] = info
    return found


def test_every_field_of_the_schema_has_its_row_and_every_row_its_field() -> None:
    """A new field fails here until somebody has thought about what a device takes over of it."""
    assert set(TAKEN) == set(leaves())


def test_a_field_of_free_text_or_any_values_is_never_taken_over_as_it_is() -> None:
    free = {name for name, info in leaves().items() if is_free_text(info) or Any in inside(info.annotation)}
    assert [name for name in free if TAKEN[name].kind is FieldKind.VALUE] == []
    assert {name for name in free if TAKEN[name].kind is FieldKind.TEXT} == {
        "model.freeze", "model.lora.targets", "model.lora.train", "data.inputs", "data.targets", "early_stop.metric",
        "parallel.deadline", "checkpoint.keep_best",
    }  # fmt: skip


def test_a_field_without_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TAKEN, "model.weights.source")
    assert taken_over(job("name: x"), False) == {}
    with pytest.raises(JobError, match=r"model\.weights\.source: a device takes over no such field"):
        taken_over(job("model: {weights: w.safetensors}"), False)


def test_every_place_that_is_read_is_named_and_every_place_that_is_written_is_the_devices_own(tmp_path: Path) -> None:
    text = (
        "folder: /etc\ndata: {name: text, path: /etc/passwd, folder: /root, tokens: /t.json}\n"
        "rendezvous: {address: 'a:1'}\ntelemetry: {mlflow: 'sqlite:////home/pi/.ssh/authorized_keys'}\n"
        "model: {weights: {source: https://example.org/x, sha256: " + 64 * "a" + ", base_url: https://example.org}}\n"
    )
    taken = accept(text, "it", tmp_path, False)
    assert (taken.folder, taken.data.folder) == (str(tmp_path / "job"), None)
    assert (taken.telemetry.mlflow, taken.rendezvous.address) == (None, None)
    assert {f"{place.field} {place.text}" for place in places(taken)} == {
        "data.path /etc/passwd", "data.tokens /t.json", "model.weights.source https://example.org/x",
        "model.weights.base_url https://example.org",
    }  # fmt: skip
    assert places(job("data: {folder: /root}\nmodel: {weights: IMAGENET1K_V1}")) == []


REFUSED = [
    ("model: {options: {a: [{b: 'local-dir:/etc'}]}}", r"model\.options"),
    ("data: {options: {root: /etc}}", r"data\.options"),
    ("task: {options: {file: ../x}}", r"task\.options"),
    ("model: {weights: 'hub:../../x'}", r"model\.weights\.source"),
    ("model: {weights: 'hub:org/name/../x'}", r"model\.weights\.source"),
    ('model: {freeze: ["\\e[2J"]}', r"model\.freeze"),
    (f"model: {{freeze: [{'x' * 201}]}}", r"model\.freeze"),
    ('data: {name: text, path: "a\\0b"}', r"data\.path"),
    ("checkpoint: {keep: 100000}", r"checkpoint\.keep: 100000 is more"),
    ("recovery: {log_bytes: 1099511627776}", r"recovery\.log_bytes"),
]


def test_a_form_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    for text, words in REFUSED:
        with pytest.raises(JobError, match=words):
            accept(text, "it", tmp_path, False)


def test_what_fills_a_device_is_lowered_to_what_it_gives(tmp_path: Path) -> None:
    taken = accept(
        "data: {disk: 1099511627776, memory: 99999999999, workers: 200, prefetch: 1000}", "it", tmp_path, False
    )
    assert (taken.data.disk, taken.data.memory, taken.data.workers, taken.data.prefetch) == (4 << 30, 1 << 30, 16, 64)
    assert accept("data: {disk: 1000}", "it", tmp_path, False).data.disk == 1000


CHAINS = [
    "reference://d::http://evil/x", "file:///etc/passwd", "simplecache::https://x/y", "ftp://x/y", "github://a:b@c/d",
    "hf://datasets/x", "webhdfs://x/y", "zip://a::file://b", "https://x/y::file://z", "https://user:pass@x/y",
    "https://x\\@y/z", "HTTP://x/y", "local://etc", "https:///etc", "https://x y/z", "http://x/\n", "gs://b/k", "s3a://b/k",
    "https://{{x}}/y", "memory://x", "data:,x://", "dask://x", "ssh://x/y", "a::b",
]  # fmt: skip


def test_a_url_of_another_form_is_refused_in_every_job() -> None:
    for text in CHAINS:
        with pytest.raises(ValueError, match="URL"):
            check_url(text, ("http", "https", "s3"))
        for values in (
            {"data": {"name": "stream", "path": text, "inputs": ["jpg"], "targets": ["cls"]}},
            {"data": {"name": "text", "path": text}},
            {"data": {"name": "folder", "folder": text}},
            {"data": {"name": "text", "tokens": text}},
            {"model": {"weights": {"source": text}}},
            {"model": {"weights": {"source": "x", "base_url": text}}},
        ):
            with pytest.raises(ValueError, match="is not a"):
                Job.model_validate(values)


def test_plain_urls_are_allowed_where_something_reads_them() -> None:
    for text in ("https://a.org/b", "http://10.0.0.1:8000/a b/c?d=e@f", "s3://bucket/key", "http://[::1]:80/x"):
        stream = {"name": "stream", "path": text, "inputs": ["jpg"], "targets": ["cls"]}
        assert Job.model_validate({"data": stream}).data.path == text
        with pytest.raises(ValueError, match=r"only data\.name: stream reads from a URL"):
            Job.model_validate({"data": {"name": "text", "path": text}})
    with pytest.raises(ValueError, match="is not a URL"):
        Job.model_validate({"model": {"weights": "s3://bucket/key"}})


def test_a_path_is_offered_only_if_it_lies_in_a_folder_of_the_device_with_links_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "out").symlink_to(tmp_path)
    for text in ("data", "data/x", "data/../x", "data/out/x", "database"):
        offered = is_offered((tmp_path / text).resolve(), [tmp_path / "data"])
        assert offered is (text in ("data", "data/x")), text


def test_an_option_is_a_configuration_only_if_it_names_nothing() -> None:
    plain = (1, None, "gelu_new", "c2p|p2c", {"a": [1.5, {"b": "M-M*"}]}, {"id2label": {0: "a/b:c"}}, "2.5e-3", True)
    for value in plain:
        assert is_configuration(value), value
    for named in ("/x", "a/b", "hf-hub:x", "..", "~", "{{x}}", "$HOME", "a\nb", {"../x": 1}, [["local-dir:x"]], b"x"):
        assert not is_configuration(named), named


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
        "data/choose.py",  # the modules of a table
        "machine/code.py",
        "plan/syncs.py",  # the implementations of a table
        "runtime/forkserver.py",  # what its command line names, which this package writes
    }


_IMPORTERS = ("__import__", "import_module")


@contextmanager
def answering(host: str, asked: list[str], elsewhere: str) -> Iterator[int]:
    """Serve files and redirections by HTTP, and note what is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if "redirect" in self.path or "scheme" in self.path:
                self.send_response(302)
                self.send_header(
                    "Location", f"file:///{elsewhere}" if "scheme" in self.path else f"http://{elsewhere}/x"
                )
                self.end_headers()
            else:
                self.send_error(404)

        def log_message(self, format: str, *values: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_no_text_of_a_job_makes_a_device_touch_what_it_has_not_offered(tmp_path: Path) -> None:
    """Every text field gets paths, URLs, chains, templates and escapes, while an audit hook watches a process."""
    for name in ("private/set", "offered", "home", "tmp", "here"):
        (tmp_path / name).mkdir(parents=True)
    private = tmp_path / "private"
    (private / "words.txt").write_text("words " * 1000)
    (private / "table.csv").write_text("x,y\n1,2\n" * 20)
    (private / "w-01234567.pth").write_bytes(b"")
    (private / "tokens.json").write_text("{}")
    (private / "set" / "index.json").write_text('{"train": []}')
    (tmp_path / "here" / "link").symlink_to(private)
    (tmp_path / "here" / "planted.py").write_text("open('hacked', 'w')\n")
    (tmp_path / "offered" / "link.txt").symlink_to(private / "words.txt")
    (tmp_path / "here" / "offered").symlink_to(tmp_path / "offered")
    asked: list[str] = []
    probed: list[str] = []
    with answering("127.0.0.1", probed, "") as canary, answering("127.0.0.2", asked, f"127.0.0.1:{canary}") as port:
        done = subprocess.run(
            [sys.executable, "-m", "tests.security.watched", str(tmp_path), f"127.0.0.2:{port}", str(canary)],
            cwd=tmp_path / "here",
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(PACKAGE.parent),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": str(tmp_path / "home"),
                "TMPDIR": str(tmp_path / "tmp"),
                "HORIZONML_CACHE": str(tmp_path / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["touched"] == []
    assert found["slow"] == []
    assert probed == []
    assert found["noticed"] == [f"deliberately: opened {private / 'words.txt'}"]
    assert found["taken"] > 100
    assert any("redirect-" in path for path in asked), "a URL that was agreed to is asked for"
    assert any("index.json" in path for path in asked)
    assert not list(tmp_path.rglob("hacked"))


def test_the_libraries_of_the_schema_are_those_that_are_built() -> None:
    assert set(LIBRARIES) == set(libraries.LIBRARIES)
