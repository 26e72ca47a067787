"""Loading ahead of the step: the same rows, in time, within bounds, and without leaving anything behind."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image

from horizonml.data.choose import describe, load
from horizonml.data.dataset import Data, DataBatch, NeededRows, stand_ins
from horizonml.data.loading import Ahead, LoadedBatch
from horizonml.data.sampler import Sampler
from horizonml.data.spec import DataSpec
from horizonml.data.workers import Processes, Threads, Workers, workers_for
from horizonml.errors import DataError, DataOutOfMemory, is_out_of_memory

KINDS: dict[str, dict[str, Any]] = {
    "here": {"workers": 0},
    "threads": {"workers": 3, "worker_kind": "threads"},
    "processes": {"workers": 2, "worker_kind": "processes"},
}


def opened(**fields: Any) -> tuple[DataSpec, Data]:
    spec = DataSpec(**{"name": "tests.datasets:Points", **fields})
    info = describe(spec)
    assert info is not None
    return spec, load(spec, info, Path("unused"))


def ahead(
    data: Data, workers: Workers, needs: Callable[[int, int], NeededRows], prefetch: int = 2, memory: int = 1 << 20
) -> Ahead:
    """Batches of 16 samples, the last of an epoch of one; three epochs."""
    sampler = Sampler(data.info.train, 16, seed=1)

    def batch(number: int) -> DataBatch:
        return data.batch(True, sampler.indices(*divmod(number, sampler.steps_per_epoch)), number)

    return Ahead(batch, range(3 * sampler.steps_per_epoch), needs, workers, data.info, prefetch, memory)


def halves(size: int, _: int = 0) -> NeededRows:
    """The rows of a rank with both ends of the model, in two micro-batches."""
    ranges = [(start, stop) for start, stop in ((0, size // 2), (size // 2, size)) if stop > start]
    return NeededRows(ranges, ranges)


def own_workers() -> list[psutil.Process]:
    """Return the processes that load samples for this one, and those that other tests use as ranks."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize(("kind", "noise"), [("here", 1.0), ("threads", 0.0), ("processes", 1.0)])
def test_rows_are_the_same_whoever_loads_them_and_workers_end_with_the_run(kind: str, noise: float) -> None:
    """Sample 17 can be read by nobody, which reaches who asks for it."""
    before = threading.active_count(), own_workers()
    spec, data = opened(options={"noise": noise, "broken": [17]}, **KINDS[kind])
    workers = workers_for(spec, data, Path("unused"), True, True)
    batches = ahead(data, workers, halves)
    assert len(batches) == 12
    (place,) = (data.train._members == 17).nonzero().flatten().tolist()
    told = 0
    for number in range(12):
        plain, found = batches._batches(number), batches.take(number)
        assert isinstance(found, LoadedBatch)
        assert found.waits is (kind != "here")
        for start, stop in halves(plain.size).inputs:
            if place in plain.indices[start:stop]:
                told += 1
                with pytest.raises(DataError, match=r"sample 17 cannot be read: .*\.py:\d+: ValueError: the disk lost"):
                    found.inputs(start, stop)
                continue
            assert torch.equal(found.inputs(start, stop), plain.inputs(start, stop))
            assert torch.equal(found.targets(start, stop), plain.targets(start, stop))
        if place not in plain.indices:  # rows that nobody has announced are read when they are asked for
            assert torch.equal(found.inputs(0, plain.size), plain.inputs(0, plain.size))
    assert told == 3  # epochs
    assert (own_workers() != before[1]) == (kind == "processes")
    batches.close()
    workers.close()
    assert (threading.active_count(), own_workers()) == before


def test_threads_do_not_share_random_numbers() -> None:
    with pytest.raises(DataError, match="draws random numbers, which threads share"):
        workers_for(*opened(options={"noise": 1.0}, **KINDS["threads"]), Path("unused"), True, True)


