from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from horizonml.machine.host import killed_in_container, killed_on_machine
from horizonml.telemetry.lifeline import Lifeline, Trace, explain_last
from tests.distributed.processes import wait_for

MIB = 1 << 20
CONTAINER = {
    1: {"memory/memory.limit_in_bytes": f"{640 * MIB}\n", "memory/memory.oom_control": "under_oom 0\noom_kill 2\n"},
    2: {"memory.max": f"{640 * MIB}\n", "memory.events": "oom 3\noom_kill 2\noom_group_kill 0\n"},
}
TRAINS = """
import sys, time
from pathlib import Path
from typing import Any
from horizonml.telemetry.lifeline import Lifeline
line = Lifeline(Path(sys.argv[1]), 2, Path(sys.argv[2]))
line.begin(1)
line.expected(590 * 2**20)
line.beat(1234, 612 * 2**20)
time.sleep(60)
"""


def cgroup(root: Path, version: int) -> Path:
    """A container's cgroup of that version, in which two processes have been killed for their memory so far."""
    for name, text in CONTAINER[version].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def trace_in(folder: Path) -> Path:
    return folder / ".places" / "rank-2.lifeline"


@pytest.fixture
def killed(tmp_path: Path) -> Trace:
    """The trace of a process that was killed at step 1234, with 612 of 640 MiB, of which the plan expected 590."""
    root = cgroup(tmp_path / "cgroup", 2)
    with subprocess.Popen([sys.executable, "-c", TRAINS, str(tmp_path), str(root)]) as process:
        wait_for(lambda: trace_in(tmp_path).exists() and Trace.read(trace_in(tmp_path)).step == 1234, "the trace")
        assert explain_last(tmp_path, 2, root) is None  # it is there
        process.send_signal(signal.SIGKILL)
    return Trace.read(trace_in(tmp_path))


def test_a_process_that_was_killed_near_its_limit_is_explained_once(killed: Trace, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    assert (killed.killed_here, killed.generation) == (2, 1)
    assert explain_last(tmp_path, 2, root) == (
        "the process before this one (rank 2) ended without a word at step 1234, as the kernel's out-of-memory killer "
        "ends processes (exit code 137): it used 612.0 MiB of 640.0 MiB; the plan expected 590.0 MiB. Lower "
        "batch_size, raise parallel.micro_batches, let more ranks share the layers (parallel.strategy: pipeline or "
        "auto), or raise the memory limit"
    )
    assert explain_last(tmp_path, 2, root) is None
    assert explain_last(tmp_path, 1, root) is None  # another rank


EVIDENCE: list[tuple[dict[str, Any], int, int, str]] = [
    # The counters of the container and of the machine are evidence only if they have risen since.
    ({}, 3, 7, "the kernel ended the process before this one (rank 2) at step 1234, because memory ran out"),
    ({"peak": 350 * MIB}, 2, 8, "the kernel's out-of-memory killer has ended a process on this machine since"),
    ({"peak": 99 * MIB, "left": 60 * MIB}, 2, 8, "most likely this one (exit code 137): it used 99.0 MiB of"),
    ({"peak": 99 * MIB, "left": 65 * MIB}, 2, 8, "it was killed, or its container was removed (it used 99.0 MiB"),
    (
        {"peak": 99 * MIB, "expected": None},
        2,
        7,
        "1234: it was killed, or its container was removed (it used 99.0",
    ),
    ({"peak": 99 * MIB, "machine": "a"}, 3, 8, "was started anew: its device lost its power, or was switched off"),
    ({"machine": "a"}, 0, 0, "as the kernel's out-of-memory killer ends processes (exit code 137)"),
    ({"step": None}, 2, 7, "ended without a word before its first step, as the kernel's"),
    ({"killed_here": None, "killed_anywhere": None, "peak": 1}, 2, 7, "it was killed, or its container was removed"),
]


def test_the_reason_is_chosen_by_the_evidence(killed: Trace, tmp_path: Path) -> None:
    root, vmstat = tmp_path / "cgroup", tmp_path / "vmstat"
    for change, kills, anywhere, story in EVIDENCE:
        (root / "memory.events").write_text(f"oom_kill {kills}\n")
        vmstat.write_text(f"pgfault 5\noom_kill {anywhere}\n")
        trace = replace(killed, killed_anywhere=7, left=300.0 * MIB)
        trace_in(tmp_path).write_text(json.dumps(asdict(replace(trace, **change))))
        found = str(explain_last(tmp_path, 2, root, vmstat))
        assert story in found
        assert ("Lower batch_size" in found) == ("exit code 137" in found)


def test_a_damaged_file_is_no_error(killed: Trace, tmp_path: Path) -> None:
    other_type = json.dumps({**asdict(killed), "peak": "many"})
    for content in ("", "{", "[]", '"x"', '{"pid": 1}', '{"pid": "x", "steps": 5}', other_type):
        trace_in(tmp_path).write_text(content)
        assert "rank-2.lifeline is damaged: its device most likely lost its power" in str(explain_last(tmp_path, 2))
        assert explain_last(tmp_path, 2) is None


def test_a_process_that_ends_by_itself_leaves_nothing(tmp_path: Path) -> None:
    line = Lifeline(tmp_path, 2)
    line.beat(1, 5)  # before it has begun
    line.begin(1)
    first = Trace.read(trace_in(tmp_path))
    assert (first.pid, first.step, first.expected) == (os.getpid(), None, None)
    assert first.peak > MIB
    assert 0 < first.left < first.limit
    line.begin(2)
    line.beat(7, 5)
    wait_for(lambda: Trace.read(trace_in(tmp_path)).step == 7, "the trace")
    assert Trace.read(trace_in(tmp_path)).generation == 2
    line.end()
    assert list(trace_in(tmp_path).parent.iterdir()) == []
    line.end()
    assert explain_last(tmp_path, 2) is None


def test_a_folder_that_cannot_be_written_to_is_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".places").write_text("a file where a folder should be")
    line = Lifeline(tmp_path, 2)
    line.begin(1)
    line.beat(1, 5)
    line.end()
    assert caplog.text.count("rank-2.lifeline cannot be written") == 1


@pytest.mark.parametrize("version", [1, 2])
def test_kills_are_counted_in_both_versions_of_cgroups(tmp_path: Path, version: int) -> None:
    assert killed_in_container(cgroup(tmp_path, version)) == 2
    assert killed_in_container(tmp_path / "nothing") is None


def test_kills_are_counted_on_this_machine(tmp_path: Path) -> None:
    assert killed_on_machine(tmp_path / "nothing") is None
    (tmp_path / "vmstat").write_text("nr_free 1\noom_killer 9\noom_kill 4\n")
    assert killed_on_machine(tmp_path / "vmstat") == 4
