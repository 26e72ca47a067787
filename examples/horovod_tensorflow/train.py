"""Horovod with TensorFlow: the digits, in MNIST's shape, with DistributedGradientTape.

Started by horovodrun, once per rank (see README.md). Writes the records that `horizonml train` writes, so that
`horizonml report` shows this run beside the others.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

# These need neither torch nor anything else that is heavy.
from horizonml import __version__
from horizonml.engine.clock import Clock
from horizonml.machine.host import available_cores, cpu_seconds, machine_info, rss_bytes
from horizonml.telemetry.log import JsonLines
from horizonml.telemetry.record import EvaluationRecord, StepRecord

DIGITS = Path(__file__).resolve().parents[2] / "horizonml" / "data" / "digits.csv.gz"
HELD_OUT = 0.2


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per update, over all ranks together")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fp16", action="store_true", help="send gradients as 16-bit floats")
    parser.add_argument("--out", type=Path, default=Path("runs/horovod-tensorflow"))
    options = parser.parse_args()
    idle = rss_bytes()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(max(1, int(available_cores()) // hvd.local_size()))
    tf.random.set_seed(options.seed)
    if options.batch_size % hvd.size():
        raise SystemExit(f"--batch-size: {options.batch_size} does not divide by {hvd.size()} ranks")
    if hvd.rank() == 0:
        shutil.rmtree(options.out, ignore_errors=True)
    hvd.allreduce(tf.zeros(1), name="clean")
    train(options, idle)


def train(options: argparse.Namespace, idle: int) -> None:
    """All epochs; rank 0 says how it goes."""
    (images, labels), (test_images, test_labels) = load()
    model = build(images.shape[1:])
    optimizer = tf.keras.optimizers.SGD(options.lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    compression = hvd.Compression.fp16 if options.fp16 else hvd.Compression.none
    # All ranks begin with what rank 0 has.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    lines = JsonLines(options.out / f"rank-{hvd.rank()}.jsonl")
    lines.write({"kind": "run", "time": time.time(), **about(options, model, idle)})
    width = 2 if options.fp16 else 4
    sent = 2 * (hvd.size() - 1) * width * model.count_params() // hvd.size()
    rng, clock, number, cpu = np.random.default_rng(options.seed), Clock(), 0, cpu_seconds()
    for epoch in range(1, options.epochs + 1):
        order = rng.permutation(len(images))
        for batch in np.array_split(order, range(options.batch_size, len(order), options.batch_size)):
            clock.restart()
            own = np.array_split(batch, hvd.size())[hvd.rank()]
            clock.switch("compute", "forward")
            with tf.GradientTape() as tape:
                logits = model(images[own], training=True)
                loss = loss_of(labels[own], logits) / len(batch)
            tape = hvd.DistributedGradientTape(tape, compression=compression, op=hvd.Sum)
            clocked(tape, clock)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            clock.switch("transfer", "metrics")
            correct = tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == labels[own], tf.float32))
            total = hvd.allreduce(tf.stack([loss, correct / len(batch)]), op=hvd.Sum, name="metrics").numpy()
            wall = clock.finish()
            number += 1
            record = StepRecord(
                step=number, epoch=epoch, time=time.time(), wall=wall, **clock.totals, samples=len(own),
                batch=len(batch), loss=float(total[0]), metrics={"accuracy": float(total[1])}, lr=options.lr,
                bytes_sent=sent, bytes_received=sent, links={"members": (sent, sent)}, cpu_seconds=cpu_seconds() - cpu,
                rss_bytes=rss_bytes(), joules=None, divergence=None,
            )  # fmt: skip
            cpu = cpu_seconds()
            lines.write(record.to_json())
        started = time.perf_counter()
        held_out = evaluate(model, test_images, test_labels, loss_of)
        clock.pause()
        cpu = cpu_seconds()
        evaluation = EvaluationRecord(
            number,
            epoch,
            time.time(),
            time.perf_counter() - started,
            held_out[0],
            {"accuracy": held_out[1]},
            len(test_labels),
        )
        lines.write(evaluation.to_json())
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}/{options.epochs}: held-out loss {held_out[0]:.4f}, accuracy {held_out[1]:.2%} | "
                f"{options.batch_size / wall:,.0f} samples/s",
                flush=True,
            )
    lines.write({"kind": "end", "time": time.time(), "outcome": "complete"})
    lines.close()


def clocked(tape: Any, clock: Clock) -> None:
    """Tell waiting for the other ranks from the time in which gradients travel: a word to all goes first."""
    reduce = tape._allreduce_grads

    def timed(*arguments: Any, **options: Any) -> Any:
        clock.switch("wait", "others")
        hvd.allreduce(tf.zeros(1), name="here")
        clock.switch("transfer", "all-reduce")
        result = reduce(*arguments, **options)
        clock.switch("compute", "update")
        return result

    tape._allreduce_grads = timed


def evaluate(model: Any, images: np.ndarray, labels: np.ndarray, loss_of: Any) -> tuple[float, float]:
    """Loss and accuracy on held-out data: every rank takes its part, and the sums are exchanged."""
    own = np.array_split(np.arange(len(labels)), hvd.size())[hvd.rank()]
    logits = model(images[own], training=False)
    correct = tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == labels[own], tf.float32))
    total = hvd.allreduce(tf.stack([loss_of(labels[own], logits), correct]), op=hvd.Sum, name="evaluation").numpy()
    return float(total[0] / len(labels)), float(total[1] / len(labels))


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and held-out digits as float32 `[n, 28, 28, 1]` from 0 to 1, and their classes."""
    rows = gzip.decompress(DIGITS.read_bytes()).decode().splitlines()
    table = np.array([[int(value) for value in row.split(",")] for row in rows])
    images = table[:, :64].reshape(-1, 8, 8, 1).astype(np.float32) / 16
    images = tf.image.resize(images, (28, 28)).numpy()
    order = np.random.default_rng(1797).permutation(len(images))
    images, labels = images[order], table[order, 64].astype(np.int64)
    first = round(HELD_OUT * len(images))
    return (images[first:], labels[first:]), (images[:first], labels[:first])


def build(shape: tuple[int, ...]) -> Any:
    """Two convolutions, two dense layers: the usual network for MNIST."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input(shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def about(options: argparse.Namespace, model: Any, idle: int) -> dict[str, Any]:
    """The first record: this rank, the job, the machine."""
    size = hvd.size()
    stage = {"start": 0, "stop": len(model.layers), "ranks": list(range(size)), "shares": [1.0] * size}
    return {
        "rank": hvd.rank(),
        "world_size": size,
        "stage": 0,
        "job": {
            "name": "horovod-tensorflow",
            "model": {"name": "keras CNN"},
            "data": {"name": "digits (28 px)"},
            "batch_size": options.batch_size,
            "epochs": options.epochs,
            "seed": options.seed,
        },
        "plan": {"stages": [stage | {"split": "samples"}], "schedule": "gpipe", "micro_batches": 1},
        "layers": [layer.name for layer in model.layers],
        "cores": available_cores(),
        "machine": machine_info().to_json(),
        "rss_idle_bytes": idle,
        "versions": {"horizonml": __version__, "tensorflow": tf.__version__},
    }


if __name__ == "__main__":
    main()
