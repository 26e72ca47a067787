import hashlib
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from filelock import FileLock
from PIL import ExifTags, Image

from horizonml.data import files
from horizonml.data.choose import agree, describe, load
from horizonml.data.dataset import Data
from horizonml.data.files import FolderSource, load_torchvision, pixels_of, read_picture
from horizonml.data.sampler import Sampler
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError
from horizonml.machine.torchvision import import_torchvision
from tests.records import image_info


def loaded(spec: DataSpec, cache: Path, channels: int | None = None) -> Data:
    info = describe(spec, channels)
    assert info is not None
    return load(spec, info, cache)


def test_the_embedded_digits_are_real(tmp_path: Path) -> None:
    data = loaded(DataSpec(), tmp_path)
    assert (data.info.train, data.info.held_out, data.info.inputs[0].shape) == (1438, 359, (1, 8, 8))
    everything = torch.arange(data.info.train)
    images, labels = data.train.inputs(everything), data.train.targets(everything)
    assert images.shape == (1438, 1, 8, 8)
    assert abs(float(images.mean())) < 0.05
    assert abs(float(images.std()) - 1) < 0.05
    assert sorted(set(labels.tolist())) == list(range(10))
    # The pictures belong to their labels: the nearest class mean already finds most of the held-out ones.
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)])
    others = data.held_out.inputs(torch.arange(359))
    guesses = (others[:, None] - means).flatten(2).norm(dim=2).argmin(1)
    assert float((guesses == data.held_out.targets(torch.arange(359))).float().mean()) > 0.85
    members = [*data.train._members.tolist(), *data.held_out._members.tolist()]
    assert sorted(members) == list(range(1797))


def test_a_rank_keeps_only_what_its_stage_needs(tmp_path: Path) -> None:
    for images, labels in ((True, False), (False, True), (False, False)):
        info = describe(DataSpec())
        assert info is not None
        data = load(DataSpec(), info, tmp_path, inputs=images, targets=labels)
        for wanted, read in ((images, data.train.inputs), (labels, data.held_out.targets)):
            if wanted:
                assert len(read(torch.arange(3))) == 3
            else:
                with pytest.raises((AssertionError, IndexError)):
                    read(torch.arange(3))


def test_fewer_samples_and_other_shapes(tmp_path: Path) -> None:
    data = loaded(DataSpec(samples=100, image_size=12), tmp_path, channels=3)
    assert data.info == image_info(10, (3, 12, 12), 100, 359)
    images = data.train.inputs(torch.arange(5))
    assert images.shape == (5, 3, 12, 12)
    assert torch.equal(images[:, 0], images[:, 2])


def test_synthetic_data_has_any_shape_and_repeats_itself(tmp_path: Path) -> None:
    spec = DataSpec(name="synthetic", samples=50_000, classes=7, image_size=16, channels=1)
    data = loaded(spec, tmp_path)
    assert data.info == image_info(7, (1, 16, 16), 50_000, 10_000)
    picked = torch.tensor([3, 49_999])
    assert torch.equal(data.train.inputs(picked), loaded(spec, tmp_path).train.inputs(picked))
    assert data.train.targets(picked).max() < 7
    images = data.train.inputs(torch.arange(10))
    assert torch.equal(data.train.augment(images, 10, 0, seed=5), images)


def test_augmentation_shifts_and_mirrors_pixels_alike_whoever_holds_the_sample(tmp_path: Path) -> None:
    data = loaded(DataSpec(name="synthetic", samples=64, image_size=16, channels=1, augment=True), tmp_path)
    images = torch.zeros(200, 1, 16, 16)
    images[:, 0, 8, 4] = 1
    whole = data.train.augment(images, 200, 0, seed=1)
    assert torch.equal(whole[4:7], data.train.augment(images[4:7], 200, 4, seed=1))
    assert not torch.equal(whole, data.train.augment(images, 200, 0, seed=6))
    moved = whole.flatten(1).argmax(1)
    rows, columns = moved // 16, moved % 16
    assert set(rows.tolist()) == {6, 7, 8, 9, 10}
    assert set(columns.tolist()) == {2, 3, 4, 5, 6, 9, 10, 11, 12, 13}


def test_wishes_that_the_data_cannot_fulfil() -> None:
    for spec, words in (
        (DataSpec(samples=1439), "data.samples: 1439, but digits has 1438"),
        (DataSpec(holdout=0.9999), "leaves no training samples"),
        (DataSpec(name="cifar10", samples=50_001), "cifar10 has 50000"),
    ):
        with pytest.raises(DataError, match=words):
            agree([describe(spec)], spec)


