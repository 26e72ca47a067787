"""Fine-tuning: the gradients of what is trained are those of one process, and nothing happens to the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from horizonml.comm.group import Group
from horizonml.data.dataset import Inputs
from horizonml.errors import ModelError
from horizonml.models.spec import ModelSpec
from horizonml.models.tuning import import_peft, selected
from horizonml.models.zoo import Model, build
from horizonml.plan.plan import Sync
from horizonml.runtime.agreement import check_weights, model_for
from horizonml.state.carry import parcels
from horizonml.state.checkpoint import compatible_with
from horizonml.state.follow import needs
from horizonml.state.mirror import Packer
from horizonml.state.spec import Adam
from horizonml.state.train_state import TrainState
from horizonml.tasks.task import InputSpec, Tree
from tests import models
from tests.distributed import test_following as following
from tests.distributed import test_lossless as lossless
from tests.distributed.plans import ONE, TWO
from tests.distributed.pool import Pool
from tests.distributed.truth import SHAPE, Case, Images, alone, expect_same, expect_truth
from tests.programs import need_package

BODY, MIDDLE, END = ("[0-8].*",), ("2.*", "4.*"), ("[4-9].*",)
SHARES = ((3.0, 1.0), TWO)


@dataclass(frozen=True)
class Tuned(Images):
    """What is trained of a model that begins with the weights of a file."""

    file: Path = Path()
    tuning: tuple[str, ...] = ()  # globs on what is frozen, or on what gets adapters
    lora: bool = False
    train: tuple[str, ...] = ()  # beside the adapters

    def model(self) -> Model:
        values: dict[str, Any] = {"name": f"tests.models:{self.name}", "weights": str(self.file)}
        if self.lora:
            values["lora"] = {"rank": 2, "alpha": 8, "targets": list(self.tuning), "train": list(self.train)}
        else:
            values["freeze"] = list(self.tuning)
        return build(ModelSpec.model_validate(values), 0, 10, InputSpec.of(SHAPE))

    def call(self, module: nn.Module, inputs: Inputs) -> Any:
        return module(inputs)

    def loss(self, outputs: Any, targets: Tree, training: bool) -> Tensor:
        assert isinstance(targets, Tensor)
        return functional.cross_entropy(outputs, targets)

    def measure(self, outputs: Any, targets: Tree) -> None:
        return None

    def whole(self) -> tuple[nn.Module, set[str]]:
        """The same as an ordinary module, with adapters of peft, and the names of what is trained."""
        module: nn.Module = getattr(models, self.name)()
        module.load_state_dict(load_file(self.file))
        if self.lora:
            peft = import_peft()
            layers = [name for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
            adapted = [name for name in layers if selected(self.tuning, f"{name}.weight")]
            config = peft.LoraConfig(r=2, lora_alpha=8, target_modules="|".join(adapted))
            module = peft.inject_adapter_in_model(config, module)
            model = self.model()
            module.load_state_dict(model.stage(0, len(model.chain)).state_dict())  # adapters begin at random
        names = {
            name
            for name, _ in module.named_parameters()
            if (".lora_" in name or selected(self.train, name) if self.lora else not selected(self.tuning, name))
        }
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in names)
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
        return module, names


FROZEN, FROZEN_MIDDLE = Tuned("backbone", tuning=BODY), Tuned("plain", tuning=MIDDLE)
ADAPTED = Tuned("plain", tuning=("[0-6].*",), lora=True, train=("7.*", "9.*"))
ADAPTED_NORMED = Tuned("backbone", tuning=("[0369].*",), lora=True, train=("13.*",))
CASES = [
    (Tuned("plain", tuning=END), Case("frozen end, pipeline 2", (ONE, ONE), 4)),
    (FROZEN, Case("frozen backbone, pipeline 3, zb-h1", (ONE, ONE, ONE), 4, "zb-h1")),
    (FROZEN, Case("frozen backbone, hybrid 2x2, interleaved", SHARES, 4, "interleaved")),
    (FROZEN, Case("frozen backbone, ddp 2, adamw", (TWO,), optimizer=Adam(name="adamw"))),
    (FROZEN, Case("frozen backbone, 16-bit sums", (TWO,), sync=Sync.FP16)),
    (FROZEN, Case("frozen backbone, channels", (TWO,), sync=Sync.CHANNELS)),
    (FROZEN_MIDDLE, Case("frozen middle, hybrid 2x2", SHARES, 4)),
    (ADAPTED, Case("adapters, pipeline 2, zb-h1", (ONE, ONE), 4, "zb-h1")),
    (ADAPTED_NORMED, Case("adapters of a backbone with BatchNorm, ddp 2", ((3.0, 1.0),))),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Weights for the models that no constructor makes."""
    return tmp_path / "weights.safetensors"


