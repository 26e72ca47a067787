"""Shards that are fetched while training: from a folder, and over HTTP into a cache of limited size."""

from __future__ import annotations

import functools
import io
import json
import shutil
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from horizonml.data import origin
from horizonml.data.choose import describe
from horizonml.data.dataset import NeededRows
from horizonml.data.loading import Ahead
from horizonml.data.origin import Origin, StreamShard
from horizonml.data.sampler import ShardSampler, sampler_for
from horizonml.data.spec import DataSpec
from horizonml.data.stream import write_index
from horizonml.data.workers import Threads
from horizonml.errors import DataError
from tests.programs import need_package
from tests.unit.test_data_own import loaded

EACH, SHARDS = 10, 8


def write_shard(path: Path, first: int, count: int) -> None:
    """Write samples as WebDataset does: N.jpg, N.cls and N.meta.json."""
    with tarfile.open(path, "w") as archive:
        for number in range(first, first + count):
            picture = io.BytesIO()
            Image.new("RGB", (16, 16), (2 * number, 0, 0)).save(picture, "PNG")
            files = {"png": picture.getvalue(), "cls": b"%d" % (number % 3)}
            files["meta.json"] = json.dumps({"number": number}).encode()
            for extension, content in files.items():
                member = tarfile.TarInfo(f"{number:05d}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards with an index, and a cache for what is fetched."""
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "cache"))
    shards = tmp_path / "shards"
    shards.mkdir()
    for shard in range(SHARDS):
        write_shard(shards / f"{shard:02d}.tar", EACH * shard, EACH)
    write_index(shards, held_out=["06.tar", "07.tar"], classes=["red", "green", "blue"])
    return shards


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The shards over HTTP, and what is asked for."""
    need_package("aiohttp")
    asked: list[str] = []
    done = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            asked.append(name)
            if name == "busy.tar" and asked.count(name) < 3:
                self.send_error(503)
            elif name == "cut.tar" and asked.count(name) < 2:
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"the beginning")
            elif name == "silent.tar":
                done.wait(60)
            else:
                super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        done.set()
        http.shutdown()


def spec(path: str | Path, **fields: Any) -> DataSpec:
    given = {"inputs": ["png"], "targets": ["cls"], "image_size": 8, **fields}
    return DataSpec(name="stream", path=str(path), **given)


def numbers(images: torch.Tensor) -> list[int]:
    """Return which samples these are, by their shade of red."""
    return ((images[:, 0].mean((1, 2)) * 0.226 + 0.449) * 255 / 2).round().long().tolist()


def test_samples_of_a_folder_of_shards(folder: Path) -> None:
    data = loaded(spec(folder))
    assert (data.info.train, data.info.held_out, data.info.outputs) == (60, 20, 3)
    assert data.info.shards == (EACH,) * 6
    every = torch.arange(60)
    assert numbers(data.train.inputs(every)) == list(range(60))
    assert torch.equal(data.train.targets(every), every % 3)
    assert numbers(data.held_out.inputs(torch.arange(20))) == list(range(60, 80))
    meta = loaded(spec(folder, targets=["meta.json"], classes=3), inputs=False)
    assert meta.train.targets(torch.tensor([41]))["number"].tolist() == [41]
    (folder / "index.json").unlink()  # the shards are counted, and the last of them held out
    plain = loaded(spec(folder, classes=3))
    assert (plain.info.train, plain.info.held_out) == (60, 20)


def test_shards_are_fetched_once_and_kept_within_a_limit(
    folder: Path, server: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, asked = server
    size = (folder / "00.tar").stat().st_size
    data = loaded(spec(url, disk=3 * size))
    asked.clear()
    assert numbers(data.train.inputs(torch.arange(20))) == list(range(20))
    assert sorted(asked) == ["01.tar"]  # 00 was fetched to be described
    for first in range(0, 60, 10):
        assert numbers(data.train.inputs(torch.arange(first, first + 10))) == list(range(first, first + 10))
        kept = list((tmp_path / "cache").rglob("*.tar"))
        assert sum(file.stat().st_size for file in kept) <= 3 * size
    again = loaded(spec(url, disk=3 * size))
    asked.clear()
    again.train.inputs(torch.arange(50, 60))
    assert asked == []  # the newest shards are still there
    with pytest.raises(DataError, match=r"data.disk: .* cannot hold"):
        loaded(spec(url, disk=100)).train.inputs(torch.arange(60))


def test_a_full_disk_or_an_old_library_ends_a_download_and_leaves_no_draft(
    server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    data = loaded(spec(server[0]))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100 << 20))
    with pytest.raises(DataError, match=r"02\.tar cannot be kept in .*: less than 256.* are left on that disk"):
        data.train.inputs(torch.tensor([20]))
    assert not list((tmp_path / "cache").rglob(".*.part"))
    monkeypatch.setattr(fsspec, "__version__", "2026.4.0")
    with pytest.raises(DataError, match=r"fsspec 2026\.4\.0 is too old .*pip install 'fsspec>=2026\.6'"):
        Origin("https://example.org/shards")


def test_jobs_from_the_network_share_one_limit_however_many_urls_they_name(
    folder: Path, server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    size = (folder / "00.tar").stat().st_size
    loaded(spec(url, disk=9 * size)).train.inputs(torch.arange(10))
    own = set((tmp_path / "cache").rglob("*.tar"))
    monkeypatch.setenv("HORIZONML_FETCH_FROM", "127.0.0.1")
    for place in (url, f"{url}/.", f"{url}/./."):
        loaded(spec(place, disk=3 * size)).train.inputs(torch.arange(30))
        fetched = set((tmp_path / "cache").rglob("*.tar")) - own
        assert 0 < sum(file.stat().st_size for file in fetched) <= 3 * size
    assert all(file.exists() for file in own)


def test_shards_are_fetched_before_they_are_needed(server: tuple[str, list[str]]) -> None:
    url, asked = server
    data = loaded(spec(url))
    sampler = sampler_for(data.info, 5, seed=1)
    workers = Threads(2)
    ahead = Ahead(
        lambda number: data.batch(True, sampler.indices(0, number)), range(12),
        lambda size, _: NeededRows([(0, size)]), workers, data.info, 1, 1 << 20,
    )  # fmt: skip
    asked.clear()
    ahead.take(0)
    shards = {int(index) // EACH for index in sampler.indices(0, 8)}
    done = threading.Event()
    for _ in range(200):
        if {f"{shard:02d}.tar" for shard in shards} - {"00.tar"} <= set(asked):
            break
        done.wait(0.05)
    else:
        pytest.fail(f"the shards {shards} of a step to come were not fetched, only {asked}")
    ahead.close()
    workers.close()


def test_an_epoch_keeps_to_a_few_shards_at_a_time_and_is_the_same_for_everybody() -> None:
    sampler = ShardSampler([10] * 12, 8, seed=3)
    order = torch.cat([sampler.indices(0, step) for step in range(sampler.steps_per_epoch)])
    assert sorted(order.tolist()) == list(range(120))
    for start in range(0, 120, 40):
        assert len({index // 10 for index in order[start : start + 40].tolist()}) == 4
    later = ShardSampler([10] * 12, 8, seed=3)
    assert torch.equal(later.indices(1, 7), torch.cat([sampler.indices(1, 7)]))  # resumed in the middle of an epoch
    assert not torch.equal(sampler.indices(1, 0), sampler.indices(0, 0))


def test_what_is_wrong_with_shards_is_told(folder: Path, server: tuple[str, list[str]], tmp_path: Path) -> None:
    url, _ = server
    with pytest.raises(DataError, match=r"sample 0 cannot be read: 00.tar: .* png, cls, .*, but 'jpg' is needed"):
        describe(spec(folder, inputs=["jpg"]))
    assert describe(spec(tmp_path / "nowhere")) is None
    with (folder / "02.tar").open("r+b") as file:
        file.seek(600)
        file.write(b"damaged")
    with pytest.raises(DataError, match=r"02.tar is damaged: its checksum is \w+, but the index has"):
        loaded(spec(url)).train.inputs(torch.arange(20, 30))
    (folder / "index.json").write_text('{"train": 3}')
    with pytest.raises(DataError, match=r"index.json is no index of shards"):
        describe(spec(folder))


def test_a_server_in_trouble_is_asked_again_until_the_run_ends_with_its_address(
    folder: Path, server: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "_PAUSE", 0.05)
    url, asked = server
    for name, attempts in (("busy.tar", 3), ("cut.tar", 2)):
        shutil.copy(folder / "03.tar", folder / name)
        Origin(url).fetch(StreamShard(name, EACH), tmp_path / name)
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
        assert asked.count(name) == attempts
    with pytest.raises(DataError, match=r"/99.tar is not there, although the index lists it"):
        Origin(url).fetch(StreamShard("99.tar", EACH), tmp_path / "shard")
    assert asked.count("99.tar") == 1  # what is not there is asked for once
    monkeypatch.setattr(origin, "_SILENCE", 0.2)
    with pytest.raises(DataError, match=r"/silent.tar cannot be fetched: it does not answer; see whether the server"):
        Origin(url, patience=0.1).fetch(StreamShard("silent.tar", EACH), tmp_path / "shard")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(
            DataError, match=rf"{away}/index.json cannot be fetched \(\d+ attempts in 0 s\): .*[Cc]onne"
        ):
            Origin(away, patience=0.3).index()