def test_ranks_must_see_the_same_data() -> None:
    one, other = image_info(2, (3, 8, 8), 10, 2), image_info(2, (3, 8, 8), 11, 2)
    spec = DataSpec(name="folder", folder="/data")
    assert agree([None, one, one], spec) == one
    with pytest.raises(DataError, match=r"rank 1 sees 11 training and 2 held-out samples"):
        agree([one, other], spec)
    with pytest.raises(DataError, match=r"rank 2 sees other content than rank 0, of the same size"):
        agree([one, None, replace(one, encoding={"words": ["a"]})], spec)
    with pytest.raises(DataError, match="not a directory on any rank"):
        agree([None, None], spec)


# Files -----------------------------------------------------------------------------------------------------------


def write_images(folder: Path, count: int, value: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (20, 10 + number), (value, 0, 0)).save(folder / f"{number}.png")


def test_a_folder_of_images(tmp_path: Path) -> None:
    write_images(tmp_path / "cat", 5, 50)
    write_images(tmp_path / "dog", 5, 200)
    data = loaded(DataSpec(name="folder", folder=str(tmp_path), image_size=8), tmp_path)
    assert data.info == replace(image_info(2, (3, 8, 8), 8, 2), labels=("cat", "dog"))
    everything = torch.arange(8)
    images, labels = data.train.inputs(everything), data.train.targets(everything)
    assert images.shape == (8, 3, 8, 8)
    assert torch.equal(images[:, 0].mean((1, 2)) > 0.5, labels == 1)


def test_a_folder_with_its_own_test_images(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 3)):
        write_images(tmp_path / part / "cat", count, 50)
        write_images(tmp_path / part / "dog", count, 200)
    data = loaded(DataSpec(name="folder", folder=str(tmp_path), image_size=8), tmp_path)
    assert (data.info.train, data.info.held_out) == (8, 6)
    assert data.held_out.targets(torch.arange(6)).tolist() == [0, 0, 0, 1, 1, 1]


