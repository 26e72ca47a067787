"""Names from other ranks, from indexes, URLs and caches: none of them reaches a file outside of its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonml.data.origin import Origin
from horizonml.errors import DataError, JobError, ModelError
from horizonml.files import MOST_NAME, cache_folder, inside, staged, write_atomically
from horizonml.machine.network import may_fetch_from
from horizonml.models.download import locate
from horizonml.models.pretrained import files_of
from horizonml.models.spec import WeightsSpec
from tests.web import served

BAD = [
    "", ".", "..", "/etc/passwd", "../x.tar", "a/../../x.tar", "a/b.tar", "..\\x.tar", "C:x.tar", "x\x00.tar",
    "x\n.tar", "\x1b[2Jx.tar", ".hidden.tar", "x\u202e.tar", "\ud800.tar", "x" * (MOST_NAME + 1), "é" * MOST_NAME,
    None, 7, ["x.tar"], b"x.tar",
]  # fmt: skip


def test_a_name_that_is_a_path_hidden_or_unprintable_is_refused(tmp_path: Path) -> None:
    for name in BAD:
        with pytest.raises(ValueError, match="name of a file"):
            inside(tmp_path, name)


@given(st.text(max_size=300))
def test_whatever_name_is_accepted_lies_in_its_folder(name: str) -> None:
    folder = Path("/somewhere/folder")
    try:
        found = inside(folder, name)
    except ValueError:
        return
    assert os.path.dirname(os.path.normpath(found)) == str(folder)
    assert found.name == name


def test_a_link_to_somewhere_else_is_refused_and_one_within_the_folder_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "real").write_text("y")
    (folder / "in").symlink_to("real")
    with pytest.raises(ValueError, match="link to somewhere outside"):
        inside(folder, "out")
    assert inside(folder, "in").read_text() == "y"


def test_files_are_for_those_whom_the_umask_lets_read_them(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "a", b"x")
        with staged(tmp_path / "b") as draft:
            draft.write_bytes(b"x")
        os.umask(0o002)
        write_atomically(tmp_path / "c", b"x")
        write_atomically(tmp_path / "d", b"x", mode=0o600)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "a": 0o600, "b": 0o600, "c": 0o644, "d": 0o600,
    }  # fmt: skip


def test_a_confined_rank_fetches_from_the_internet_and_the_lobby_only() -> None:
    allowed = "10.0.0.5,fd00::5"
    for address in ("93.184.216.34", "2606:2800:220:1::1", "10.0.0.5", "fd00::5", "64:ff9b::a00:5"):
        assert may_fetch_from(address, allowed), address
    for address in (
        "10.0.0.6", "127.0.0.1", "::1", "169.254.169.254", "fe80::1%eth0", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::",
        "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::127.0.0.1", "240.0.0.1", "not an address",
    ):  # fmt: skip
        assert not may_fetch_from(address, allowed), address


def test_a_confined_rank_checks_what_a_name_resolves_to_and_where_a_redirect_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it finds out is said on its own terminal, and not in the error, which other devices read."""
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path))
    (tmp_path / "a.pth").write_bytes(b"x")
    with served(tmp_path) as (url, asked):
        port = url.rpartition(":")[2]
        spec = WeightsSpec(source=f"http://localhost:{port}/a.pth", sha256="0" * 64)
        for allowed, words in (("", "is not an address on the internet"), ("127.0.0.1", "SHA-256 2d711642b726b044")):
            monkeypatch.setenv("HORIZONML_FETCH_FROM", allowed)
            with pytest.raises(ModelError) as caught:
                locate(spec, "digits_cnn")
            assert "says why on its own terminal" in str(caught.value)
            assert words not in str(caught.value)
            assert words in capsys.readouterr().err
        assert asked == ["/a.pth"], "only the rank that may fetch from there has asked"


def index(**changes: object) -> str:
    shard = {"name": "0.tar", "samples": 3} | changes
    return json.dumps({"train": [shard], "held_out": [{"name": "1.tar", "samples": 3}]})


def test_a_streams_index_names_shards_here_with_possible_numbers_of_samples(tmp_path: Path) -> None:
    names = ("../0.tar", "/etc/0.tar", ".lock.tar", "a\n.tar", "..\\0.tar", "0.sh", 5)
    samples = (-1, 1 << 40, "9" * 5000, 1.5, None, [3], float("inf"), float("nan"))
    for content in (
        *(index(name=name) for name in names),
        *(index(samples=count) for count in samples),
        *("[" * 100_000, "null", "[]", '{"train": 3}', '{"train": [7]}', "{"),
    ):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(DataError, match="is no index of shards"):
            Origin(str(tmp_path)).index()


def test_an_index_of_weights_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    for name in ("../../secret.safetensors", "/secret.safetensors", ".x.safetensors", 3):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelError, match="is not an index of safetensors files"):
            files_of(tmp_path)


def test_an_index_of_weights_that_is_a_bomb_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ModelError, match="is not an index of safetensors files"):
        files_of(tmp_path)
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ModelError, match="it is larger than"):
        files_of(tmp_path)


def test_a_reference_in_the_cache_of_a_hub_cannot_lead_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for reference in ("../../../elsewhere", "/elsewhere", "..", "a\nb", ""):
        (refs / "main").write_text(reference)
        with pytest.raises(ModelError, match="has no model org/name"):
            locate(WeightsSpec(source="hub:org/name"), "digits_cnn")


def test_a_url_cannot_name_a_file_outside_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path))
    for path in ("..%2F..%2F.bashrc", "%2e%2e", "a%0Ab-01234567.pth", "a%00.pth", ".x-01234567.pth", "x" * 300, ""):
        with pytest.raises(ModelError, match="does not end in the name of a file"):
            locate(WeightsSpec(source=f"http://127.0.0.1:9/{path}", sha256="0" * 64), "digits_cnn")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_somebody_else_can_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home, the cache lies in the folder for temporary files, where anyone may have made it before."""
    for name in ("HORIZONML_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    own = cache_folder()
    assert own.stat().st_mode & 0o777 == 0o700

    own.chmod(0o777)
    with pytest.raises(JobError, match="HORIZONML_CACHE"):
        cache_folder()
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(JobError, match="HORIZONML_CACHE"):
        cache_folder()
