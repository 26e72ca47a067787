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
if BREAK:
    torch.library.register_fake = broken
from horizonml.machine.torchvision import import_torchvision
vision = import_torchvision()
assert import_torchvision() is vision
if not BREAK:
    assert torch.library.register_fake is strict
import torchvision.transforms.v2, torchvision.datasets
print(sum(p.numel() for p in vision.models.resnet18(num_classes=10).parameters()))
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_torchvision_imports_with_and_without_its_compiled_operators() -> None:
    """Whatever build is installed: as it is, and with the operators made to be missing."""
    assert run("BREAK = False\n" + CODE) == "11181642"
    assert run("BREAK = True\n" + CODE) == "11181642"
