"""Checkpoints from strangers: whatever their metadata promises, they are refused by name, and nothing is exported."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from horizonml.api.exports.export import export
from horizonml.api.exports.trained import load_trained
from horizonml.errors import CheckpointError, HorizonError
from horizonml.job.jobfile import parse
from horizonml.state.shards import describe, read_metadata
from tests.checkpoints import checkpoint_of
from tests.security.bounds import bounded

JOB = "name: numbers\ndata: {name: digits}\n"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A whole checkpoint of two stages."""
    return checkpoint_of(tmp_path / "run", parse(JOB, "job"))[0]


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a checkpoint says of itself."""
    file = path / "checkpoint.json"
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))


def resaved(path: Path, stage: int, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a shard's tensors, and describe it as it then is."""
    shard = path / f"stage-{stage}.safetensors"
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    known = describe(shard, len(tensors)).model_dump()
    rewritten(path, lambda metadata: metadata["shards"].update({shard.name: known}))


def refused(path: Path, *said: str) -> None:
    """Assert that nobody takes a checkpoint, and that the error names the file."""
    out = path.parents[3] / "out.safetensors"
    with bounded(300):
        for use in (load_trained, lambda source: export(source, out, card=False)):
            with pytest.raises(CheckpointError) as caught:
                use(path)
            assert str(path) in str(caught.value)
            assert all(words in str(caught.value) for words in said), caught.value
    assert not out.exists()


def test_a_shard_of_another_run(made: Path, tmp_path: Path) -> None:
    other, _ = checkpoint_of(tmp_path / "other", parse(JOB + "seed: 7\n", "job"))
    shutil.copy(other / "stage-1.safetensors", made / "stage-1.safetensors")
    refused(made, "stage-1.safetensors is damaged", "SHA-256")


def test_a_shard_elsewhere_by_a_link(made: Path) -> None:
    shutil.move(made / "stage-1.safetensors", made.parent / "secret")
    for target in (made.parent / "secret", "/dev/zero", "/proc/self/mem"):
        (made / "stage-1.safetensors").unlink(missing_ok=True)
        (made / "stage-1.safetensors").symlink_to(target)
        refused(made, "link to somewhere outside")


def test_a_tensor_that_two_shards_have_or_none(made: Path) -> None:
    first = load_file(made / "stage-0.safetensors")
    name = next(iter(first))
    resaved(made, 1, lambda tensors: tensors.update({name: torch.zeros(2)}))
    refused(made, "which another shard has, too")
    rewritten(made, lambda metadata: metadata["shards"]["stage-0.safetensors"].update(tensors=len(first) + 1))
    refused(made, f"has {len(first)} tensors instead of {len(first) + 1}")


def test_a_tensor_of_another_shape_or_dtype(made: Path, tmp_path: Path) -> None:
    resaved(made, 1, lambda tensors: tensors.update({"model/head.bias": torch.zeros(1 << 10)}))
    with pytest.raises(CheckpointError, match=r"head.bias"):
        load_trained(made)
    resaved(made, 1, lambda tensors: tensors.update({"model/head.bias": torch.zeros(10, dtype=torch.int64)}))
    with suppress(HorizonError):
        assert load_trained(made).module.state_dict()["head.bias"].dtype == torch.float32


def test_a_tensor_that_the_model_does_not_have(made: Path) -> None:
    resaved(made, 1, lambda tensors: tensors.update({"model/backdoor": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match="the model has no backdoor"):
        load_trained(made)


def test_a_tensor_that_is_not_there_is_never_exported_with_its_initial_values(made: Path, tmp_path: Path) -> None:
    """With and without the state that the optimizer had for it."""
    resaved(made, 1, lambda tensors: tensors.pop("model/head.weight"))
    for target in ("model.pt", "model.safetensors", "model.onnx", "model.pt2"):
        with pytest.raises(CheckpointError, match=r"has no values for head\.weight"):
            export(made, tmp_path / target)
        assert not (tmp_path / target).exists()
    resaved(made, 0, lambda tensors: tensors.pop("model/conv1a.weight"))
    refused(made, "has no values for conv1a.weight")


def test_metadata_that_is_a_bomb_takes_little_memory(made: Path) -> None:
    twice = (made / "checkpoint.json").read_text().replace("{", '{"step": 1, ', 1)
    bombs = (twice, "[" * (1 << 20), '{"a": ' * 100_000, "[" + "[]," * (8 << 20),
             '{"step": 1e999}', '{"format": ' + "9" * 5000 + "}", "\xff" * 100, "null")  # fmt: skip
    with bounded(300):
        for content in bombs:
            (made / "checkpoint.json").write_text(content)
            with pytest.raises(CheckpointError, match=r"checkpoint\.json is missing or damaged"):
                read_metadata(made)
    refused(made, "checkpoint.json is missing or damaged")


HOSTILE = [
    None, True, -1, 0, 1 << 62, 1e308, float("inf"), float("nan"), "", "\x1b[2J", "../x", "os:system", [], {}, [[]],
]  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value inside of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in leaves(one, (*path, key)))]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # a model of no classes is harmless
def test_any_value_deep_in_the_metadata_is_taken_or_refused(made: Path) -> None:
    good = (made / "checkpoint.json").read_text()
    places = leaves(json.loads(good))[1:]
    dice = random.Random(31)
    for place in dice.sample(places, min(len(places), 110)):
        metadata = json.loads(good)
        target = metadata
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = dice.choice(HOSTILE)
        (made / "checkpoint.json").write_text(json.dumps(metadata))
        with suppress(HorizonError):
            load_trained(made)


def test_a_shards_header_that_lies_is_refused_though_its_digest_is_right(made: Path) -> None:
    """Whoever writes the shard writes its digest, too: the header is checked on its own."""
    shard = made / "stage-1.safetensors"
    good, dice = shard.read_bytes(), random.Random(2)
    count = len(load_file(shard))
    length = int.from_bytes(good[:8], "little")
    lies = [(1 << 63).to_bytes(8, "little") + good[8:], good[:8], b"", b"\x00" * 8, good[: 8 + length // 2]]
    lies += [good[:8] + bytes(dice.randrange(256) for _ in range(length)) + good[8 + length :] for _ in range(3)]
    for _ in range(12):
        content = bytearray(good)
        content[dice.randrange(8 + length)] = dice.randrange(256)
        lies.append(bytes(content))
    with bounded(150):
        for content in lies:
            shard.write_bytes(content)
            known = describe(shard, count).model_dump()
            rewritten(made, lambda metadata, known=known: metadata["shards"].update({shard.name: known}))  # type: ignore[misc]
            with suppress(HorizonError):  # a changed name or an exchanged shape may still be well-formed
                load_trained(made)
