"""What runs on GitHub: workflows, which zizmor checks in `make lint`, and the forms of issues."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from horizonml import __version__

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
JOBS = {  # what there must be, in which workflow
    "tests.yml": {"lint", "test"},
    "nightly.yml": {"slow", "containers", "faults"},
    "release.yml": {"build", "package", "image", "chart"},
}


def read(name: str) -> dict[str, Any]:
    found = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(found, dict)
    return found


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in read(name)["jobs"].values() for step in job["steps"]]


def test_the_workflows_are_those_of_the_list() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(JOBS)
    assert {name: set(read(name)["jobs"]) for name in JOBS} == JOBS


@pytest.mark.parametrize("name", JOBS)
def test_a_workflow_may_do_nothing_but_what_its_jobs_say_and_takes_exact_versions(name: str) -> None:
    found = read(name)
    assert found["permissions"] == {}
    for job in found["jobs"].values():
        assert job["permissions"]
    used = [step["uses"] for step in steps(name) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in used)


@pytest.mark.parametrize("name", JOBS)
def test_what_a_workflow_calls_is_there(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for step in steps(name):
        for line in step.get("run", "").splitlines():
            for target in re.findall(r"\bmake ([\w-]+)", line):
                assert target in targets
            for path in re.findall(r"(?<![\w/.])(?:\.ci|images|k8s|horizonml)/[\w./-]+", line):
                assert (ROOT / path).exists(), path


def test_the_changelog_of_the_next_release_can_be_made_of_all_newsfragments() -> None:
    program = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", __version__]
    draft = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for path in (ROOT / "newsfragments").iterdir():
        assert path.read_text().splitlines()[0] in draft, path
    assert ("No significant changes" in draft) == (not any((ROOT / "newsfragments").iterdir()))


def test_tests_run_with_every_python_that_the_package_takes_and_on_arm_and_macos() -> None:
    matrix = read("tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    takes = SpecifierSet(re.findall(r'^requires-python = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0])
    assert all(Version(one) in takes for one in matrix["python"])
    assert matrix["python"][0] == "3.11"
    assert {one["os"] for one in matrix["include"]} == {"ubuntu-24.04-arm", "macos-15"}


def test_a_report_of_a_fault_asks_for_what_doctor_says() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (asked,) = (one for one in form["body"] if one["id"] == "doctor")
    assert "horizonml doctor --json" in asked["attributes"]["label"]
    assert asked["validations"]["required"] is True
