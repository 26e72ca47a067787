"""How data travels to devices that lack it: names, sizes, hashes, and a disk that is full."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonml.errors import DataError
from horizonml.rendezvous.device_messages import FilesRequest
from horizonml.rendezvous.shared_files import FileServer, Item, Listing, check_name, fetch, listing
from horizonml.rendezvous.wire import Fields, fields_of, read
from tests.distributed.processes import wait_for

GOOD = ["a", "a.jpg", "train/cats/0 (1).jpg", "été/字.png", "a-b_c+d=e,f@g[1]", "1.tar", "_x", "x's"]
BAD: list[Any] = [
    "", "/etc/passwd", "..", "../x", "a/../b", "a//b", "a/", ".hidden", "a/.ssh/key", "a\\b", "C:\\x", "a\0b", "a\nb",
    "a\x1b[2J", "~/x", "-rf", "a;b", "a|b", "$(x)", "`x`", "a*", '"x"', "x ", "x.", "con", "a/NUL.txt", "a" * 201,
    "/".join("a" * 33), "a/" * 600 + "b", "a\u202eb", None, ["a"],
]  # fmt: skip


def no_wait(done: int, size: int) -> None:
    assert 0 <= done <= size


def no_progress(done: int) -> None:
    assert done >= 0


def test_names_that_lead_elsewhere_or_are_odd_are_refused() -> None:
    for name in GOOD:
        assert str(check_name(name)) == name
    for name in BAD:
        with pytest.raises(ValueError, match=r"name|folders"):
            check_name(name)


@given(st.text())
def test_whatever_name_is_taken_stays_below_the_folder(name: str) -> None:
    try:
        path = check_name(name)
    except ValueError:
        return
    assert not path.is_absolute()
    assert ".." not in path.parts
    assert Path("/data/x").joinpath(path).resolve().is_relative_to("/data/x")
    assert str(path).isprintable()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with some files, an empty one among them, a hidden one, and a link that leads out of it."""
    folder = tmp_path / "data"
    for name, content in {"a/1.bin": b"1" * 300_000, "a/2.bin": b"2", "empty": b"", ".hidden": b"x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    return folder


class Source(FileServer):
    """Files that are shared, asked as the service is."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        wait_for(self._ready.is_set, "the hashes of the files", 10)

    def ask(self, request: Fields) -> Fields:
        return json.loads(json.dumps(fields_of(self.answer(read(FilesRequest, request)))))  # type: ignore[no-any-return]


def test_a_folder_arrives_whole_and_is_not_fetched_twice(data: Path, tmp_path: Path) -> None:
    source = Source(data)
    assert (source.files, source.left_out, source.bytes) == (3, 1, 300_001)
    asked: list[Fields] = []

    def ask(request: Fields) -> Fields:
        asked.append(request)
        return source.ask(request)

    found = listing(ask, no_wait)
    seen: list[int] = []
    there = fetch(ask, found, tmp_path / "cache", seen.append)
    assert sorted(path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()) == [
        "a/1.bin",
        "a/2.bin",
        "empty",
    ]
    assert all((there / name).read_bytes() == (data / name).read_bytes() for name in ("a/1.bin", "a/2.bin", "empty"))
    assert seen == sorted(seen)
    assert seen[-1] == 300_001
    asked.clear()
    assert fetch(ask, found, tmp_path / "cache", no_progress) == there
    assert not asked


def test_a_single_file_arrives_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    source = Source(tmp_path / "table.csv")
    there = fetch(source.ask, listing(source.ask, no_wait), tmp_path / "cache", no_progress)
    assert (there.name, there.read_text()) == ("table.csv", "a,b\n1,2\n")


def test_a_device_that_hashes_its_files_and_gets_no_further_is_not_awaited_for_ever() -> None:
    waits: list[int] = []
    dones = iter([0, 1, 2])

    def ask(request: Fields) -> Fields:
        return {"ready": False, "done": next(dones, 2), "bytes": 10}

    with pytest.raises(DataError, match="has not hashed more than 2 B of 10 B"):
        listing(ask, lambda done, size: waits.append(done), patience=0.2)
    assert waits[:3] == [0, 1, 2]


def test_many_files_are_listed_in_several_answers(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(250):
        (folder / f"{number}.txt").write_text(str(number))
    source = Source(folder)
    found = listing(source.ask, no_wait)
    assert len(found.items) == 250
    assert len({item.sha256 for item in found.items}) == 250


def test_what_was_fetched_before_a_connection_broke_is_kept(data: Path, tmp_path: Path) -> None:
    source, left = Source(data), [2]

    def breaks(request: Fields) -> Fields:
        if request["file"] is not None:
            if request["file"] == 1:
                raise RuntimeError("the connection is lost")
            left[0] -= 1
        return source.ask(request)

    found = listing(breaks, no_wait)
    with pytest.raises(RuntimeError):
        fetch(breaks, found, tmp_path / "cache", no_progress)
    assert not (tmp_path / "cache" / found.id).exists()
    files: list[object] = []

    def works(request: Fields) -> Fields:
        files.append(request.get("file"))
        return source.ask(request)

    assert fetch(works, found, tmp_path / "cache", no_progress).is_dir()
    assert 0 not in files, "the first file was there already"


def answers(*items: list[Any], piece: bytes = b"1234", **changes: Any) -> Any:
    """What answers with a list of these files, and with a piece of them."""
    size = sum(item[1] for item in items if isinstance(item[1], int))
    page = {"ready": True, "files": list(items), "count": len(items), "bytes": size, "single": False} | changes

    def ask(request: Fields) -> Fields:
        return page if request["list"] is not None else {"piece": base64.b64encode(piece).decode()}

    return ask


HASH = "0" * 64


def test_a_list_that_lies_is_refused() -> None:
    for ask, words in (
        (answers(["../x", 1, HASH]), "cannot be the name of a file"),
        (answers(["x", -1, HASH], bytes=1), "has no size"),
        (answers(["x", 1 << 60, HASH], bytes=1), "has no size"),
        (answers(["x", True, HASH]), "has no size"),
        (answers(["x", 1, "0" * 63]), "has no SHA-256"),
        (answers(["x", 1]), "an entry of its list is not that of a file"),
        (answers(["x", 1, HASH], ["X", 1, HASH]), "two of its files have one name"),
        (answers(["x", 1, HASH], bytes=2), "it said 2"),
        (answers(["x", 1, HASH], count=1_000_000), "count must be"),
        (answers(["x", 1, HASH], ["y", 1, HASH], count=1), "as many as it says"),
        (answers(["x", 1, HASH], files=[], count=1), "as many as it says"),
    ):
        with pytest.raises(DataError, match=words):
            listing(ask, no_wait)


def test_files_that_are_not_what_was_announced_are_refused_and_not_kept(tmp_path: Path) -> None:
    for ask, words in (
        (answers(["x", 4, HASH]), "not what its SHA-256 says"),
        (answers(["x", 3, HASH]), "does not have 3 bytes"),
        (answers(["x", 4, HASH], piece=b""), "does not have 4 bytes"),
    ):
        found = listing(ask, no_wait)
        with pytest.raises(DataError, match=words):
            fetch(ask, found, tmp_path / "cache", no_progress)
        assert not (tmp_path / "cache" / found.id).exists()
        assert not any(path.name == "x" for path in tmp_path.rglob("*"))


def test_more_data_than_the_disk_has_room_for_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    huge = Listing([Item("x", 1 << 49, HASH)], single=False)
    with pytest.raises(DataError, match=r"the data takes 524288\.0 GiB, and .* free"):
        fetch(answers(), huge, tmp_path / "cache", no_progress)
    assert not (tmp_path / "cache").exists()


def test_a_file_that_changes_while_it_is_shared_is_refused(data: Path, tmp_path: Path) -> None:
    source = Source(data)
    found = listing(source.ask, no_wait)
    (data / "a" / "1.bin").write_bytes(b"shorter")
    with pytest.raises(ValueError, match=r"a/1\.bin has changed while it was shared"):
        fetch(source.ask, found, tmp_path / "cache", no_progress)


def test_data_whose_names_cannot_travel_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "a;b").write_text("x")
    with pytest.raises(DataError, match="rename it"):
        FileServer(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files"):
        FileServer(tmp_path / "empty")
