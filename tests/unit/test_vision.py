import subprocess
import sys

CODE = """
import torch
strict = torch.library.register_fake
def broken(op, *args, **kwargs):
    if isinstance(op, str) and op.startswith("torchvision::"):
        def decorate(function):
            raise RuntimeError(f"operator {op} does not exist")
        return decorate
    return strict(op, *args, **kwargs)
torch.library.register_fake = broken
from horizonml.machine.torchvision import import_torchvision
vision = import_torchvision()
assert import_torchvision() is vision
assert torch.library.register_fake is broken, "it is as before"
import torchvision.transforms.v2, torchvision.datasets
print(sum(p.numel() for p in vision.models.resnet18(num_classes=10).parameters()))
"""


def test_torchvision_imports_without_its_compiled_operators() -> None:
    """Whatever build is installed: the operators are made to be missing. Other tests import it as it is."""
    command = [sys.executable, "-W", "error", "-c", CODE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "11181642"
