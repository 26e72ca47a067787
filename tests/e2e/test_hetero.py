"""The emulated cluster of unequal devices and slow links, as `make hetero` uses it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.tools import run


@pytest.mark.longest
def test_the_automatic_plan_beats_the_others_on_unequal_devices(
    image: None, compose: list[str], tmp_path: Path
) -> None:
    arguments = ("--links", "100mbit", "50mbit", "--steps", "3", "--batch-size", "128", "--out", str(tmp_path))
    environment = {"COMPOSE": shlex.join(compose)}
    out = run(sys.executable, "-m", "benchmarks.hetero", "compare", *arguments, timeout=1500, env=environment)
    rows = {row["name"]: row for row in json.loads((tmp_path / "compare.json").read_text())}
    (alone,) = (name for name in rows if re.fullmatch(r"device \d alone", name))
    assert set(rows) == {"auto", "auto, exact", "equal split", "ddp", alone}
    # By far: nothing here depends on how fast this machine is.
    assert rows["auto"]["seconds"] < 0.5 * rows["ddp"]["seconds"], out
    assert rows["auto"]["seconds"] < rows["equal split"]["seconds"], out
    measured = (tmp_path / "runs" / "mixed-auto" / "cluster.yaml").read_text()
    assert measured.count('"cores"') == 5
    assert measured.count('"between"') == 10
    listed = (*compose, "-f", "examples/hetero/compose.yaml", "ps", "--all", "--quiet")
    left = run(*listed, env={"HORIZONML_TOKEN": "any"})
    assert left.strip() == ""
