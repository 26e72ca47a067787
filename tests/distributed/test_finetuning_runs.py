"""Fine-tuning as a user does it: with adapters for peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from horizonml.models.tuning import import_peft
from tests import models
from tests.distributed.processes import horizonml
from tests.programs import need_package

pytestmark = pytest.mark.slow


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint of a run."""
    newest = max((folder / "runs" / "test" / "checkpoints").glob("step-*"))
    return {key: value for path in newest.glob("*.safetensors") for key, value in load_file(path).items()}


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