def test_each_sample_is_read_once_and_only_where_it_is_needed(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    for count in (0, 2):
        spec, data = opened(options={"marks": str(marks)}, workers=count)
        workers = workers_for(spec, data, Path("unused"), True, True)
        assert workers.count == count
        marks.write_text("")
        batches = ahead(data, workers, halves, prefetch=1)
        for number in range(4):
            batch = batches.take(number)
            for start, stop in halves(batch.size).inputs:
                batch.inputs(start, stop)
                batch.targets(start, stop)
        batches.close()
        workers.close()
        first_epoch = marks.read_text().split()
        assert len(set(first_epoch)) == 49
        assert 49 <= len(first_epoch) <= 49 + 16  # and perhaps a batch of the next epoch
    workers = workers_for(spec, data, Path("unused"), True, False)
    batches = ahead(data, workers, lambda size, _: NeededRows([(0, min(3, size))]), prefetch=3)
    marks.write_text("")
    batches.take(0)
    batches.take(1).inputs(0, 3)
    workers.close()
    firsts = [data.train._members[batches._batches(number).indices[:3]].tolist() for number in range(6)]
    assert set(map(int, marks.read_text().split())) <= {index for some in firsts for index in some}


def begun(batches: Ahead) -> int:
    """Return how many rows of batches that are not taken yet have been handed to workers."""
    _, *later = batches._planned
    return sum(c.stop - c.start for _, batch in later for c in batch.chunks if c.pending is not None)


def test_no_more_is_loaded_ahead_than_fits_and_is_asked_for() -> None:
    _, data = opened()
    row = 4 * (5 + 2)
    workers = Threads(2)
    for prefetch, memory, expected in ((2, 1 << 20, 32), (1, 1 << 20, 16), (2, 20 * row, 16), (2, 0, 0)):
        batches = ahead(data, workers, lambda size, _: NeededRows([(0, size)], [(0, size)]), prefetch, memory)
        batches.take(0)
        assert begun(batches) == expected
        taken = batches.take(1)
        assert isinstance(taken, LoadedBatch)
        assert all(chunk.pending is not None for chunk in taken.chunks)  # what is needed now is read in any case
        batches.close()
    workers.close()


def test_a_worker_process_that_is_killed_is_told_and_the_others_end() -> None:
    spec, data = opened(workers=2, worker_kind="processes")
    before = own_workers()
    workers = workers_for(spec, data, Path("unused"), True, True)
    batches = ahead(data, workers, halves)
    for number in range(2):
        batches.take(number).inputs(0, 8)
    killed, *others = [worker for worker in own_workers() if worker not in before]
    assert others, "both workers must have begun"
    killed.kill()
    batch = data.batch(True, torch.arange(8))
    rows = (workers.read(batch, 0, 8, True, True).rows() for _ in range(10_000))
    with pytest.raises(DataError, match=r"a process that loads samples was killed \(SIGKILL\), as the kernel does"):
        deque(rows, maxlen=0)
    batches.close()
    workers.close()
    assert own_workers() == before


def test_worker_processes_load_other_parts_for_the_next_group_and_a_crash_is_told_as_one() -> None:
    fields = {"name": "tests.datasets:Fatal", "options": {"how": "segfault"}, "workers": 1, "worker_kind": "processes"}
    spec, data = opened(**fields)
    workers = workers_for(spec, data, Path("unused"), True, False)
    assert isinstance(workers, Processes)
    late = (data.train._members > 30).int()
    batch, before = data.batch(True, late.argsort()), own_workers()
    assert workers.read(batch, 0, 4, True, False).rows().targets is None
    started = own_workers()
    _, again = opened(**fields)
    assert workers.goes_on(spec, again, Path("unused"))
    found = workers.read(again.batch(True, batch.indices), 0, 4, True, True).rows()
    assert torch.equal(found.targets, batch.targets(0, 4))  # type: ignore[arg-type]
    assert own_workers() == started != before
    assert not workers.goes_on(spec.model_copy(update={"options": {"how": "memory"}}), again, Path("unused"))
    with pytest.raises(DataError, match=r"has crashed \(SIGSEGV\) in code that the data set calls"):
        workers.read(again.batch(True, batch.indices), 40, 49, True, True).rows()
    workers.close()


def test_lack_of_memory_in_the_data_set_is_told_as_such() -> None:
    _, data = opened(name="tests.datasets:Fatal", options={"how": "memory"})
    words = r"sample \d+: .*datasets\.py:\d+: MemoryError: .*: memory ran out while"
    with pytest.raises(DataOutOfMemory, match=words) as told:
        data.batch(True, torch.arange(8)).rows(0, 8, True, True)
    assert not is_out_of_memory(told.value)  # which would blame the batch
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)  # as it comes from a worker process


