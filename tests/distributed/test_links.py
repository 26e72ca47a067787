"""Bad networks: packets are lost, links are slow or flap. Training takes longer, and its result is the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.chaos.cluster import Cluster
from tests.distributed.processes import ours, wait_for
from tests.programs import need, need_networks

pytestmark = pytest.mark.slow

RANKS = 3
JOB = f"""
name: test
epochs: 2
batch_size: 24
model: {{name: "tests.models:slow"}}
data: {{name: digits, samples: 144}}
optimizer: {{momentum: 0.9}}
parallel:
  threads: 1
  micro_batches: 3
  workers: {RANKS}
  stages:
    - {{ranks: [0], layers: [0, 12]}}
    - {{ranks: [1, 2], layers: [13, 25]}}
checkpoint: {{every_steps: 5, keep: 1}}
rendezvous: {{timeout: 60, step_timeout: 60}}
"""
Fault = Callable[[Cluster], object]


def steps(cluster: Cluster, rank: int) -> list[dict[str, Any]]:
    return [record for record in cluster.records(rank) if "lr" in record]


def train(folder: Path, name: str, fault: Fault, during: Fault = lambda cluster: None) -> Cluster:
    """Run the job to its end on networks with a fault; look at it, or do more to it, `during` the training."""
    job = folder / "job.yaml"
    job.write_text(JOB)
    (folder / "slow").write_text("0")  # a rank whose steps are long enough to be looked at
    env = {"HORIZONML_TEST": str(folder), "HORIZONML_TEST_SLOW": str(folder / "slow")}
    with Cluster(job, RANKS, folder / name, env, isolated=True) as cluster:
        fault(cluster)
        wait_for(lambda: not cluster.alive or len(steps(cluster, 0)) >= 2, "the first steps")
        during(cluster)
        wait_for(lambda: not cluster.alive, "the end of the training")
        assert [cluster.exit_code(rank) for rank in range(RANKS)] == [0] * RANKS
    assert "Traceback" not in "".join(cluster.log(rank).read_text() for rank in range(RANKS))
    assert not ours(folder)
    return cluster


def result(cluster: Cluster) -> dict[str, Tensor]:
    """The tensors of the last checkpoint, which must be complete."""
    (last,) = cluster.run_folder.glob("checkpoints/step-*")
    assert json.loads((last / "checkpoint.json").read_text())["complete"]
    return {name: tensor for file in last.glob("*.safetensors") for name, tensor in load_file(file).items()}


def again(cluster: Cluster, rank: int) -> int:
    """How many segments the kernel of a rank's network has sent again."""
    lines = Path(f"/proc/{cluster.process(rank).pid}/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def test_a_network_that_loses_packets_and_flaps_costs_time_and_nothing_else(tmp_path: Path) -> None:
    need_networks()
    need("iptables", "iptables")
    good = train(tmp_path, "good", lambda cluster: None)
    moments, sent_again = list[float](), list[int]()

    def flap(cluster: Cluster) -> None:
        sent_again.extend(again(cluster, rank) for rank in range(RANKS))
        cluster.partition(2)
        moments.append(time.time())
        time.sleep(2)
        moments.append(time.time())
        cluster.heal(2)

    bad = train(tmp_path, "bad", lambda cluster: cluster.networks.lose(0.05), flap)
    assert min(sent_again) > 0, "no packet was lost"
    plans = [[record["plan"] for record in one.records(0) if record["kind"] == "run"][-1] for one in (bad, good)]
    assert plans[0] == plans[1]
    found, expected = result(bad), result(good)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for rank in range(RANKS):
        assert sum(record["kind"] == "run" for record in bad.records(rank)) <= 2
    cut, mended = moments
    ended = [record for record in bad.records(0) if record["kind"] in ("step", "evaluation")]
    assert ended[-1]["time"] > mended, "the training was over before the link was mended"
    # The rank that was cut off may have done its part of one of them before.
    assert len([record for record in ended if cut < record["time"] < mended]) <= 1, "the network held nothing up"
