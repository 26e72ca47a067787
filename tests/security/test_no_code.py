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
from horizonml.api.training import packed
from horizonml.data.dataset import TensorSpec
from horizonml.errors import ModelError
from horizonml.job.schema import Job
from horizonml.models.libraries import check_options
from horizonml.models.pretrained import opened
from horizonml.models.spec import ModelSpec
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


def test_nothing_is_evaluated_and_only_tensors_are_read() -> None:
    evaluates = {"eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "tempfile.mktemp",
                 "subprocess.getstatusoutput", "marshal.loads", "shelve.open", "yaml.unsafe_load", "yaml.full_load",
                 "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "joblib.load"}  # fmt: skip
    pickles = {"pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "pickle.Unpickler", "dill.loads"}
    unpickling = set()
    for file, name, call in calls():
        assert name not in evaluates, file
        assert keyword(call, "shell") in (None, "False"), file
        assert keyword(call, "trust_remote_code") in (None, "False"), file
        if name in ("torch.load", "torch.serialization.load"):
            assert keyword(call, "weights_only") == "True", file
        if name in ("numpy.load", "np.load"):
            assert keyword(call, "allow_pickle") == "False", file
        if name in pickles:
            unpickling.add(file)
    # Pickles are read only from this machine's own parents and children. Workers that load samples are this process's
    # own children, behind a pipe without a name.
    assert unpickling == {"api/training.py"}
    mentions = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if "pickle.loads" in file.read_text()}
    assert mentions == {"api/training.py", "data/workers.py"}


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


VIT, DETR = "transformers:ViTForImageClassification", "transformers:DetrForObjectDetection"


def test_options_cannot_make_a_library_read_files_or_load_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil(tmp_path / "hacked")}, tmp_path / "evil.pth")
    for name, options in (
        ("timm:resnet18", {"checkpoint_path": "evil.pth"}),
        ("timm:resnet18", {"pretrained": True}),
        ("timm:resnet18", {"pretrained_cfg": {"file": "evil.pth"}}),
        ("timm:resnet18", {"pretrained_cfg_overlay": {"url": "http://169.254.169.254/"}}),
        ("timm:resnet18", {"cache_dir": "/etc"}),
        ("timm:resnet18", {"block": "../evil"}),
        (VIT, {"attn_implementation": "evil/kernel"}),
        (VIT, {"_attn_implementation": "evil/kernel:run"}),
        (VIT, {"attn_implementation_internal": "evil/kernel"}),
        (VIT, {"auto_map": {"AutoModel": "evil--model.Model"}}),
        (VIT, {"trust_remote_code": True}),
        (VIT, {"quantization_config": {"quant_method": "evil"}}),
        (VIT, {"a": [{"b": [["local-dir:/etc"]]}]}),
        (VIT, {"a": [[{"backbone": "evil"}]]}),
        (DETR, {"backbone": "evil/net", "use_pretrained_backbone": True}),
        (DETR, {"backbone_config": {"use_pretrained_backbone": True}}),
        ("transformers:TimmWrapperForImageClassification", {"architecture": "hf-hub:evil/net"}),
        ("resnet18", {"weights": "DEFAULT"}),
    ):
        with pytest.raises(ModelError, match=r"model\.options: .* would let .* read files, ask servers or load code"):
            build(ModelSpec(name=name, options=options), 0, 10, IMAGES)
    assert [path.name for path in tmp_path.iterdir()] == ["evil.pth"]


def test_options_that_are_a_configuration_are_taken() -> None:
    check_options("transformers:ConvBertModel", {"conv_kernel_size": 9})  # of a convolution
    check_options("timm:resnet18", {"drop_rate": 0.1, "pretrained": False})


def test_the_objects_of_a_notebook_are_in_a_file_that_nobody_else_can_reach() -> None:
    with packed(Job(), Given(), False) as descriptor:
        status = os.fstat(descriptor)
        assert status.st_nlink == 0  # it has no name
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert not os.get_inheritable(descriptor)  # only those get it that it is passed to
