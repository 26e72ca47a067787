"""Pretrained weights: where they come from, what is read of them, and how names and shapes are matched."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from horizonml.errors import ModelError
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.tasks.task import InputSpec
from tests import models
from tests.web import served

SHAPE = (1, 8, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights(num_classes: int = 10) -> dict[str, Tensor]:
    """Weights that no constructor makes."""
    found = models.backbone(num_classes).state_dict()
    torch.manual_seed(7)
    return {name: torch.rand_like(value) if value.is_floating_point() else value for name, value in found.items()}


def file(folder: Path, tensors: dict[str, Tensor], name: str = "some.safetensors") -> Path:
    save_file(tensors, folder / name)
    return folder / name


def model(source: object, outputs: int = 10, **more: Any) -> Model:
    options = source if isinstance(source, dict) else str(source)
    spec = ModelSpec.model_validate({"name": "tests.models:backbone", "weights": options, **more})
    return build(spec, 0, outputs, InputSpec.of(SHAPE))


def values(made: Model) -> dict[str, Tensor]:
    return made.stage(0, len(made.chain)).state_dict()


def expect(made: Model, expected: dict[str, Tensor]) -> None:
    found = values(made)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_model_begins_with_the_values_of_a_safetensors_file_or_a_state_dict(tmp_path: Path) -> None:
    expect(model(file(tmp_path, weights())), weights())
    forms = {
        "plain": weights(),
        "wrapped": {"epoch": 3, "state_dict": weights()},
        "twice": {"model": {"module": weights()}},
    }
    for name, content in forms.items():
        torch.save(content, tmp_path / f"{name}.pt")
        expect(model(tmp_path / f"{name}.pt"), weights())


def test_a_release_of_pytorch_that_runs_code_of_pickles_reads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(weights(), tmp_path / "plain.pt")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1+cpu"))
    with pytest.raises(ModelError, match=r"plain\.pt is a pickle, which can make PyTorch 2\.9\.1\+cpu run its code"):
        model(tmp_path / "plain.pt")
    expect(model(file(tmp_path, weights())), weights())


def test_a_state_dict_in_the_old_format_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save(weights(), path, _use_new_zipfile_serialization=False)
    expect(model(path), weights())
    (made,) = (cache / "weights" / "converted").glob("*.safetensors")
    before = made.stat().st_mtime_ns
    expect(model(path), weights())
    assert made.stat().st_mtime_ns == before


def test_damaged_files_are_told(tmp_path: Path) -> None:
    for name in ("cut.safetensors", "cut.pt"):
        (tmp_path / name).write_bytes(b"\x10\0\0\0\0\0\0\0{}")
        with pytest.raises(ModelError, match=rf"model.weights: .*{name} "):
            model(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ModelError, match="is not a state dict: it holds no tensors by name"):
        model(tmp_path / "list.pt")
    (tmp_path / "card.md").write_text("A text.")
    with pytest.raises(
        ModelError, match=r"card.md is not a file of weights, or it is damaged; give a safetensors file"
    ):
        model(tmp_path / "card.md")
    (tmp_path / "runs" / "first" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"it is a run's folder, so export its model: horizonml export .*runs/first "):
        model(tmp_path / "runs" / "first")
    with pytest.raises(ModelError, match="is neither a file nor a folder on this machine"):
        model(tmp_path / "nowhere.pt")
    with pytest.raises(ModelError, match=rf"model.weights: nowhere.pt is .*, as seen from {Path.cwd()}; copy it there"):
        model("nowhere.pt")
    with pytest.raises(ModelError, match=r"model.weights.sha256: .* has [0-9a-f]{64}, not 0000"):
        model({"source": str(file(tmp_path, weights())), "sha256": "0" * 64})


def hub_folder(folder: Path) -> Path:
    """A model as the Hub's cache has it, in two files with an index."""
    folder.mkdir(parents=True)
    names = list(weights())
    halves = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for name, part in halves.items():
        file(folder, {key: weights()[key] for key in part}, name)
    index = {"weight_map": {key: name for name, part in halves.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_of_the_hubs_cache_may_hold_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub_folder(tmp_path / "hub" / "models--me--mine" / "snapshots" / "abc")
    (tmp_path / "hub" / "models--me--mine" / "refs").mkdir()
    (tmp_path / "hub" / "models--me--mine" / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    expect(model(folder), weights())
    expect(model("hub:me/mine"), weights())
    with pytest.raises(ModelError, match="has no model me/other; download it there on every machine"):
        model("hub:me/other")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002.safetensors, which model.safetensors.index.json"):
        model(folder)


def test_a_stage_reads_its_own_tensors_alone(tmp_path: Path) -> None:
    for path in (file(tmp_path, weights()), tmp_path / "state.pt"):
        if path.suffix == ".pt":
            torch.save(weights(), path)
        made = model(path)
        assert made.pretrained is not None
        for layer in range(len(made.chain)):
            before = made.pretrained.bytes_read
            stage = made.stage(layer, layer + 1)
            own = sum(value.nbytes for value in stage.state_dict().values())
            assert made.pretrained.bytes_read - before == own
            for name, value in stage.state_dict().items():
                assert torch.equal(value, weights()[name])
                assert value.untyped_storage().nbytes() == value.nbytes  # the file is not held


READER = """
import resource, sys
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.tasks.task import InputSpec

def resident():
    lines = [line.split() for line in open("/proc/self/status")]
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssFile:"))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

def size(stage):
    return sum(parameter.nbytes for parameter in stage.parameters())

input = InputSpec.of((1, 8, 8))
build(ModelSpec(name="tests.models:StubbornUNet"), 0, 10, input).stage(0, 2)
print(len({"torch._dynamo", "transformers", "timm", "tokenizers"} & set(sys.modules)))
spec = {"name": "tests.models:heavy", "options": {"layers": 4}}
before = peak()
model = build(ModelSpec.model_validate(spec), 0, 10, input)
print(size(model.stage(2, 3)), peak() - before)
before = resident()
model = build(ModelSpec.model_validate(spec | {"weights": sys.argv[1]}), 0, 10, input)
opened = resident()
print(size(held := model.stage(3, 4)), opened - before, resident() - opened)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measures memory as Linux tells it")
@pytest.mark.slow
def test_what_a_rank_takes_of_a_large_model_and_of_a_large_file_is_measured(tmp_path: Path) -> None:
    """Of 260 MB, a stage takes its own tensors, and the part of the file that has them; opening takes next to nothing.

    The compiler of torch and the libraries of models, which take as much, are not loaded for a model without them.
    """
    path = tmp_path / "large.safetensors"
    with torch.device("meta"):
        tensors = models.heavy(layers=4).state_dict()
    header, end = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    head = json.dumps(header).encode()
    with path.open("wb") as content:  # of zeros, which need no disk
        content.write(len(head).to_bytes(8, "little") + head)
        content.truncate(8 + len(head) + end)
    outcome = subprocess.run(
        [sys.executable, "-c", READER, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    libraries, own, grown, held, opened, taken = map(int, outcome.stdout.split())
    assert libraries == 0
    assert own == held == 64 << 20
    assert grown < 2 * own + (64 << 20)
    assert opened < 32 << 20
    assert taken < 2 * own + (16 << 20)


def test_a_head_of_another_shape_begins_anew_as_it_would_without_weights(tmp_path: Path) -> None:
    made = model(file(tmp_path, weights(1000)), outputs=5)
    assert made.pretrained is not None
    assert made.pretrained.notes == (
        "13.weight is newly initialised: its shape is [1000, 64] in some.safetensors, and [5, 64] in the model",
        "13.bias is newly initialised: its shape is [1000] in some.safetensors, and [5] in the model",
        "model.weights: 17 of 19 tensors begin with the values of some.safetensors",
    )
    tuned = model(tmp_path / "some.safetensors", outputs=5, freeze=["!13"])
    assert tuned.pretrained is not None
    total = sum(value.numel() for value in models.backbone(5).parameters())
    assert tuned.pretrained.notes[-1] == f"325 of {total:,} parameters are trained, and the others are frozen"
    spec = ModelSpec(name="tests.models:backbone")
    fresh = values(build(spec, 0, 5, InputSpec.of(SHAPE)))
    expect(made, weights() | {name: fresh[name] for name in ("13.weight", "13.bias")})


def test_names_that_do_not_match_are_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    tensors = weights()
    gone = tensors.pop("9.bias")
    path = file(tmp_path, tensors | {"extra.weight": torch.ones(2)})
    with pytest.raises(
        ModelError, match=r"lacks 9.bias and has extra.weight, which the model lacks; with .*strict: false"
    ):
        model(path)
    made = model({"source": str(path), "strict": False})
    assert not torch.equal(values(made)["9.bias"], gone)
    assert made.pretrained is not None
    assert len(made.pretrained.notes) == 3
    with pytest.raises(
        ModelError, match=r"no tensor of .* belongs to tests.models:backbone: the file has a, b; the model 0.weight"
    ):
        model(file(tmp_path, {"a": torch.ones(1), "b": torch.ones(1)}, "other.safetensors"))
    many = file(tmp_path, {"0.weight": tensors["0.weight"]}, "few.safetensors")
    with pytest.raises(
        ModelError,
        match=r"is probably for another model, since it fits 1 of 19 tensors of tests.models:backbone: it lacks "
        r"1.weight, 1.bias, 1.running_mean, ... \(18 tensors\); with model.weights.strict: false, the others begin",
    ):
        model(many)


def test_prefixes_of_training_scripts_and_of_checkpoints_are_recognised(tmp_path: Path) -> None:
    moments = {"optimizer/0.weight/momentum_buffer": torch.ones(1)}
    for prefix, more in (("module.", {}), ("model/", moments)):
        tensors = {f"{prefix}{name}": value for name, value in weights().items()}
        expect(model(file(tmp_path, tensors | more)), weights())


def test_other_dtypes_and_missing_counts_of_batches_are_taken(tmp_path: Path) -> None:
    tensors = {
        name: value.half() if value.is_floating_point() else value
        for name, value in weights().items()
        if not name.endswith("num_batches_tracked")
    }
    found = values(model(file(tmp_path, tensors)))
    assert found["0.weight"].dtype == torch.float32
    assert torch.equal(found["0.weight"], tensors["0.weight"].float())


class Tied(nn.Module):
    """The embedding and the output share a parameter, of which files hold one name only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12, bias=False), nn.Tanh())
        self.last = nn.Linear(12, 64, bias=False)
        self.out = nn.Linear(64, 10)
        self.last.weight = nn.Parameter(self.body[1].weight.detach().T.clone())
        self.again = nn.Linear(12, 64, bias=False)
        self.again.weight = self.last.weight

    def forward(self, value: Tensor) -> Tensor:
        value = self.body(value)
        return self.out(self.last(value) + self.again(value))  # type: ignore[no-any-return]


def test_tied_parameters_need_one_name_and_are_frozen_together(tmp_path: Path) -> None:
    torch.manual_seed(3)
    tensors = {name: torch.rand(value.shape) for name, value in Tied().state_dict().items() if name != "again.weight"}
    spec = {"name": "tests.unit.test_pretrained:Tied", "weights": str(file(tmp_path, tensors))}
    made = build(ModelSpec.model_validate(spec), 0, 10, InputSpec.of(SHAPE))
    assert torch.equal(values(made)["again.weight"], tensors["last.weight"])
    with pytest.raises(ModelError, match=r"last.weight and again.weight are one parameter; freeze both or neither"):
        build(ModelSpec.model_validate(spec | {"freeze": ["last.*"]}), 0, 10, InputSpec.of(SHAPE))


def state_dict_file(folder: Path, name: str) -> str:
    """A state dict of ResNet-18 under a name of torchvision's; returns its SHA-256."""
    from horizonml.machine.torchvision import import_torchvision

    torch.manual_seed(5)
    torch.save(import_torchvision().models.resnet18().state_dict(), folder / name)
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_torchvisions_weights_are_downloaded_once_and_verified(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "www"
    folder.mkdir()
    sha256 = state_dict_file(folder, "resnet18-f37072fd.pth")
    expected = torch.load(folder / "resnet18-f37072fd.pth", weights_only=True)
    shape = InputSpec.of((3, 32, 32))
    with served(folder) as (url, asked):
        for name in ("IMAGENET1K_V1", "DEFAULT"):
            source = {"source": name, "base_url": f"{url}/", "sha256": sha256}
            made = build(ModelSpec.model_validate({"name": "resnet18", "weights": source}), 0, 5, shape)
            assert torch.equal(values(made)["layer4.1.conv2.weight"], expected["layer4.1.conv2.weight"])
        assert asked == ["/resnet18-f37072fd.pth"]
        # It is not what torchvision's name promises, so it does not take the place of that file.
        assert not (cache / "weights" / "resnet18-f37072fd.pth").exists()
        (cache / "weights" / f"resnet18-f37072fd-{sha256[:16]}.pth").write_bytes(b"damaged")
        build(ModelSpec.model_validate({"name": "resnet18", "weights": source}), 0, 5, shape)
        assert len(asked) == 2
        # torchvision's name promises another file.
        del source["sha256"]
        with pytest.raises(
            ModelError, match=f"has the SHA-256 {sha256}, not f37072fd; it is not the file that is meant"
        ):
            build(ModelSpec.model_validate({"name": "resnet18", "weights": source}), 0, 5, shape)
        left = [path.name for path in (cache / "weights").iterdir() if path.name.endswith(".part")]
        assert left == []


def test_a_url_needs_a_hash_and_failures_name_it(tmp_path: Path, cache: Path) -> None:
    content = file(tmp_path, weights(), "mine.safetensors").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    with served(tmp_path) as (url, asked):
        with pytest.raises(ModelError, match=r"model.weights.sha256: give the SHA-256 of http://.*/mine.safetensors"):
            model(f"{url}/mine.safetensors")
        assert asked == []
        expect(model({"source": f"{url}/mine.safetensors", "sha256": sha256}), weights())
        (tmp_path / f"mine-{sha256[:8]}.safetensors").write_bytes(content)
        expect(model(f"{url}/mine-{sha256[:8]}.safetensors"), weights())
        with pytest.raises(
            ModelError,
            match=r"could not be downloaded to .*: the server says: 404 File not found. Put the file there yourself",
        ):
            model(f"{url}/other-{sha256[:8]}.safetensors")
    with pytest.raises(ModelError, match=r"could not be downloaded to .*refused"):
        model(f"{url}/again-{sha256[:8]}.safetensors")


def test_names_of_weights_are_those_of_the_model() -> None:
    with pytest.raises(
        ModelError, match="resnet18 has no weights IMAGENET1K_V7, but IMAGENET1K_V1, DEFAULT; did you mean"
    ):
        build(
            ModelSpec.model_validate({"name": "resnet18", "weights": "IMAGENET1K_V7"}), 0, 5, InputSpec.of((3, 32, 32))
        )
    with pytest.raises(
        ModelError, match=r"DEFAULT names weights of torchvision's models, and tests.models:backbone is none"
    ):
        model("DEFAULT")
