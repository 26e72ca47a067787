"""Nothing that comes from outside is run: no pickle, no shell, no evaluation, and no library that does it for us."""

from __future__ import annotations

import ast
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import horizonml
from horizonml.api.given import Given
from horizonml.api.transfer import packed
from horizonml.data.tensors import TensorSpec
from horizonml.errors import ModelError
from horizonml.job.schema import Job
from horizonml.models.libraries import check_options
from horizonml.models.pretrained import opened
from horizonml.models.spec import ModelSpec, WeightsSpec
from horizonml.models.zoo import build
from horizonml.tasks.task import InputSpec
from tests.security.bounds import bounded

PACKAGE = Path(horizonml.__file__).parent


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield every call in the package: the file, the dotted name that is called, and the call."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield str(file.relative_to(PACKAGE)), ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(one.value) for one in call.keywords if one.arg == name), None)


def test_nothing_is_evaluated_and_no_shell_is_started() -> None:
    bad = {"eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
           "tempfile.mktemp", "marshal.loads", "shelve.open", "yaml.unsafe_load", "yaml.full_load"}  # fmt: skip
    found = [
        (file, name) for file, name, call in calls() if name in bad or keyword(call, "shell") not in (None, "False")
    ]
    assert found == []


def test_pickles_are_read_only_from_this_machines_own_parents_and_children() -> None:
    names = ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "pickle.Unpickler", "dill.loads")
    found = {file for file, name, _ in calls() if name in names}
    assert found == {"api/transfer.py"}
    # Workers that load samples are this process's own children, behind a pipe without a name.
    mentions = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if "pickle.loads" in file.read_text()}
    assert mentions == {"api/transfer.py", "data/workers.py"}


def test_torch_and_numpy_read_tensors_only() -> None:
    for file, name, call in calls():
        if name in ("torch.load", "torch.serialization.load"):
            assert keyword(call, "weights_only") == "True", file
        if name in ("numpy.load", "np.load"):
            assert keyword(call, "allow_pickle") == "False", file
        assert name not in ("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "joblib.load"), file
        assert keyword(call, "trust_remote_code") in (None, "False"), file


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_of_weights_that_is_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "evil.pth"
    torch.save({"a": Evil(tmp_path / "hacked")}, file, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ModelError, match="no code is run from such a file"):
        opened(file)
    file.write_bytes(pickle.dumps(Evil(tmp_path / "hacked"), protocol=2))
    with pytest.raises(ModelError):
        opened(file)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("legacy", [True, False])
def test_a_file_of_weights_cannot_promise_more_than_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool
) -> None:
    """An expanded tensor of 400 MB takes some hundred bytes of a file; other kinds of tensors are no parameters."""
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "small.pth"
    odd = {
        "expanded": torch.zeros(1).expand(100_000_000),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "meta": torch.empty(1 << 40, device="meta"),
    }
    for name, tensor in odd.items():
        torch.save({"a": torch.zeros(2), name: tensor}, file, _use_new_zipfile_serialization=not legacy)
        with bounded(100), pytest.raises(ModelError, match=f"'{name}' is not a plain tensor"):
            opened(file)
    if legacy:
        many = torch.zeros(1_000_000)
        shared = {str(number): many[number:] for number in range(200)}
        torch.save(shared, file, _use_new_zipfile_serialization=False)
        with bounded(100), pytest.raises(ModelError, match="more than 8 times as much as the file"):
            opened(file)


IMAGES = InputSpec((TensorSpec((3, 32, 32)),))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("timm:resnet18", {"checkpoint_path": "evil.pth"}),
        ("timm:resnet18", {"pretrained": True}),
        ("timm:resnet18", {"pretrained_cfg": {"file": "evil.pth"}}),
        ("timm:resnet18", {"pretrained_cfg_overlay": {"url": "http://169.254.169.254/"}}),
        ("timm:resnet18", {"cache_dir": "/etc"}),
        ("transformers:ViTForImageClassification", {"attn_implementation": "evil/kernel"}),
        ("transformers:ViTForImageClassification", {"_attn_implementation": "evil/kernel:run"}),
        ("transformers:ViTForImageClassification", {"attn_implementation_internal": "evil/kernel"}),
        ("transformers:ViTForImageClassification", {"auto_map": {"AutoModel": "evil--model.Model"}}),
        ("transformers:ViTForImageClassification", {"trust_remote_code": True}),
        ("transformers:DetrForObjectDetection", {"backbone": "evil/net", "use_pretrained_backbone": True}),
        ("transformers:DetrForObjectDetection", {"backbone_config": {"use_pretrained_backbone": True}}),
        ("transformers:ViTForImageClassification", {"quantization_config": {"quant_method": "evil"}}),
        ("transformers:TimmWrapperForImageClassification", {"architecture": "hf-hub:evil/net"}),
        ("transformers:TimmWrapperForImageClassification", {"architecture": "local-dir:/etc"}),
        ("transformers:ViTForImageClassification", {"a": [{"b": [["local-dir:/etc"]]}]}),
        ("transformers:ViTForImageClassification", {"a": [[{"backbone": "evil"}]]}),
        ("timm:resnet18", {"block": "../evil"}),
        ("resnet18", {"weights": "DEFAULT"}),
    ],
)
def test_options_cannot_make_a_library_read_files_or_load_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil(tmp_path / "hacked")}, tmp_path / "evil.pth")
    with pytest.raises(ModelError, match=r"model\.options: .* would let .* read files, ask servers or load code"):
        build(ModelSpec(name=name, options=options), 0, 10, IMAGES)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pth"]


def test_a_librarys_model_is_still_built_with_options_that_are_a_configuration() -> None:
    check_options("transformers:ConvBertModel", {"conv_kernel_size": 9})  # of a convolution
    built = build(ModelSpec(name="timm:resnet18", options={"drop_rate": 0.1}), 0, 10, IMAGES)
    assert len(built.chain) > 1


def test_the_objects_of_a_notebook_are_in_a_file_that_nobody_else_can_reach() -> None:
    with packed(Job(), Given(), False) as descriptor:
        status = os.fstat(descriptor)
        assert status.st_nlink == 0  # it has no name
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert not os.get_inheritable(descriptor)  # only those get it that it is passed to


def test_weights_of_a_hub_are_tensors_of_files_that_are_here() -> None:
    """`hub:` reads a cache on this machine; nothing asks a server, and no code of a model's author is run."""
    with pytest.raises(ModelError, match="has no model org/evil"):
        build(ModelSpec(weights=WeightsSpec(source="hub:org/evil")), 0, 10, InputSpec((TensorSpec((1, 8, 8)),)))
