"""Runs the code of the documentation, page by page: whoever follows a page literally gets what it says.

The `python` blocks of a page share their names, and all blocks share a folder, which looks like the repository's. Of
the commands only `horizonml train` is changed: it trains for 4 steps with two ranks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import environment
from tests.docs import PAGES, ROOT, Block, blocks

pytestmark = pytest.mark.slow

PYTHON = sys.executable
RUNNABLE = {
    page: [block for block in blocks(page) if block.language in ("sh", "console", "python") and not block.needs]
    for page in PAGES
}
HORIZONML = f"""#!/bin/bash
export PYTHONPATH={ROOT}
[ "$1" = train ] && set -- "$@" --set steps=4 --workers 2
exec {PYTHON} -m horizonml "$@"
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for profiles, so that each model is measured once for all pages."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def repository(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what readers find in the repository's, and an environment in .venv; it is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HORIZONML_CACHE", str(cache))
    for name in ("Makefile", "examples", "jobs"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "horizonml").write_text(HORIZONML)
    (programs / "horizonml").chmod(0o755)
    (programs / "activate").write_text(f"export PATH={programs}:$PATH\n")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if RUNNABLE[page]], ids=lambda page: page.name)
def test_what_a_page_says_works(page: Path, repository: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.title:
            (repository / block.title).write_text(block.text)
        if block not in RUNNABLE[page]:
            continue
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        elif block.language == "sh":
            ended = bash(block.text, repository)
            assert ended.returncode == 0, f"{block}: {ended.stdout}"
        else:
            check_console(block, repository)


def check_console(block: Block, folder: Path) -> None:
    """Run the commands of a block and compare what they print; `...` stands for anything."""
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, _, shown = part.partition("\n")
        printed = bash(command, folder).stdout
        pattern = ".*".join(map(re.escape, shown.split("...")))
        assert re.fullmatch(pattern, printed, re.S), f"{block}: {command}\nprints\n{printed}"


def bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, with the environment in .venv; both of its outputs are in `stdout`."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source .venv/bin/activate\n{script}"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
