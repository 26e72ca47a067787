"""Data from strangers: pictures, archives, arrays, tables and tokenizers that are damaged on purpose, or bombs."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from horizonml.data.files import MOST_PIXELS, FolderSource, pixels_of, read_picture
from horizonml.data.hub import open_hub
from horizonml.data.origin import StreamShard
from horizonml.data.spec import DataSpec
from horizonml.data.stream import Samples, table_of
from horizonml.data.table import describe as describe_table
from horizonml.data.text import FromFile
from horizonml.data.text import describe as describe_text
from horizonml.errors import DataError, HorizonError
from tests.programs import need_package
from tests.security.bounds import bounded

TIMES = 80  # changed copies of each file


def mutations(good: bytes, seed: int = 0, times: int = TIMES) -> Iterator[bytes]:
    """Yield copies of a file that are cut, or have bytes flipped, replaced, repeated or exchanged by large numbers."""
    dice = random.Random(seed)
    yield b""
    for _ in range(times):
        content = bytearray(good)
        for _ in range(dice.choice((1, 1, 2, 5))):
            place = dice.randrange(len(content)) if content else 0
            match dice.randrange(5):
                case 0:
                    del content[place:]
                case 1 if content:
                    content[place] ^= 1 << dice.randrange(8)
                case 2 if content:
                    content[place] = dice.choice((0, 9, 10, 34, 48, 57, 127, 255))
                case 3:
                    content[place : place + 4] = struct.pack(">I", dice.choice((0, 0x7FFFFFFF, 0xFFFFFFFF)))
                case 4:
                    content[place:place] = content[place : place + 64]
        yield bytes(content)


def picture(kind: str) -> bytes:
    """Return a small picture as a file of this kind."""
    file = io.BytesIO()
    pixels = numpy.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", "jpeg", "tiff"])
@pytest.mark.filterwarnings("ignore")  # Pillow warns of what it finds in damaged files
def test_a_damaged_picture_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"picture.{kind}"
    source = FolderSource([(file, 0)], ["a", "b"], 8)
    with bounded(500):
        for content in mutations(picture(kind)):
            file.write_bytes(content)
            with suppress(DataError):
                assert source.images(torch.tensor([0])).shape == (1, 3, 8, 8)


def png_bomb(width: int, height: int, body: bytes) -> bytes:
    """Return a small PNG file that says it has so many pixels, with this for its content."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_a_picture_that_is_a_bomb_is_refused_before_it_is_decoded() -> None:
    black = zlib.compress(bytes(64 << 20))
    sides = [(MOST_PIXELS, 2), (65_500, 65_500), (2**31 - 1, 2**31 - 1), (1, 2**31 - 1)]
    bombs = [png_bomb(width, height, black) for width, height in sides]
    with bounded(150):
        for bomb in bombs:
            with pytest.raises(DataError):
                read_picture(io.BytesIO(bomb), lambda image: pixels_of(image, 8))


