"""The commands that use a trained model: `horizonml export`, `evaluate`, `predict` and `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_FORMATS = "auto, state-dict, safetensors, onnx or torch-export"

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint, or a run's folder (its newest intact one).", show_default=False
    ),
]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a field of the checkpoint's job, e.g. data.folder=/mnt/pictures if the data has moved, or "
        "data.options.year=2024 (repeatable).",
    ),
]


def export(
    checkpoint: Checkpoint,
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
    overrides: Overrides = None,
) -> None:
    """Export a trained model to a file, and verify the file.

    The file is compared with the model before it is kept. A state dict or a safetensors file holds the weights. An ONNX
    file or a torch.export archive holds the computation, too, for batches of any size; to write one, the model is built
    by the code that the checkpoint's job names.
    """
    from horizonml.api.exports.export import export as export_checkpoint
    from horizonml.state.saver import find_best
    from horizonml.state.shards import export_adapters
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


Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="The name of a data set, as in a job file; a folder that holds one folder of images per class; or, for a "
        "model that was trained on a table, a text, or another kind of data with a path, the path of more such data. "
        "Default: the data that the model was trained on.",
        show_default=False,
    ),
]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Number of samples that are computed at a time.")]
Part = Annotated[
    str | None,
    typer.Option(
        metavar="PART",
        help="Which samples to use: held-out, train or all. Default: the held-out samples of the data that the model "
        "was trained on, and all samples of other data.",
        show_default=False,
    ),
]


def evaluate(
    checkpoint: Checkpoint,
    data: Data = None,
    part: Part = None,
    overrides: Overrides = None,
    batch_size: BatchSize = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Evaluate a trained model on data, in this process.

    The loss and the metrics are those of the job's task. On the held-out samples of the training's own data, they are
    the values that the training recorded. A checkpoint whose model is `module:callable` runs that code: use only those
    that you trust.

    horizonml evaluate runs/first

    horizonml evaluate runs/first --data new-pictures
    """
    import json

    from horizonml.api.evaluation import evaluated, parse_part, trained_with
    from horizonml.telemetry.record import judged
    from horizonml.text import count

    found = trained_with(checkpoint, data, overrides or ())
    result = evaluated(found, parse_part(part, data is not None), batch_size)
    if as_json:
        print(json.dumps({"loss": result.loss, **result.metrics, "samples": result.samples}))
        return
    recorded = data is None and not overrides and part in (None, "held-out")
    unigram = found.info.unigram if recorded else None
    print(f"{judged(result.loss, result.metrics, unigram)} ({count(result.samples, 'sample')})")


def predict(
    checkpoint: Checkpoint,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]", help="Images, for a model that was trained on images.", show_default=False),
    ] = None,
    data: Data = None,
    part: Part = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The table to write (CSV), with a row for each sample.")
    ] = Path("predictions.csv"),
    overrides: Overrides = None,
    batch_size: BatchSize = 256,
) -> None:
    """Predict with a trained model, and write a table.

    For classification, a row has the predicted class and the probability of each class; for multi-label tasks, the
    probability of each label; for regression, the predicted values. Give image files, or data as for `horizonml
    evaluate`. A checkpoint whose model is `module:callable` runs that code: use only those that you trust.

    horizonml predict runs/first new-pictures/*.jpg --out predictions.csv

    horizonml predict runs/first --data digits --part held-out
    """
    from horizonml.api.evaluation import parse_part, trained_with
    from horizonml.api.predictions import write_predictions
    from horizonml.text import count

    found = trained_with(checkpoint, data, overrides or ())
    written = write_predictions(found, files or [], parse_part(part, data is not None), batch_size, out)
    print(f"wrote {out} ({count(written, 'sample')})")


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="How the text begins.", show_default=False)],
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="How many tokens are written.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", min=0.0, help="How much the model dares; at 0, it always takes the most probable token."
        ),
    ] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides what is drawn.")] = 0,
) -> None:
    """Let a language model that was trained on a text write.

    It prints the prompt and what follows. A checkpoint whose model is `module:callable` runs that code: use only those
    that you trust.

    horizonml generate runs/text "Shall I compare" --temperature 0.5
    """
    from horizonml.api.predictions import generate as write

    print(prompt + write(checkpoint, prompt, tokens=tokens, temperature=temperature, seed=seed))
