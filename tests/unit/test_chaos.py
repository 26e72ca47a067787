"""What faults cost, counted from records written by hand; durations; and what a machine cannot do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import report
from benchmarks.chaos.accounting import Injected, Ledger, Span, read_records
from benchmarks.chaos.campaign import Result, Settings
from benchmarks.chaos.checks import tracebacks
from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.output import Output
from horizonml.errors import JobError
from horizonml.spec.base import duration

BATCH = 10


def run(generation: int, world_size: int, time: float) -> dict[str, Any]:
    return {"kind": "run", "generation": generation, "world_size": world_size, "time": time}


def step(number: int, time: float, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "time": time, "loss": loss, "batch": BATCH}


def failed(time: float) -> dict[str, Any]:
    return {"kind": "end", "time": time, "outcome": "failed"}


def a_kill() -> Ledger:
    """Rank 1 of two is killed at 105.2; rank 0 goes on alone from step 3, and rank 1 is taken in after step 6."""
    alone = [step(4, 107.0), step(5, 107.5), step(6, 108.0)]
    together = [step(7, 110.0), step(8, 110.5)]
    begin = [run(1, 2, 100.0), *(step(number, 100.0 + number) for number in range(1, 6))]
    return Ledger(
        2,
        {
            0: [*begin, failed(105.5), run(2, 1, 106.0), *alone, run(3, 2, 109.0), *together],
            1: [*begin[:-1], failed(105.3), run(3, 2, 109.1), *together],  # what it notices itself counts for nobody
        },
    )


def test_a_kill_is_counted_from_the_records_of_those_that_survive() -> None:
    found = a_kill().aftermath(Injected("kill", 1, 105.2, 105.2), until=120.0)
    assert found.noticed == pytest.approx(0.3)
    assert found.stepped == pytest.approx(1.8)
    assert found.whole == pytest.approx(4.8)
    assert found.repeated == 2  # steps 4 and 5
    assert found.generations == 2


def test_what_is_lost_does_not_count_as_trained() -> None:
    ledger = a_kill()
    assert [samples for _, samples in ledger.progress()] == [10, 20, 30, 40, 50, 40, 50, 60, 70, 80]
    assert ledger.samples(Span(101.0, 105.0)) == 40
    assert ledger.samples(Span(105.0, 108.0)) == 10
    assert ledger.repeated() == 2


def test_a_pause_that_breaks_no_group_costs_the_longest_stop() -> None:
    before = [run(1, 2, 100.0), step(1, 101.0), step(2, 101.1)]
    after = [step(3, 101.2), step(4, 104.3), step(5, 104.4), step(6, 109.0)]  # the last stop has another reason
    pause = Injected("pause", 1, 101.15, 104.2)
    found = Ledger(2, {0: [*before, *after], 1: [*before, *after]}).aftermath(pause, 110.0)
    assert found.noticed is None
    assert found.stepped == found.whole == pytest.approx(3.1)
    assert (found.repeated, found.generations) == (0, 0)
    found = Ledger(2, {0: before, 1: before}).aftermath(pause, 200.0)
    assert (found.noticed, found.stepped, found.whole) == (None, None, None), "nothing has happened since"


def test_ranks_that_recorded_different_losses_disagree() -> None:
    first = [run(1, 2, 100.0), step(1, 101.0, 2.0)]
    assert Ledger(2, {0: [*first, step(2, 102.0, 1.0)], 1: [*first, step(2, 102.0, 1.0)]}).agree()
    assert not Ledger(2, {0: [*first, step(2, 102.0, 1.0)], 1: [*first, step(2, 102.0, 1.1)]}).agree()


def test_who_printed_a_traceback_is_named_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("all is well\nerror: quoted Trace\n")
    assert tracebacks(tmp_path) == []
    (tmp_path / "rank-1.log").write_text("begins\nTraceback (most recent call last):\n  File ...\n")
    assert tracebacks(tmp_path) == [f"rank 1 printed a traceback ({tmp_path / 'rank-1.log'}, line 2)"]


def test_the_loss_of_a_repeated_step_is_compared_with_what_it_was() -> None:
    assert a_kill().loss_difference() == 0
    begin = [run(1, 1, 100.0), step(1, 101.0, 2.0), step(2, 102.0, 1.0)]
    assert Ledger(1, {0: begin}).loss_difference() is None
    assert Ledger(1, {0: [*begin, run(2, 1, 103.0), step(2, 104.0, 0.5)]}).loss_difference() == pytest.approx(0.5)


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    assert read_records(path) == []
    path.write_text('{"kind": "step"}\n{"kind": "st{"kind": "run"}\n{"kind": "end"}\n{"ki')
    assert [record["kind"] for record in read_records(path)] == ["step", "end"]


def test_the_numbers_are_written_with_a_row_for_each_fault(tmp_path: Path) -> None:
    settings = Settings(Path("job.yaml"), 2, tmp_path, ("kill",), 30.0, 10.0, 4.0)
    fault = Injected("kill", 1, 105.2, 105.2)
    result = Result(settings, a_kill(), [fault], [Span(101.0, 105.0)], Span(105.0, 110.5), [])
    assert result.goodput == pytest.approx((30 / 5.5) / (40 / 4.0))
    report.write(result)
    numbers = json.loads((tmp_path / "chaos.json").read_text())
    assert numbers["faults"][0]["seconds_to_notice"] == pytest.approx(0.3)
    assert (tmp_path / "chaos.csv").read_text().splitlines()[1].startswith("kill,1,105.2")
    assert report.kinds_table(result) == [["kill", "1", "300.0 ms", "1.8 s", "4.8 s", "2"]]
    assert dict(report.facts(result))["goodput"] == "54.5% of the samples without faults"


def test_durations_are_read_as_people_write_them() -> None:
    for text, seconds in (("30s", 30), ("1h30m", 5400), ("250ms", 0.25), ("1.5 min", 90)):
        assert duration(text, "--for") == pytest.approx(seconds)
    for text, said in (
        ("30", "has no unit; did you mean 30s"),
        ("m10", "is not a duration"),
        ("", "is not a duration"),
        ("-5s", "is not a duration"),
        ("0s", "is too short"),
    ):
        with pytest.raises(JobError, match=f"^--for: .*{said}"):
            duration(text, "--for")


def test_output_is_complete_even_if_a_process_has_left_another_behind(tmp_path: Path) -> None:
    output, log = Output(), tmp_path / "log"
    process = subprocess.Popen(["sh", "-c", "sleep 60 & echo said"], stdout=subprocess.PIPE, start_new_session=True)
    try:
        output.take(process, log)
        process.wait(timeout=10)
        closing = threading.Thread(target=output.close, daemon=True)
        closing.start()
        closing.join(timeout=20)
        assert not closing.is_alive(), "it waits for a process that nobody has started here"
        assert log.read_text() == "said\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)


EATER = """
import sys
for line in sys.stdin:
    try:
        bytearray(1 << 28)
        print("had it", flush=True)
    except MemoryError:
        print("had it not", flush=True)
"""


@pytest.mark.skipif(FAULTS["oom"].problem() is not None, reason="limits of another process can be set on Linux only")
def test_without_memory_an_allocation_fails_until_there_is_some_again(tmp_path: Path) -> None:
    cluster = Cluster("job.yaml", 1, tmp_path)
    command = [sys.executable, "-c", EATER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        cluster.processes[0] = process

        def eat() -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            print("eat", file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        assert eat() == "had it"
        FAULTS["oom"].begin(cluster, 0)
        assert eat() == "had it not"
        FAULTS["oom"].end(cluster, 0)
        assert eat() == "had it"
    FAULTS["oom"].end(cluster, 0)  # which does nothing to a process that has ended


WRITER = """
import resource, signal, sys
from pathlib import Path
from horizonml.telemetry.log import JsonLines
lines = JsonLines(Path(sys.argv[1]))
for number, limit in enumerate((-1, 0, 0, -1, 0, -1)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    lines.write({"number": number})
    lines.flush()
lines.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the size of files are tested on Linux")
def test_records_are_written_again_once_the_disk_has_room(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [record["number"] for record in read_records(path)] == [0, 1, 2, 3, 4, 5]
    assert done.stderr.count("records cannot be written") == 2  # once for each time that it was full
