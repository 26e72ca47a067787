"""Files of jobs, plans, devices and profiles that grow while they are read: refused within bounds of memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizonml.errors import JobError
from horizonml.job.jobfile import load, parse, read_plan
from horizonml.job.schema import Job
from horizonml.planner.devices import load_cluster
from horizonml.spec.base import parse_yaml
from tests.security.bounds import bounded

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(20)
)
BOMBS = {
    "a billion laughs": LAUGHS,
    "merged laughs": "a: &a {x: 1}\nb: {<<: [" + "*a," * 300_000 + "]}",
    "many empty lists": "[" + "[]," * 1_300_000 + "]",
    "many anchors": "".join(f"a{n}: &a{n} [1]\n" for n in range(200_000)),
    "deep lists": "[" * 1_000_000,
    "deep mappings": "{a: " * 900_000,
    "deep indentation": "".join(f"{' ' * n}a:\n" for n in range(2_000)),
    "a long number": f"seed: {'9' * 1_000_000}",
    "a number to the base of 60": f"seed: !!int {'1:' * 1_000_000}1",
    "a fraction to the base of 60": f"seed: !!float {'1:' * 1_000_000}1.5",
    "an endless alias": "a: &a [*a]",
    "a tag of Python": "a: !!python/object/apply:os.system [echo hacked]",
    "a binary": "a: !!binary " + "A" * 1_000_000,
    "too large": "#" * (5 << 20),
}


def as_plan(file: Path) -> object:
    return read_plan(Job(), file)


@pytest.mark.slow
def test_a_bomb_is_refused_at_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    with bounded(200):
        for text in BOMBS.values():
            file.write_text(text)
            with pytest.raises(JobError, match=r"bomb\.yaml"):
                load(file)
        file.write_text(LAUGHS)
        for read in (as_plan, load_cluster):
            with pytest.raises(JobError, match=r"bomb\.yaml"):
                read(file)


def test_numbers_with_colons_are_text_and_take_no_time() -> None:
    assert parse_yaml("a: " + "1:" * 1_000_000 + "1", "x")["a"].startswith("1:1:")
    assert parse_yaml("[1:30, 0x10, 1_000, 1e-3, .5, -3, 0, 010, 0b11, 1.5e+3]", "x") == [
        "1:30", 16, 1000, 1e-3, 0.5, -3, 0, 8, 3, 1500.0,
    ]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab01:.,-&*!<>[]{}'\"\\|?#%@` \n\t\x00\x85e_~"), max_size=60))
def test_any_text_is_read_or_refused_in_our_own_words(text: str) -> None:
    with suppress(JobError):
        parse(text, "job.yaml")


def test_a_job_file_with_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    good = b"name: x\nepochs: 3\nmodel: {name: digits_cnn, freeze: [a, b]}\ndata: {name: digits}\nbatch_size: 8\n" * 2
    file = tmp_path / "job.yaml"
    for at in range(0, 90, 3):
        for byte in (0, 10, 34, 38, 42, 58, 91, 123, 128, 255):
            content = bytearray(good)
            content[at % len(good)] = byte
            file.write_bytes(content)
            with suppress(JobError):
                load(file)
