"""Data parallelism against torch's DDP and Horovod: `python -m benchmarks.ddp`.

torch's DDP has the bucket size that suits it best, which a short sweep finds, a static graph, gradients that are views
of the buckets, the fused optimizer, and memory that glibc keeps. Its defaults are raced, too.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from benchmarks.harness import Race, Variant, ddp_plan, main, variant
from benchmarks.tuned import best
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.tasks.task import InputSpec

BUCKETS = [1, 5, 25, 100]  # MB; 25 is the default, and 100 one bucket for all
CASES = (  # model, its pictures' side, ranks, batch
    ("resnet18", 32, 2, 128),
    ("mobilenet_v3_small", 96, 2, 64),
    ("resnet18", 32, 5, 320),
    ("mobilenet_v3_small", 96, 4, 128),
)


def case(model: str, side: int, world_size: int, batch_size: int) -> Race:
    """One race."""
    shape = (3, side, side)
    layers = len(build(ModelSpec(name=model), 0, 10, InputSpec.of(shape)).chain)
    same: dict[str, Any] = {"model": model, "shape": list(shape)}

    def tuned(bucket: int, name: str = "", **more: Any) -> Variant:
        options = {"bucket_cap_mb": bucket, "static_graph": True, "gradient_as_bucket_view": True}
        settings = {"ddp_options": options, "keep_memory": True, **same, **more}
        return variant(name or f"{bucket} MB", "ddp", world_size, batch_size, **settings)

    bucket = best(f"buckets of torch DDP, {model}, {world_size} ranks (MB)", tuned, BUCKETS)
    variants = [
        variant("HorizonML ddp", "horizonml", world_size, batch_size, plan=ddp_plan(world_size, layers), **same),
        variant("torch DDP", "ddp", world_size, batch_size, **same),
        variant("torch DDP, memory kept", "ddp", world_size, batch_size, keep_memory=True, **same),
        tuned(bucket, f"torch DDP at its best, {bucket} MB"),
        tuned(bucket, "the same, channels_last by hand", channels_last=True),
    ]
    if find_spec("horovod"):
        variants.append(variant("Horovod", "horovod", world_size, batch_size, **same))
    title = f"Data parallelism: {model} at {side} px, {world_size} ranks, global batch {batch_size}, 1 thread a rank"
    return Race(title, f"data parallel, {model}, {world_size} ranks", "torch DDP, memory kept", variants)


def races(short: bool) -> list[Race]:
    """Two ranks, and, unless `short`, more of them."""
    if not find_spec("horovod"):
        print("Horovod is left out: it is not installed (`make horovod` builds it)")
    return [case(*one) for one in CASES[: 2 if short else None]]


if __name__ == "__main__":
    main(__doc__, races, rounds=8, steps=4, short="two ranks only")
