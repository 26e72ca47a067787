"""What people read: links and paths that lead somewhere, commands that exist, and job files that are valid.

The blocks that can run on a bare machine are run by tests/distributed/test_docs.py.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from horizonml.cli.options import JobFile
from horizonml.job.jobfile import ready_jobs
from horizonml.job.schema import Job
from horizonml.planner.devices import Cluster
from horizonml.telemetry.record import RECORDS
from tests.docs import LANGUAGES, PAGES, ROOT, blocks, commands, options_of, parse_horizonml, typed

TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
# Programs that blocks use and that are not checked further.
PROGRAMS = {
    "cat", "cd", "curl", "docker", "echo", "export", "helm", "kubectl", "pip", "python3", "scp", "source", "ssh",
    "sudo",
}  # fmt: skip
# What a block may use that is run on a bare machine, by whoever runs the tests.
HARMLESS = {"cd", "echo", "horizonml", "source"}
# Launchers: what they start is checked as a command of its own.
LAUNCHERS = {"mpirun", "sbatch", "torchrun"}
PATH = re.compile(
    r"(?<![\w./-])((?:horizonml|tests|scripts|benchmarks|examples|k8s|grafana|images|docs|jobs)/[\w./*-]*[\w*/])"
)
# An image, a label and annotations of Kubernetes, and what `make` creates.
NO_PATHS = {
    "horizonml/worker", "horizonml/monitoring", "horizonml/progress", "horizonml/trainer-status",
    "examples/horovod_tensorflow/.venv",
}  # fmt: skip


def anchors(page: Path) -> set[str]:
    """Return the names that a page's headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_is_there(page: Path) -> None:
    check_links(page)
    check_blocks(page)
    check_sentences(page)


def check_links(page: Path) -> None:
    """Fail unless links, and paths of the repository, lead somewhere."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"
    for path in sorted(set(PATH.findall(text)) - NO_PATHS):
        assert any(any(folder.glob(path.rstrip("/"))) for folder in (ROOT, page.parent)), f"{path} is not there"


def test_every_kind_of_record_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text()
    assert {"step", "recovery", "end"} <= RECORDS.keys()
    for kind, record in RECORDS.items():
        assert f"\n| `{kind}` | " in page, f"records of kind {kind!r} are missing"
        assert f"::: {record.__module__}.{record.__name__}\n" in page, f"{record.__name__} is missing"


def test_every_page_is_in_the_navigation() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in site, f"{page.name} is missing in mkdocs.yml"


def check_blocks(page: Path) -> None:
    """Fail unless files in blocks are valid, and their commands exist and do no harm where they are run."""
    for block in blocks(page):
        assert block.language in LANGUAGES, block
        if block.language == "yaml":
            values = yaml.safe_load(block.text)
            if "classes" in values:  # of the Helm chart
                known = json.loads((ROOT / "k8s" / "chart" / "values.schema.json").read_text())["properties"]
                assert set(values) <= set(known), block
                values = values["job"]
            (Cluster if "devices" in values else Job).model_validate(values)
        elif block.language == "python":
            body = ast.parse(block.text).body
            imports: list[ast.stmt] = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(imports, []), str(block), "exec"), {})
        elif block.language in ("sh", "console"):
            for words in commands(typed(block)):
                check(words)
                harmless = block.needs or words[0] in HARMLESS or words == ["make", "help"]
                assert harmless, f"{block}: {words}: say with a comment what this needs"


def test_scripts_have_the_syntax_of_a_shell() -> None:
    texts = [typed(block) for page in PAGES for block in blocks(page) if block.language in ("sh", "console")]
    script = "".join(f"f{number}() {{\n{text}\n}}\n" for number, text in enumerate(texts))
    syntax = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert syntax.returncode == 0, syntax.stderr


def check(words: list[str]) -> None:
    """Fail unless a command, its options and the files of the repository that it names exist."""
    program, *arguments = words
    for word in arguments:
        if PATH.fullmatch(word) and word not in NO_PATHS:
            assert (ROOT / word).exists(), f"{word} is not there"
    if program in LAUNCHERS:
        if "horizonml" in arguments:
            check(arguments[arguments.index("horizonml") :])
    elif program == "horizonml":
        parse_horizonml(arguments)
        if "--" in arguments:
            check(arguments[arguments.index("--") + 1 :])
    elif program == "make":
        assert {word for word in arguments if "=" not in word} <= TARGETS, words
    elif program == "python":
        assert arguments[0] == "-m", words
        assert importlib.util.find_spec(arguments[1]), f"there is no module {arguments[1]}"
    elif "/" in program:
        assert (ROOT / program).exists(), f"{program} is not there"
    else:
        assert program in PROGRAMS, f"{program} is a program that this test does not know"


def check_sentences(page: Path) -> None:
    """Fail unless commands within sentences exist, with their options."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for command in re.findall(r"`((?:horizonml|make) [^`]+)`", text):
        program, *arguments = next(commands(" ".join(command.replace("[", " ").replace("]", " ").split())))
        if program == "make":
            check([program, *arguments])
            continue
        end = next((i for i, word in enumerate(arguments) if word == "--"), len(arguments))
        options = options_of([word for word in arguments[:end] if not word.startswith("-")])
        assert options is not None, f"`{command}`: there is no such command"
        assert {word for word in arguments[:end] if word.startswith("-")} <= options, f"`{command}`: no such option"


def test_the_help_names_every_ready_job() -> None:
    text = get_args(JobFile)[1].help
    assert f"a ready job: {', '.join(ready_jobs())}." in text


def test_extras_that_people_are_told_to_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    code = [file for ending in ("py", "yaml") for file in (ROOT / "horizonml").rglob(f"*.{ending}")]
    for file in [*PAGES, *code]:
        for extras in re.findall(r"horizonml\[([a-z0-9,-]+)\]", file.read_text()):
            for extra in extras.split(","):
                assert extra in project["optional-dependencies"], f"{name(file)}: there is no extra {extra!r}"


def test_the_guided_read_leads_through_few_lines_of_code_that_exist() -> None:
    page = (ROOT / "docs" / "read-the-code.md").read_text()
    named = re.findall(r"`([a-z_/0-9]+\.py)::([\w.]+)`", page)
    lines = 0
    for file, name in dict.fromkeys(named):
        found: Any = ast.parse((ROOT / "horizonml" / file).read_text())
        for part in name.split("."):
            inside = [node for node in found.body if getattr(node, "name", None) == part]
            assert inside, f"{file} has no {name}"
            (found,) = inside
        lines += found.end_lineno - found.lineno + 1
    assert len(named) > 20
    assert lines <= 700
