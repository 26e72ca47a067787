"""Checkpoints for tests, as a run would have left them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from horizonml.data.choose import describe as describe_data
from horizonml.data.dataset import DataInfo
from horizonml.job.schema import Job
from horizonml.models.zoo import construct
from horizonml.state.shards import describe, folder_name, shard_name
from horizonml.tasks.choose import channels_for, task_for


def checkpoint(folder: Path, *stages: dict[str, Tensor], **more: Any) -> Path:
    """Write a checkpoint whose stages have these tensors; `more` goes into its metadata."""
    folder.mkdir(parents=True)
    shards = {}
    for number, tensors in enumerate(stages):
        save_file(tensors, folder / shard_name(number))
        shards[shard_name(number)] = describe(folder / shard_name(number), len(tensors)).model_dump()
    spans = [
        {"start": number, "stop": number + 1, "ranks": [number], "shares": [1.0], "sync": "all-reduce", "send": "fp32"}
        for number in range(len(stages))
    ]
    plan = {"stages": spans, "schedule": "1f1b", "micro_batches": 2}
    metadata = {"format": 1, "step": 3, "compatible": {"seed": 0}, "plan": plan, "shards": shards, **more}
    (folder / "checkpoint.json").write_text(json.dumps(metadata))
    return folder


def checkpoint_of(run: Path, job: Job, info: DataInfo | None = None) -> tuple[Path, nn.Module]:
    """Write a checkpoint of a job's model in two stages into a run's folder; return it, and the model."""
    info = info or describe_data(job.data, channels_for(job))
    assert info is not None
    task = task_for(job, info)
    model = construct(job.model, job.seed, task.outputs(info), task.input(info)).eval()
    state = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    names = list(state)
    half = len(names) // 2
    first = {name: state[name] for name in names[:half]}
    first |= {
        f"optimizer/{name.removeprefix('model/')}/momentum_buffer": tensor.clone() for name, tensor in first.items()
    }
    path = checkpoint(
        run / "checkpoints" / folder_name(30),
        first,
        {name: state[name] for name in names[half:]},
        step=30,
        complete=True,
        horizonml="0.1.0",
        torch="2.13",
        job=job.model_dump(),
        data=info.to_json(),
        metrics={"epoch": 2, "held_out_loss": 0.25, "held_out_accuracy": 0.9875},
    )
    return path, model
