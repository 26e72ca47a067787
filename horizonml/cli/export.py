"""The command that exports a trained model: `horizonml export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_FORMATS = "auto, state-dict, safetensors, onnx or torch-export"


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or a run's folder (its newest intact one).", show_default=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="The file to write: model.pt (a state dict), model.safetensors, model.onnx, or model.pt2 (an archive "
            "of torch.export).",
            show_default=False,
        ),
    ],
    format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=f"One of {_FORMATS}; auto goes by the file's ending.")
    ] = "auto",
    verify: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Number of held-out samples on which the file is compared with the model (0: no comparison).",
        ),
    ] = 16,
    card: Annotated[
        bool, typer.Option("--card/--no-card", help="Whether to write a model card beside the file, OUTPUT.md.")
    ] = True,
    best: Annotated[
        bool, typer.Option("--best", help="Take the best checkpoint of the run (see checkpoint.keep_best).")
    ] = False,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write the LoRA adapters alone, as a folder in peft's format.")
    ] = False,
    average: Annotated[
        bool | None,
        typer.Option(
            "--average/--no-average",
            help="Whether to export the moving averages of the parameters (see ema.decay) instead of the parameters. "
            "Default: if the run evaluated them.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a field of the checkpoint's job, e.g. data.folder=pictures if the data has moved "
            "(repeatable).",
        ),
    ] = None,
) -> None:
    """Export a trained model to a file, and verify the file.

    The file is compared with the model before it is kept. A state dict or a safetensors file holds the weights. An ONNX
    file or a torch.export archive holds the computation, too, for batches of any size; to write one, the model is built
    by the code that the checkpoint's job names.
    """
    from horizonml.exports.export import export as export_checkpoint
    from horizonml.state.adapters import export_adapters
    from horizonml.state.keeping import find_best
    from horizonml.telemetry.record import metric_text

    if best:
        checkpoint = find_best(checkpoint)[0]
    if adapters:
        print(f"wrote {output}, LoRA adapters in peft's format (step {export_adapters(checkpoint, output).step})")
        return
    done = export_checkpoint(checkpoint, output, format, verify, card, overrides or (), average)
    held_out = [
        f", held-out {name.removeprefix('held_out_')} {metric_text(name.removeprefix('held_out_'), value)}"
        for name, value in done.metrics.items()
        if name.startswith("held_out_") and name != "held_out_loss"
    ]
    when = f" after epoch {done.metrics['epoch']}" if held_out and "epoch" in done.metrics else ""
    print(f"verified: {done.check}" if verify else "not verified, because of --verify 0")
    print(f"wrote {output}, {done.format.words} (step {done.step}{''.join(held_out)}{when})")
    if done.card is not None:
        print(f"wrote {done.card}, its model card: fill in the licence")
