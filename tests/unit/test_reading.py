"""Files that are meant to hurt: all end soon, in our own error, whoever reads them."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horizonml.errors import JobError
from horizonml.job.jobfile import load, parse, read_plan
from horizonml.planner.devices import load_cluster, read_profile
from horizonml.spec import base

READERS: dict[str, Callable[[Path], Any]] = {
    "job": load,
    "devices": load_cluster,
    "plan": lambda path: read_plan(parse("", "job.yaml"), path),
    "profile": lambda path: read_profile(path, []),
}


NOT_OURS = {
    "epochs: \0": "not YAML",  # a control character
    "epochs: !!float ''": "not YAML",
    "epochs: !!set {a}": "could not determine a constructor",
    "a: 1\n---\nb: 1": "found another document",
    "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 45)): "more than 40 levels deep",
}


@pytest.mark.parametrize("reader", READERS)
def test_yaml_that_is_not_of_json_s_types_is_refused(tmp_path: Path, reader: str) -> None:
    """Bombs are in tests/security/test_yaml_bombs.py."""
    for text, words in NOT_OURS.items():
        (tmp_path / "file.yaml").write_text(text)
        with pytest.raises(JobError, match=words):
            READERS[reader](tmp_path / "file.yaml")


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_by_every_reader(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"a: \xff")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    for path, words in (
        (tmp_path / "pipe", "is a pipe, not a regular file"),
        (Path("/dev/zero"), "is a device, not a regular file"),
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "huge", r"is larger than 4\.0 MiB"),
        (tmp_path / "binary", "not a text file"),
        (tmp_path / "no\0name", "null"),
    ):
        with pytest.raises(JobError, match=words):
            READERS[reader](path)


def test_a_pipe_of_the_shell_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `horizonml train <(COMMAND)`, which must not be waited for without end either."""
    read, write = os.pipe()
    feeder = threading.Thread(target=lambda: (os.write(write, b"epochs: 3"), os.close(write)))
    feeder.start()
    assert load(Path(f"/dev/fd/{read}")).epochs == 3
    feeder.join()
    os.close(read)
    monkeypatch.setattr(base, "_SECONDS", 0.1)
    read, write = os.pipe()
    with pytest.raises(JobError, match="delivered no end within"):
        load(Path(f"/dev/fd/{read}"))
    os.close(read)
    os.close(write)


def test_ordinary_yaml_may_use_aliases_and_merges() -> None:
    job = parse("model: {options: {a: &a {x: 1e-3}, b: {<<: *a, day: 2024-01-01}}}", "job.yaml")
    assert job.model.options == {"a": {"x": 0.001}, "b": {"x": 0.001, "day": "2024-01-01"}}
    assert job.digest()


def test_long_values_are_shortened_in_errors() -> None:
    with pytest.raises(JobError) as caught:
        parse(f"seed: {'x' * 10_000}", "job.yaml")
    assert len(str(caught.value)) < 250


def test_a_process_with_many_open_files_reads_jobs(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: many\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert max(opened) > 1023
        assert load(tmp_path / "job.yaml", []).name == "many"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