def test_folders_and_images_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    spec = DataSpec(name="folder", folder=str(tmp_path), image_size=8)
    assert describe(DataSpec(name="folder", folder=str(tmp_path / "nowhere"))) is None
    write_images(tmp_path / "cat", 3, 50)
    with pytest.raises(DataError, match="one folder of images per class"):
        describe(spec)
    (tmp_path / "dog").mkdir()
    with pytest.raises(DataError, match="no images in"):
        describe(spec)
    for number in range(3):
        (tmp_path / "dog" / f"{number}.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"\.png is not a readable image"):
        loaded(spec, tmp_path).train.inputs(torch.arange(5))


SHADES = torch.arange(256).reshape(16, 16)  # a picture with every shade of grey


def test_a_picture_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would let Ghostscript draw this one, whatever its name is."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "x.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(DataError, match="no BMP, GIF, JPEG"):
        read_picture(tmp_path / "x.png", lambda image: pixels_of(image, 8))
    assert not (tmp_path / "started").exists()


SIDEWAYS = Image.Exif()
SIDEWAYS[ExifTags.Base.Orientation] = 6  # it is to be turned clockwise before it is shown


def pixels(file: Path, size: int = 16) -> torch.Tensor:
    return FolderSource([(file, 0)], [], size).images(torch.tensor([0]))[0]


def test_grey_values_of_more_than_8_bits_are_scaled(tmp_path: Path) -> None:
    values, tiff, png = SHADES.float().numpy() / 255, tmp_path / "0.tiff", tmp_path / "0.png"
    expected = SHADES.to(torch.uint8).expand(3, 16, 16)
    Image.fromarray(values).save(tiff)  # fractions
    assert torch.equal(pixels(tiff), expected)
    Image.fromarray((values * 65535).astype("int32")).save(tiff)
    assert torch.equal(pixels(tiff), expected)
    Image.fromarray((values * 65535).astype("uint16")).save(png)
    assert torch.equal(pixels(png), expected)
    Image.fromarray((values * 65535).astype("uint16")).save(png, transparency=7 * 257)
    assert torch.equal(pixels(png), torch.where(expected == 7, 255, expected))
    Image.fromarray(SHADES.float().numpy()).save(tiff)
    with pytest.raises(DataError, match=r"0\.tiff is .* its grey values are 0 to 255, where .* 1 \(white\) can"):
        pixels(tiff)


def test_pictures_are_turned_as_their_orientation_says_and_laid_over_white(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    Image.fromarray(SHADES.numpy().astype("uint8")).save(file, exif=SIDEWAYS)
    assert torch.equal(pixels(file)[0], SHADES.rot90(-1).to(torch.uint8))
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    half.paste((0, 0, 0, 255), (0, 0, 2, 4))
    for picture in (half, half.convert("LA"), half.quantize(4)):
        picture.save(file)
        assert pixels(file, 4)[0].tolist() == [[0, 0, 255, 255]] * 4


def test_torchvisions_data_sets_are_read_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's own readers on a few samples in each format; only the published checksums are replaced."""
    from scipy.io import savemat

    sets, values = import_torchvision().datasets, numpy.arange(10, dtype=numpy.uint8)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = numpy.ones((10, 28, 28), dtype=numpy.uint8) * values[:, None, None]
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, 10, 28, 28) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 10) + values.tobytes())
    base, sums = tmp_path / sets.CIFAR10.base_folder, dict[str, str]()
    base.mkdir()
    rows = {"data": numpy.ones((2, 3072), dtype=numpy.uint8), "labels": [4, 5]}
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, content in [*((name, rows) for name in names), ("batches.meta", {"label_names": list("abcdefghij")})]:
        (base / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((base / name).read_bytes()).hexdigest()
    for attribute in ("train_list", "test_list"):
        found = [[name, sums[name]] for name, _ in getattr(sets.CIFAR10, attribute)]
        monkeypatch.setattr(sets.CIFAR10, attribute, found)
    monkeypatch.setattr(sets.CIFAR10, "meta", {**sets.CIFAR10.meta, "md5": sums["batches.meta"]})
    url, name, _ = sets.SVHN.split_list["test"]
    savemat(tmp_path / name, {"X": numpy.ones((32, 32, 3, 2), dtype=numpy.uint8), "y": numpy.array([[10], [3]])})
    digest = hashlib.md5((tmp_path / name).read_bytes()).hexdigest()
    monkeypatch.setattr(sets.SVHN, "split_list", {"test": [url, name, digest]})
    for name, train, shape, labels in (
        ("mnist", True, (10, 1, 28, 28), [*range(10)]),
        ("cifar10", True, (10, 3, 32, 32), [4, 5] * 5),
        ("svhn", False, (2, 3, 32, 32), [0, 3]),  # "10" stands for the digit 0
    ):
        source = load_torchvision(name, tmp_path, train=train, download=False)
        every = torch.arange(len(source))
        assert source.images(every).shape == shape
        assert source.labels(every).tolist() == labels
    (base / "data_batch_3").write_bytes(b"cut short")
    with pytest.raises(DataError, match="cifar10 is missing or corrupt"):
        load_torchvision("cifar10", tmp_path, train=True, download=False)


def test_missing_data_without_download_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"missing or corrupt in {tmp_path}.*data\.folder"):
        loaded(DataSpec(name="cifar10", folder=str(tmp_path), download=False), tmp_path)


def test_one_process_downloads_while_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.2)
    with FileLock(tmp_path / ".cifar10.lock"), pytest.raises(DataError, match="another process has been downloading"):
        loaded(DataSpec(name="cifar10", folder=str(tmp_path)), tmp_path)


def test_a_folder_that_cannot_be_written_to_needs_no_lock() -> None:
    with files._one_at_a_time(Path("/proc/self"), "mnist"):
        assert not list(Path("/proc/self").glob("*.lock"))


# Sampling --------------------------------------------------------------------------------------------------------


def test_every_sample_once_an_epoch() -> None:
    for samples, batch, sizes in ((10, 3, {3, 1}), (12, 3, {3}), (2, 5, {2})):
        sampler = Sampler(samples, batch, seed=1)
        batches = [sampler.indices(4, step) for step in range(sampler.steps_per_epoch)]
        assert sorted(torch.cat(batches).tolist()) == list(range(samples))
        assert {len(one) for one in batches} == sizes


def test_sampling_depends_on_seed_and_epoch_and_not_on_the_past() -> None:
    sampler = Sampler(100, 10, seed=1)
    first = [sampler.indices(0, step) for step in range(10)]
    sampler.indices(7, 2)
    assert torch.equal(sampler.indices(0, 3), first[3])
    assert torch.equal(Sampler(100, 10, seed=1).indices(0, 9), first[9])
    assert not torch.equal(Sampler(100, 10, seed=2).indices(0, 0), first[0])
    assert not torch.equal(sampler.indices(1, 0), first[0])