def test_samples_that_do_not_come_are_told_of_while_a_step_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("horizonml.data.workers._PATIENCE", 0.05)
    _, data = opened()
    workers, free = Threads(1), threading.Event()
    holder = workers._executor.submit(free.wait)
    threading.Timer(0.5, free.set).start()
    rows = workers.read(data.batch(True, torch.arange(4)), 0, 4, True, True).rows()
    assert holder.done()
    assert rows.inputs is not None
    assert "samples that a step needs have not been read for 0 s, and all ranks wait" in caplog.text
    workers.close()


def test_a_worker_process_that_is_stuck_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizonml.data.workers._CLOSE_SECONDS", 0.2)
    before = own_workers()
    spec, data = opened(name="tests.datasets:Stuck", workers=1, worker_kind="processes")
    workers = workers_for(spec, data, Path("unused"), True, True)
    batches = ahead(data, workers, halves)
    batches.take(0).inputs(0, 8)
    batches.take(3)  # it has the sample that never comes
    assert len(own_workers()) > len(before)
    batches.close()
    workers.close()
    assert own_workers() == before


def test_data_in_memory_needs_no_workers_and_files_do(tmp_path: Path) -> None:
    spec, data = opened(name="digits")
    assert workers_for(spec, data, tmp_path, True, True).count == 0
    assert isinstance(ahead(data, workers_for(spec, data, tmp_path, True, True), halves).take(0), DataBatch)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(8):
            Image.new("RGB", (20, 20), (10 * number, 0, 0)).save(tmp_path / name / f"{number}.png")
    spec, data = opened(name="folder", folder=str(tmp_path), image_size=8, augment=True)
    workers = workers_for(spec, data, tmp_path, True, True)
    assert isinstance(workers, Threads)
    batches = ahead(data, workers, halves)
    for number in range(3):  # augmented alike, although the rows are read in other chunks
        plain, found = batches._batches(number), batches.take(number)
        for start, stop in halves(plain.size).inputs:
            assert torch.equal(found.inputs(start, stop), plain.inputs(start, stop))
    workers.close()
    assert workers_for(spec, data, tmp_path, False, False).count == 0


def test_chunks_cover_what_is_needed_and_nothing_else() -> None:
    needs = NeededRows([(0, 5), (10, 12)], [(3, 5), (10, 40)])
    chunks = needs.chunks(2)
    rows = {row: (i, t) for start, stop, i, t in chunks for row in range(start, stop)}
    inputs, targets = {*range(5), 10, 11}, {3, 4, *range(10, 40)}
    assert rows == {row: (row in inputs, row in targets) for row in inputs | targets}
    assert max(stop - start for start, stop, _, _ in chunks) <= 16
    assert [start for start, *_ in chunks] == sorted(start for start, *_ in chunks)
    assert not NeededRows().chunks(2)


def test_what_cannot_be_read_is_replaced_by_the_next() -> None:
    found, replaced = stand_ins(torch.tensor([3, 9, 0, 8, 3]), (3, 4, 8, 9), 10)
    assert found.tolist() == [5, 0, 0, 0, 5]
    assert replaced == 4
