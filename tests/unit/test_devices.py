"""A cluster on paper, and the plan made for it, in words."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from horizonml.errors import JobError
from horizonml.job.jobfile import parse, read_devices, read_plan, write_plan
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.planner.choose import choose
from horizonml.planner.devices import load_cluster, write_cluster, write_profile
from horizonml.planner.evaluator import Evaluator, judge
from horizonml.planner.explain import explain, rows
from horizonml.planner.problem import Problem
from horizonml.planner.profile import Host, Network, Profile
from horizonml.planner.reasons import compare, remedy, shortage
from horizonml.planner.search import search
from horizonml.planner.strategies import fixed_plan, needs_profile, problem_for, syncs_of
from tests.unit.test_planner import profile

TEXT = """
latency: 2ms
devices:
  - {name: laptop, memory: 8GiB}
  - {name: pi, count: 2, speed: 0.25, memory: 512MiB, bandwidth: 40Mbit}
links:
  - {between: [laptop, pi], bandwidth: 20Mbit, latency: 5ms}
"""


def cluster_file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "devices.yaml"
    path.write_text(text)
    return path


def test_devices_links_and_units(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_file(tmp_path))
    assert cluster.names == ["laptop", "pi-0", "pi-1"]
    assert [host.memory for host in cluster.hosts()] == [8 * 2**30, 2**29, 2**29]
    network = cluster.network()
    assert network.between(0, 2) == (0.005, 2.5e6)
    assert network.between(1, 2) == (0.002, 5e6)
    fast, slow, _ = cluster.profiles(lambda: profile(0.001, 0.002), ["layer0", "layer1"])
    assert slow.seconds(1, 10) == pytest.approx([4 * time for time in fast.seconds(1, 10)])


def test_mistakes_in_the_file_are_named(tmp_path: Path) -> None:
    for text, message in (
        ("devices: []", r"devices: \[\] must have at least 1 item$"),
        (
            "devices: [{name: a, memory: 8XB}]",
            r"devices\.0\.memory: '8XB' is not a number with one of B, .*; write",
        ),
        ("devices: [{name: a}]", r"devices\.0\.memory: missing; give it a value"),
        ("devices: [{name: a, memory: 1GiB, sped: 2}]", r"devices\.0\.sped: unknown key; did you mean 'speed'\?"),
        ("devices: [{name: a, memory: 1GiB, speed: 1e999}]", r"devices\.0\.speed: inf must be a finite number"),
        ("devices: [{name: a b, memory: 1GiB}]", r"devices\.0\.name: 'a b' must begin with a letter or digit and"),
        ("devices: [{name: a, memory: 1GiB, count: 9000}, {name: b, memory: 1GiB, count: 2000}]", "11,000 of them"),
        ("- 1", r"the file: \[1\] must be a section of keys and values"),
        ("devices: [{name: a, memory: 1GiB}]\nlinks: [{between: [a, b], bandwidth: 1Mbit}]", "'b' is not a device;"),
    ):
        with pytest.raises(JobError, match=message):
            load_cluster(cluster_file(tmp_path, text))
    with pytest.raises(JobError, match=r"nowhere\.yaml: No such file or directory"):
        load_cluster(tmp_path / "nowhere.yaml")


def planned_for(tmp_path: Path, batch: int = 32) -> tuple[Problem, list[str]]:
    cluster = load_cluster(cluster_file(tmp_path))
    here = profile(*[0.001] * 6, parameters=1 << 20, saved=1 << 16)
    profiles = cluster.profiles(lambda: here, [layer.name for layer in here.layers])
    return Problem(profiles, cluster.hosts(), cluster.network(), batch, 1), cluster.names


def test_a_plan_is_explained(tmp_path: Path) -> None:
    made, names = planned_for(tmp_path)
    found = search(made)
    table = rows(made, found, names, [f"layer{number}" for number in range(6)])
    assert len(table) == 3
    _, layers, rank, _, _, memory, _ = table[0]
    assert (rank, layers[:2], memory.endswith(" of 8.0 GiB")) == ("0 (laptop)", "0-", True)
    first, *_ = explain(Evaluator(made), found, names)
    assert first.text.startswith("The bottleneck: laptop (rank 0) computes for ")
    assert re.fullmatch(
        r"Simpler plans: with ddp and equal shares a step would take .* times as long\), with an equal split of the "
        r"layers and \d+ micro-batch(es)? .* longer\), with laptop alone [\d.]+ ms \(\d+% longer\)\.",
        compare(made, found, names).text,
    )
    slow = judge(made, Plan((Stage(0, 1, (1,), (1.0,)), Stage(1, 6, (2, 0), (1.0, 1.0)))))
    assert compare(made, slow, names).text.endswith("% less); do not distribute this job.")


def test_who_lacks_memory_and_what_would_fit(tmp_path: Path) -> None:
    made, names = planned_for(tmp_path, batch=1 << 19)
    plan = Plan((Stage(0, 2, (0,), (1.0,)), Stage(2, 6, (1, 2), (1.0, 1.0))))
    found = judge(made, plan)
    text = shortage(made, found, names)
    assert text is not None
    assert text.startswith("pi-0 (rank 1) lacks 63.5 GiB of memory: it needs 64.0 GiB and has 512.0 MiB (2 other ranks")
    assert re.search(r"With a batch_size of \d+ there is a plan that fits", remedy(made, found))


def test_the_remedy_is_the_nearest_one_that_works(tmp_path: Path) -> None:
    made, names = planned_for(tmp_path)
    two = Plan((Stage(0, 3, (1,), (1.0,)), Stage(3, 6, (2, 0), (1.0, 1.0))))
    needed = max(judge(made, replace(two, micro_batches=16)).prediction.memory.values())
    tight = replace(made, hosts=[replace(host, memory=needed) for host in made.hosts])
    assert shortage(made, judge(made, two), names) is None
    assert remedy(tight, judge(tight, two)) == "With parallel.micro_batches: 16 the same stages fit."
    alone = Plan((Stage(0, 6, (0, 1, 2), (1.0,) * 3),))
    assert remedy(tight, judge(tight, alone)) == "With parallel.strategy: auto there is a plan that fits."
    hopeless = replace(made, hosts=[replace(host, memory=-1e6) for host in made.hosts])
    text = shortage(hopeless, judge(hopeless, alone), names) or ""
    assert "and its process already takes 976.6 KiB more than there is for a rank" in text
    assert "fewer ranks on a machine, or more memory, are needed" in remedy(hopeless, judge(hopeless, alone))
    small = replace(made, batch_size=2, hosts=[replace(host, memory=1e6) for host in made.hosts])
    assert "and has 976.6 KiB" in (shortage(small, judge(small, alone), names) or "")
    assert remedy(small, judge(small, alone)).startswith("No batch size would fit")


STRATEGIES = ("single", "ddp", "pipeline", "hybrid", "auto", "tensor", "horovod")


def test_a_plan_that_is_written_and_read_is_the_same_plan(tmp_path: Path) -> None:
    """A job of any strategy trains by the plan file of any other as the other would."""
    layers = profile(*[0.001] * 6, parameters=1 << 20, saved=1 << 16)
    for strategy, other in itertools.pairwise((*STRATEGIES, STRATEGIES[0])):
        ranks = 1 if strategy == "single" else 3
        hosts, network = [Host((rank,), 1.0, 1e12) for rank in range(ranks)], Network(1e-3, 1e7)
        made = parse("", "job.yaml", [f"parallel.strategy={strategy}", f"parallel.workers={ranks}"])
        if needs_profile(made.parallel, ranks):
            problem = problem_for(made, [layers] * ranks, hosts, network, 1)
            few = replace(problem.constraints, micro_batches=(1, 4), schedules=("gpipe",))
            plan = choose(made, replace(problem, constraints=few)).plan
        else:
            plan = fixed_plan(made, 6, ranks)
        names = ["laptop", "pi-0", "pi-1"][:ranks]
        write_plan(plan, tmp_path / "plan.yaml", names)
        assert read_devices(tmp_path / "plan.yaml") == names
        job = read_plan(parse("", "job.yaml", [f"parallel.strategy={other}"]), tmp_path / "plan.yaml")
        assert fixed_plan(job, 6, ranks) == plan
        assert job.parallel.world_size() == ranks
        assert any(sync.package for sync in syncs_of(job.parallel)) == (strategy == "horovod")


def test_uneven_shares_formats_and_splits_come_back(tmp_path: Path) -> None:
    for plan in (
        Plan((Stage(0, 4, (1,), (1.0,), send="int8"), Stage(4, 9, (0, 2), (3.0, 1e-9))), "gpipe", 3),
        Plan((Stage(0, 9, (0, 1, 2), (3.0, 2.0, 1.0), Sync.CHANNELS),), "1f1b", 1),
        Plan((Stage(0, 4, (0, 1), (3.0, 1.0), Sync.POWERSGD), Stage(4, 9, (2,), (1.0,))), "1f1b", 4),
        Plan((Stage(0, 9, (0, 1, 2), (1.0, 1.0, 1.0), Sync.HOROVOD_FP16),), "1f1b", 1),
        Plan((Stage(0, 3, (0,), (1.0,)), Stage(3, 6, (1, 2), (1.0, 2.0)), Stage(6, 9, (0,), (1.0,))), "1f1b", 4),
    ):
        write_plan(plan, tmp_path / "plan.yaml")
        job = read_plan(parse("parallel: {strategy: ddp, workers: 7}", "job.yaml"), tmp_path / "plan.yaml")
        assert fixed_plan(job, 9, 3) == plan
    (tmp_path / "plan.yaml").write_text("a: 1")
    with pytest.raises(JobError, match=r"not a plan; `horizonml plan JOB --out"):
        read_plan(job, tmp_path / "plan.yaml")
    (tmp_path / "plan.yaml").write_text("schedule: gpipe\nmicro_batches: 1\nstages: [{ranks: [0], shars: [1]}]")
    with pytest.raises(JobError, match=r"by the plan of .*plan.yaml is not a valid job:\n.*shars: unknown key"):
        read_plan(job, tmp_path / "plan.yaml")


def test_plan_files_of_version_0_1_are_read(tmp_path: Path) -> None:
    path, job = tmp_path / "plan.yaml", parse("parallel: {strategy: auto}", "job.yaml")
    path.write_text("strategy: horovod\nworkers: 3")
    assert fixed_plan(read_plan(job, path), 9, 3) == Plan((Stage(0, 9, (0, 1, 2), (1.0,) * 3, Sync.HOROVOD),))
    stage = "{ranks: [0, 1], shares: [2.0, 1.0], split: SPLIT, send: fp32, layers: [0, 8]}"
    for split, sync in (("channels", Sync.CHANNELS), ("samples", Sync.ALL_REDUCE)):
        path.write_text(f"schedule: 1f1b\nmicro_batches: 1\nstages: [{stage.replace('SPLIT', split)}]")
        assert fixed_plan(read_plan(job, path), 9, 2) == Plan((Stage(0, 9, (0, 1), (2.0, 1.0), sync),))


def test_what_was_measured_can_be_planned_with(tmp_path: Path) -> None:
    profiles = [profile(0.001, 0.002), profile(0.003, 0.001), profile(0.003, 0.001)]
    hosts = [Host((0,), 0.4, 2**29), Host((1, 2), 2.0, 2**30)]
    pairs = {(a, b): (1e-3 * (a + b), 2.5e6 * (1 + a)) for a in range(3) for b in range(3) if a != b}
    path = write_cluster(tmp_path, ["pi", "pc", "pc"], hosts, Network(1.0, 1.0, pairs=pairs), profiles)
    cluster = load_cluster(path)
    assert cluster.names == ["pi", "pc-rank1", "pc-rank2"]
    shared = [Host((rank,), 1.0, 2**30, "pc-1", 2.0) for rank in (1, 2)]
    assert cluster.hosts() == [Host((0,), 0.4, 2**29), *shared]
    assert cluster.network().between(0, 2) == (0.002, 2.5e6)
    assert cluster.network().between(2, 1) == (0.003, 5e6)

    def none() -> Profile:
        raise AssertionError("every device has a profile of its own")

    assert cluster.profiles(none, ["layer0", "layer1"], tmp_path) == profiles


def test_a_device_with_a_profile_of_its_own(tmp_path: Path) -> None:
    base, other, names = profile(0.001, 0.002), profile(0.003, 0.001), ["layer0", "layer1"]
    write_profile(other, {"threads": 1}, tmp_path / "pi.yaml")
    text = "devices: [{name: a, memory: 1GiB}, {name: pi, memory: 1GiB, profile: pi.yaml, speed: 0.5}]"
    cluster = load_cluster(cluster_file(tmp_path, text))
    first, second = cluster.profiles(lambda: base, names, tmp_path)
    assert first == base
    assert second.seconds(0, 10) == pytest.approx([2 * time for time in other.seconds(0, 10)])
    with pytest.raises(JobError, match="profile of another model: its first layer is layer0"):
        cluster.profiles(lambda: base, ["other"], tmp_path)
    (tmp_path / "pi.yaml").write_text("layers: 3")
    with pytest.raises(
        JobError, match=r"is not a profile of this version .* `horizonml plan JOB --profile --out FILE` writes"
    ):
        cluster.profiles(lambda: base, names, tmp_path)
    write_profile(profile(0.001, float("nan")), {}, tmp_path / "pi.yaml")
    with pytest.raises(JobError, match=r"layers\.1\.forward\.0: Input should be a finite number"):
        cluster.profiles(lambda: base, names, tmp_path)
    (tmp_path / "pi.yaml").unlink()
    with pytest.raises(JobError, match="No such file or directory; `horizonml plan JOB --profile --out FILE` writes"):
        cluster.profiles(lambda: base, names, tmp_path)
