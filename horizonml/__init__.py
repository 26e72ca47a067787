"""HorizonML: train a neural network together on the small machines you already have.

import horizonml

run = horizonml.train(model=MyNet, data=my_dataset, workers=3)
print(run.metrics)
model = run.model()
"""

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Threads that wait for others sleep instead of spinning, which would keep the very threads they wait for off their
# cores. OpenMP reads this once, when torch loads it; what the user has set stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# What goes wrong between ranks is told in words; PyTorch's own warnings about it are pages of C++ stack frames.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if TYPE_CHECKING:
    from horizonml.api.evaluation import evaluate, export, load, predict
    from horizonml.api.history import Evaluation, Run, Step
    from horizonml.api.planning import PlannedJob, plan
    from horizonml.api.predictions import generate
    from horizonml.api.training import train
    from horizonml.errors import HorizonError
    from horizonml.job.schema import Job
    from horizonml.tasks.task import Task

__all__ = [
    "Evaluation",
    "HorizonError",
    "Job",
    "PlannedJob",
    "Run",
    "Step",
    "Task",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "load",
    "plan",
    "predict",
    "train",
]

# Where each name comes from. Nothing is imported before it is used, so that `import horizonml` loads no PyTorch.
_MODULES = {
    "Evaluation": "horizonml.api.history",
    "HorizonError": "horizonml.errors",
    "Job": "horizonml.job.schema",
    "PlannedJob": "horizonml.api.planning",
    "Run": "horizonml.api.history",
    "Step": "horizonml.api.history",
    "Task": "horizonml.tasks.task",
    "evaluate": "horizonml.api.evaluation",
    "export": "horizonml.api.evaluation",
    "generate": "horizonml.api.predictions",
    "load": "horizonml.api.evaluation",
    "predict": "horizonml.api.evaluation",
    "train": "horizonml.api.training",
}


def __getattr__(name: str) -> Any:
    """Return a name of the interface, and import what it is made of."""
    from importlib import import_module

    if name == "plan":  # the package of plans, which can be called
        return import_module("horizonml.plan")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
