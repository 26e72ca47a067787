"""Fine-tuning as a user does it: weights from a server, a folder of images, and adapters for peft."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from horizonml.machine.torchvision import import_torchvision
from horizonml.models.tuning import import_peft
from horizonml.telemetry.log import read_lines
from tests import models
from tests.distributed.processes import horizonml
from tests.programs import need_package
from tests.web import served

pytestmark = pytest.mark.slow


def photos(folder: Path) -> None:
    """Two classes of images, light and dark."""
    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for index in range(20):
            pixels = torch.randint(0, 128, (32, 32, 3), generator=generator, dtype=torch.uint8) + 128 * number
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / name / f"{index}.png")


def write_resnet(path: Path, seed: int) -> str:
    """Weights of ResNet-18 for 1000 classes; returns the file's SHA-256."""
    torch.manual_seed(seed)
    torch.save(import_torchvision().models.resnet18().state_dict(), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint of a run."""
    newest = max((folder / "runs" / "test" / "checkpoints").glob("step-*"))
    return {key: value for path in newest.glob("*.safetensors") for key, value in load_file(path).items()}


def test_a_resnet_from_a_server_is_fine_tuned_on_a_folder(tmp_path: Path) -> None:
    www, name = tmp_path / "www", "resnet18-f37072fd.pth"
    www.mkdir()
    sha256 = write_resnet(www / name, 1)
    photos(tmp_path / "photos")
    weights = {"source": "IMAGENET1K_V1", "sha256": sha256}
    job: dict[str, Any] = {
        "name": "test",
        "epochs": 2,
        "batch_size": 8,
        "model": {"name": "resnet18", "weights": weights, "freeze": ["*", "!fc.*"]},
        "data": {"name": "folder", "folder": str(tmp_path / "photos"), "image_size": 32},
        "parallel": {
            "stages": [{"ranks": [0], "layers": [0, 6]}, {"ranks": [1], "layers": [7, 13]}],
            "micro_batches": 2,
        },
    }
    cache = str(tmp_path / "cache")
    with served(www) as (url, asked):
        weights["base_url"] = url
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        done = horizonml(tmp_path, "train", "job.yaml", HORIZONML_CACHE=cache)
        assert done.returncode == 0, done.stderr
        assert asked == [f"/{name}"]  # once for the machine, whatever the number of ranks
        said = f"fc.weight is newly initialised: its shape is [1000, 512] in resnet18-f37072fd-{sha256[:16]}.pth"
        assert done.stdout.count(said) == 1, done.stdout
    tensors = checkpoint(tmp_path)
    optimizer = {key for key in tensors if key.startswith("optimizer/")}
    assert optimizer == {"optimizer/fc.weight/momentum_buffer", "optimizer/fc.bias/momentum_buffer"}
    before = torch.load(www / name, weights_only=True)
    assert [
        key for key, value in before.items() if "fc." not in key and not torch.equal(tensors[f"model/{key}"], value)
    ] == []
    # Activations go from the first rank to the second, and nothing comes back.
    records = [read_lines(tmp_path / "runs" / "test" / f"rank-{rank}.jsonl") for rank in range(2)]
    links = [[record["links"] for record in own if record["kind"] == "step"] for own in records]
    assert all(step["next"][0] > 0 and step["next"][1] == 0 for step in links[0])
    assert all(step["previous"][0] == 0 and step["previous"][1] > 0 for step in links[1])
    # Another file under the same name is another run.
    weights["sha256"] = write_resnet(www / name, 2)
    with served(www) as (url, _):
        weights["base_url"] = url
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job | {"epochs": 3}))
        refused = horizonml(tmp_path, "train", "job.yaml", HORIZONML_CACHE=cache)
    assert refused.returncode != 0
    assert f"belongs to another run: weights was {sha256}" in refused.stderr


def test_adapters_are_trained_and_given_to_peft(tmp_path: Path) -> None:
    need_package("peft")
    torch.manual_seed(2)
    base = models.backbone(3)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    lora = {"rank": 2, "alpha": 4, "targets": ["[0369].*"], "train": ["13.*"]}
    job = {
        "name": "test",
        "epochs": 1,
        "batch_size": 32,
        "model": {"name": "tests.models:backbone", "weights": str(tmp_path / "base.safetensors"), "lora": lora},
        "data": {"name": "digits", "samples": 300},
        "parallel": {
            "stages": [{"ranks": [0], "layers": [0, 4]}, {"ranks": [1], "layers": [5, 13]}],
            "micro_batches": 2,
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = horizonml(tmp_path, "train", "job.yaml")
    assert done.returncode == 0, done.stderr
    exported = horizonml(tmp_path, "export", "runs/test", "adapters", "--adapters")
    assert exported.returncode == 0, exported.stderr
    with safe_open(tmp_path / "adapters" / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert {name for name in names if "lora" not in name} == {"base_model.model.13.weight", "base_model.model.13.bias"}
    assert "base_model.model.0.lora_A.weight" in names
    tensors = checkpoint(tmp_path)
    assert not any("base_layer" in key for key in tensors if key.startswith("optimizer/"))

    loaded = import_peft().PeftModel.from_pretrained(_ten_classes(base), str(tmp_path / "adapters")).eval()
    found = loaded(batch := torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert torch.allclose(found, _by_hand(tensors, batch), atol=1e-5)
    assert not torch.allclose(found, _ten_classes(base).eval()(batch), atol=1e-2)
    plain = horizonml(tmp_path, "export", "runs/test", "model.pt")
    assert plain.returncode == 0, plain.stderr
    other = job | {"name": "other", "model": {"name": "tests.models:backbone"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(other))
    assert horizonml(tmp_path, "train", "job.yaml").returncode == 0
    refused = horizonml(tmp_path, "export", "runs/other", "none", "--adapters")
    assert refused.returncode == 1
    assert "has no adapters: its job has no model.lora" in refused.stderr


def _ten_classes(base: torch.nn.Module) -> torch.nn.Module:
    """The base model, with a new head for ten classes."""
    made = models.backbone(10)
    made.load_state_dict({name: value for name, value in base.state_dict().items() if "13." not in name}, strict=False)
    return made


def _by_hand(tensors: dict[str, Tensor], batch: Tensor) -> Tensor:
    """What the trained model returns, from the definition of LoRA: the weights plus alpha / rank times B A."""
    merged = {}
    for key, value in tensors.items():
        name = key.removeprefix("model/")
        if key.startswith("model/") and ".lora_" not in name:
            layer = name.removesuffix(".base_layer.weight")
            if layer != name:
                down, up = (tensors[f"model/{layer}.lora_{part}.default.weight"] for part in "AB")
                value = value + (4 / 2) * (up.flatten(1) @ down.flatten(1)).view_as(value)
            merged[name.replace(".base_layer", "")] = value
    made = models.backbone(10)
    made.load_state_dict(merged)
    return made.eval()(batch)  # type: ignore[no-any-return]