def archive() -> bytes:
    """Return a shard of three samples."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(3):
            for kind, content in (("png", picture("png")), ("cls", b"1"), ("npy", array()), ("json", b'{"a": [1, 2]}')):
                member = tarfile.TarInfo(f"{'long' * 40 if number == 2 else ''}{number}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def array() -> bytes:
    """Return an array as numpy saves it."""
    file = io.BytesIO()
    numpy.save(file, numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
    return file.getvalue()


class Cached:
    """Provides one file as that of every sample."""

    def __init__(self, kind: str, content: bytes) -> None:
        self.files = {kind: content}

    def read(self, shard: StreamShard, sample: int, extensions: list[str]) -> dict[str, bytes]:
        return self.files


def decoded(kind: str, content: bytes) -> Any:
    """Return what a stream makes of a file of a sample."""
    spec = DataSpec(name="stream", path="x", inputs=[kind], targets=["y.cls"], image_size=8)
    samples = Samples([StreamShard("0.tar", 1)], Cached(kind, content), spec, None)  # type: ignore[arg-type]
    return samples.input(0)


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        ("npy", array()),
        ("json", b'{"a": [1, 2.5, true]}'),
        ("cls", b"12"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_of_a_streams_sample_is_read_or_refused(kind: str, good: bytes) -> None:
    decoded(kind, good)
    with bounded(300):
        for content in mutations(good):
            with suppress(DataError):
                decoded(kind, content)


def numpy_header(header: str, version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header.encode()


BOMBS = [
    ("npy", numpy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }")),
    ("npy", numpy_header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }")),
    ("npy", numpy_header("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }") + b"cos\nsystem\n(S'x'\ntR."),
    ("npy", numpy_header("[" * 9000)),
    ("npy", numpy_header("x", b"\x09\x00")),
    ("npy", b"PK\x03\x04" + bytes(100)),
    ("npy", b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    ("json", b"[" * 1_000_000),
    ("json", b"9" * 100_000),
    ("json", b"[1e999, NaN, 18446744073709551616]"),
    ("cls", b"9" * 100_000),
    ("cls", b"18446744073709551616"),
]


def test_a_file_of_a_sample_that_promises_too_much_is_refused() -> None:
    with bounded(100):
        for kind, bomb in BOMBS:
            with pytest.raises(DataError, match=rf"\.{kind} file"):
                decoded(kind, bomb)


def test_a_damaged_shard_is_read_or_refused_and_no_sample_reaches_beyond_it(tmp_path: Path) -> None:
    file = tmp_path / "0.tar"
    with bounded(300):
        for content in mutations(archive(), times=200):
            file.write_bytes(content)
            with suppress(DataError):
                for sample in table_of(file):
                    assert all(size >= 0 and offset + size <= len(content) for offset, size in sample.values())


def lying_member(kind: bytes, size: int, body: bytes = b"") -> bytes:
    """Return a shard whose only member has another size than it says."""
    info = tarfile.TarInfo("0.cls")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT) + body + bytes(1024)


def test_a_shard_that_promises_too_much_takes_no_memory(tmp_path: Path) -> None:
    file = tmp_path / "0.tar"
    with bounded(100):
        for content in (
            lying_member(tarfile.REGTYPE, 1 << 50),
            lying_member(tarfile.XHDTYPE, 1 << 40),
            lying_member(tarfile.GNUTYPE_LONGNAME, 1 << 40),
            lying_member(tarfile.XHDTYPE, 512, b"999999999999 path=x\n".ljust(512, b"\0")),
            lying_member(tarfile.XHDTYPE, 512, b"0 path=x\n".ljust(512, b"\0")),
            gzip.compress(bytes(1 << 20)),
            b"\0" * (1 << 20),
        ):
            file.write_bytes(content)
            with suppress(DataError):
                assert table_of(file) == []


def test_members_that_are_no_files_are_no_samples(tmp_path: Path) -> None:
    """Links, devices and holes in a shard could stand for files of this machine, or for endless ones."""
    file = tmp_path / "0.tar"
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        for kind, name in ((tarfile.SYMTYPE, "0.cls"), (tarfile.LNKTYPE, "1.cls"), (tarfile.CHRTYPE, "2.cls"),
                           (tarfile.FIFOTYPE, "3.cls"), (tarfile.DIRTYPE, "4.cls")):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        sparse = tarfile.TarInfo("5.cls")
        sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 60)}
        sparse.size = 512
        tar.addfile(sparse, io.BytesIO(b"1\n0\n1\n".ljust(512, b"\0")))
    with bounded(50):
        assert table_of(file) == []


def table(kind: str) -> bytes:
    """Return a small table as a file."""
    import pyarrow
    from pyarrow import csv, parquet

    content = pyarrow.table(
        {"a": list(range(50)), "b": [f"word{n % 3}" for n in range(50)], "y": [n / 7 for n in range(50)]}
    )
    file = io.BytesIO()
    csv.write_csv(content, file) if kind == "csv" else parquet.write_table(content, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_damaged_table_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"table.{kind}"
    spec = DataSpec(name="table", path=str(file), targets=["y"])
    file.write_bytes(table(kind))
    describe_table(spec)  # which starts the reader's threads
    with bounded(400):
        for content in mutations(table(kind)):
            file.write_bytes(content)
            with suppress(HorizonError):
                describe_table(spec)


def test_data_without_an_end_is_refused() -> None:
    from pyarrow import csv, parquet  # which open files of their own

    assert csv, parquet
    with bounded(100):
        for target in ("/dev/zero", "/proc/self/mem"):
            with pytest.raises(DataError, match=r"data\.path"):
                describe_table(DataSpec(name="table", path=target, targets=["y"]))
            with pytest.raises(DataError, match=r"data\.path"):
                describe_text(DataSpec(name="text", path=target))


def test_a_file_larger_than_memory_is_refused(tmp_path: Path) -> None:
    for name, more, describe in (("a.txt", {"name": "text"}, describe_text),
                                 ("a.csv", {"name": "table", "targets": ["y"]}, describe_table)):  # fmt: skip
        with (tmp_path / name).open("wb") as sparse:
            sparse.truncate(1 << 42)
        with bounded(50), pytest.raises(DataError, match="of memory are left"):
            describe(DataSpec(path=str(tmp_path / name), **more))  # type: ignore[arg-type]


def test_a_damaged_tokenizer_is_read_or_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    file = tmp_path / "tokenizer.json"
    good = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).to_str().encode()
    bombs = [b"[" * 100_000, json.dumps({"model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}).encode()]
    with bounded(200):
        for content in (*mutations(good), *bombs):
            file.write_bytes(content)
            with suppress(DataError):
                tokens = FromFile(str(file))
                assert tokens.size >= 0
                tokens.encode("a b")


def hub_spec(path: Path) -> DataSpec:
    return DataSpec(name="huggingface", path=str(path), inputs=["image"], targets=["y"], image_size=8)


def saved(folder: Path, **columns: list[Any]) -> Path:
    """Return a data set as `save_to_disk` writes it, whose column of pictures holds exactly these rows."""
    import datasets

    pictures = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = datasets.Features({"image": pictures, "y": datasets.Value("int64")})
    datasets.Dataset.from_dict(columns, features).save_to_disk(str(folder))
    info = json.loads((folder / "dataset_info.json").read_text())
    info["features"]["image"] = {"_type": "Image"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def test_a_row_of_a_data_set_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    need_package("datasets")
    outside, folder = tmp_path / "private.png", tmp_path / "set"
    outside.write_bytes(picture("png"))
    places = [str(outside), "../private.png", "link.png", f"file://{outside}", "https://127.0.0.1:9/x.png", "",
              f"simplecache::{outside}"]  # fmt: skip
    rows = [{"bytes": None, "path": place} for place in (*places, "own.png") for _ in range(2)]
    saved(folder, image=rows, y=[n % 2 for n in range(len(rows))])
    (folder / "link.png").symlink_to(outside)
    (folder / "own.png").write_bytes(picture("png"))
    train = open_hub(hub_spec(folder)).train
    for place in range(2 * len(places)):
        with pytest.raises(DataError, match="which is no file in the folder of the data"):
            train.input(place)
    assert train.input(len(rows) - 1).shape == (3, 8, 8)


def test_the_lists_of_files_of_a_data_set_cannot_name_one_elsewhere(tmp_path: Path) -> None:
    need_package("datasets")
    folder = saved(tmp_path / "set", image=[{"bytes": b"", "path": None}] * 4, y=[1] * 4)
    state = json.loads((folder / "state.json").read_text())
    (folder / "data-00000-of-00001.arrow").rename(tmp_path / "private.arrow")
    for name in ("../private.arrow", str(tmp_path / "private.arrow"), "link.arrow"):
        if name == "link.arrow":
            (folder / name).symlink_to(tmp_path / "private.arrow")
        (folder / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
        with pytest.raises(DataError, match="cannot be read as a Hugging Face data set"):
            open_hub(hub_spec(folder))
    (tmp_path / "private.arrow").rename(folder / "data-00000-of-00001.arrow")
    (folder / "state.json").write_text(json.dumps(state))
    assert len(open_hub(hub_spec(folder)).train) == 4
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "dataset_dict.json").write_text('{"splits": ["../set"]}')
    with pytest.raises(DataError, match="cannot be read as a Hugging Face data set"):
        open_hub(hub_spec(tmp_path / "outer"))


def test_a_readme_and_links_beside_data_files_do_not_name_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_package("datasets")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "private.csv").write_text("image,y\n" + "7,7\n" * 9)
    (folder / "train.csv").write_text("image,y\n" + "1,1\n" * 5)
    (folder / "linked.csv").symlink_to(tmp_path / "private.csv")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: ../private.csv\n---\n")
    (folder / "set.py").write_text(f"open({str(tmp_path / 'hacked')!r}, 'w')\n")
    opened = open_hub(hub_spec(folder))
    assert [int(opened.train.input(row)) for row in range(len(opened.train))] == [1] * 5
    assert not (tmp_path / "hacked").exists()


def test_a_column_that_a_library_would_open_files_for_is_refused(tmp_path: Path) -> None:
    need_package("datasets")
    folder = saved(tmp_path / "set", image=[{"bytes": None, "path": "/etc/passwd"}] * 4, y=[1] * 4)
    info = json.loads((folder / "dataset_info.json").read_text())
    for kind in ({"_type": "Audio"}, {"_type": "Video"}, {"_type": "Pdf"}):
        (folder / "dataset_info.json").write_text(json.dumps(info | {"features": info["features"] | {"image": kind}}))
        with pytest.raises(DataError, match=r"the column 'image' is .*, which is not read"):
            open_hub(hub_spec(folder))