def write_weights(file: Path, model: str) -> dict[str, Tensor]:
    torch.manual_seed(11)
    tensors = getattr(models, model)().state_dict()
    for name, value in tensors.items():
        if name.endswith(("running_mean", "running_var")):
            value.copy_(torch.rand_like(value) + 0.5)
        elif value.is_floating_point():
            value.add_(torch.randn_like(value) * 0.05)
    save_file(tensors, file)
    return {name: value.clone() for name, value in tensors.items()}


@pytest.mark.parametrize(("tuned", "case"), CASES, ids=[case.name for _, case in CASES])
def test_what_is_trained_changes_as_in_one_process_and_the_rest_not_at_all(
    pool: Pool, tuned: Tuned, case: Case, file: Path
) -> None:
    if tuned.lora:
        need_package("peft")
    before = write_weights(file, tuned.name)
    subject = replace(tuned, file=file)
    module, trained = subject.whole()
    expected, judged = alone(subject, module, case.optimizer)
    tolerance = 1e-3 if case.sync is Sync.FP16 else 1e-5
    for end in expect_truth(pool, case, subject, expected, judged, tolerance=tolerance):
        for key, value in end.state.items():
            kind, _, name = key.partition("/")
            if kind == "optimizer":  # which keeps nothing for what is frozen
                assert name.rpartition("/")[0] in trained, key
            elif name not in trained:  # parameters and statistics, bit for bit
                assert torch.equal(value, before[name.replace(".base_layer", "")]), key
            else:
                assert ".lora_" in name or not torch.equal(value, before[name]), key


def test_frozen_layers_are_neither_copied_nor_moved_and_a_lost_rank_is_rebuilt(pool: Pool, file: Path) -> None:
    weights = write_weights(file, "backbone")
    rebuilt = lossless.expect_rebuilt(pool, "frozen", 2, 9, 1e9, None, file)
    state = lossless.fresh("frozen", file=file)
    layers = len(state.model.chain)
    state.take([(0, layers)])
    trained = {name for name in weights if name not in state.model.frozen}
    assert {name.partition(".")[0] for name in trained} == {"9", "13"}
    copied = read_tensors(Packer().pack(state).numpy().tobytes())
    moved = parcels(state, [(layer, 0, 0) for layer in range(layers)], Group(None, 0, 1, 30.0))
    for keys in (rebuilt, copied, [one.key for one in moved]):
        assert {key.split("/")[1] for key in keys if key.startswith("model/")} == trained


@dataclass(frozen=True)
class Joining(following.Case):
    """A newcomer among ranks that fine-tune a model from a file."""

    file: Path = Path()

    def state(self) -> TrainState:
        return TrainState(replace(FROZEN, file=self.file).model(), self.optimizer)


def test_a_newcomer_reads_what_is_frozen_and_receives_the_rest(pool: Pool, file: Path) -> None:
    weights = write_weights(file, "backbone")
    layers = len(replace(FROZEN, file=file).model().chain)
    case = Joining("frozen", following.ddp(layers, 1.0, 1.0, 1.0), 2, file=file)
    model = case.state().model
    trained = 4 * sum(value.numel() for name, value in weights.items() if name not in model.frozen)
    # Parameters and momentum of what is trained, and the gradients of a step.
    assert needs(case.state(), case.plan, frozenset({2}), 2) == (2 * trained, trained)
    results = pool.run(3, following.joins, case, 3, False)
    for _, state, _ in results:
        expect_same(state, results[0][1])
        assert all(torch.equal(state[f"model/{name}"], weights[name]) for name in model.frozen)


def test_all_ranks_must_have_the_same_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    tensors = write_weights(one, "backbone")
    save_file(tensors | {"0.weight": tensors["0.weight"] + 1}, other)
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / "one.safetensors"
    copy.write_bytes(one.read_bytes())
    jobs, info = [lossless.job("frozen", file=path) for path in (one, copy, other)], lossless.described()
    made = [model_for(job, info) for job in jobs]
    read = [model.pretrained for model in made]
    (notes,) = {"; ".join(weights.notes) for weights in read[:2] if weights is not None}
    assert notes == (
        "model.weights: 19 of 19 tensors begin with the values of one.safetensors; 2,970 of 4,834 parameters are "
        "trained, and the others are frozen"
    )
    digests = [weights.digest for weights in read if weights is not None]
    check_weights(digests[:2])
    with pytest.raises(ModelError, match=r"^model.weights: rank 2 has another file than rank 0 .SHA-256 "):
        check_weights(digests)
    with pytest.raises(ModelError, match=r"^model.weights: "):
        model_for(lossless.job("frozen", file=tmp_path / "none"), info)
    # Nor is a checkpoint with another file's weights resumed.
    first, again, third = (compatible_with(job, info, model) for job, model in zip(jobs, made, strict=True))
    assert first == again
    assert {key for key in first if first[key] != third[key]} == {"weights"}
