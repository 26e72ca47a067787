"""Which device a rank computes on, what the clock says of one that is busy meanwhile, and what devices' files know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from horizonml.comm.group import Group
from horizonml.engine import clock as clock_module
from horizonml.engine.clock import Clock
from horizonml.errors import JobError
from horizonml.job.jobfile import parse
from horizonml.machine import accelerator
from horizonml.machine.accelerator import Compute, GpuReadings, choose_device, computing, readings
from horizonml.machine.host import available_cores
from horizonml.planner.devices import load_cluster, read_profile, write_cluster
from horizonml.planner.profile import Host, LayerProfile, Network, Profile
from horizonml.runtime.checks import Capacity, find_hosts, use_device
from horizonml.runtime.planning import _on_this_machine, plan_job


class Gpu(Compute):
    """A GPU that is only described."""

    def memory(self) -> float:
        return 6 * 2.0**30


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment does not say what to compute on."""
    monkeypatch.delenv("HORIZONML_DEVICE", raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs, one of which cannot compute; the names of those that were tried."""
    tried: list[str] = []

    def found(number: int) -> tuple[Compute, str | None]:
        tried.append(f"cuda:{number}")
        trouble = "no kernel image is available" if number == 1 else None
        return Gpu(torch.device("cuda", number), f"GPU {number}"), trouble

    monkeypatch.setattr(accelerator, "_without_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(accelerator, "_cuda", found)
    monkeypatch.setattr(accelerator, "_used", [Compute()])
    return tried


def test_each_rank_takes_a_gpu_as_far_as_there_are_any_that_can_be_used(gpus: list[str]) -> None:
    chosen = [choose_device("auto", place) for place in range(3)]
    assert [one.label for one in chosen] == ["cuda:0", "", ""]
    assert chosen[1].why == "GPU 1 is not used: no kernel image is available"
    assert not chosen[2].why
    assert choose_device("cuda", 2).label == "cuda:0"  # ranks share what there is, where that is wanted
    assert choose_device("cuda:0", 5).described == "GPU 0 (cuda:0)"
    assert gpus == ["cuda:0", "cuda:1", "cuda:0", "cuda:0"]


def test_an_impossible_wish_names_the_field_and_the_cure(gpus: list[str]) -> None:
    for wish, place, words in (
        ("cuda", 1, "device: cuda, but GPU 1 cannot be used: no kernel image is available"),
        ("cuda:7", 0, "device: cuda:7, but the GPUs here have the numbers 0 to 1"),
        (
            "gpu",
            0,
            r"device: 'gpu' is not one of auto, cpu, cuda, cuda:N .* and mps",
        ),
    ):
        with pytest.raises(JobError, match=words):
            choose_device(wish, place)


def test_the_environment_overrides_the_job_which_ranks_need_not_have_in_common(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, said = parse("{device: cpu, parallel: {strategy: ddp, workers: 2}}", "job.yaml"), list[str]()
    assert job.digest() == parse("{device: cuda, parallel: {strategy: ddp, workers: 2}}", "job.yaml").digest()
    use_device(job, 0, said.append)
    assert (computing().label, said) == ("", [])
    monkeypatch.setenv("HORIZONML_DEVICE", "cuda")
    use_device(job, 0, said.append)
    assert (computing().label, said) == ("cuda:0", ["this rank computes on GPU 0 (cuda:0)"])
    monkeypatch.setenv("HORIZONML_DEVICE", "tpu")
    with pytest.raises(JobError, match=r"^\$HORIZONML_DEVICE \(or --device\): 'tpu' is not one of"):
        use_device(job, 0, said.append)
    monkeypatch.setenv("HORIZONML_DEVICE", "cuda")
    horovod = parse("{parallel: {strategy: horovod, workers: 2}}", "job.yaml")
    with pytest.raises(JobError, match="horovod computes on processors here; choose cpu"):
        use_device(horovod, 0, said.append)


def test_a_plan_for_this_machine_is_for_the_devices_that_its_ranks_would_take(gpus: list[str]) -> None:
    job, said = parse("{parallel: {strategy: auto, workers: 3}}", "job.yaml"), list[str]()
    _, places = _on_this_machine(job, said.append)
    assert [one.label for one in places.devices] == ["cuda:0", "", ""]
    assert [(host.ranks, host.cores) for host in places.hosts] == [((0,), 1.0), ((1, 2), available_cores())]
    assert places.hosts[0].memory == 6 * 2.0**30
    assert said == ["warning: GPU 1 is not used: no kernel image is available", "rank 0: GPU 0 (cuda:0)"]


def test_a_plan_for_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, told, words in (
        ("cuda:99", "", "device: cuda:99, but "),
        ("cpu", "gpu", r"\$HORIZONML_DEVICE \(or --device\): 'gpu' is not one of auto, cpu, cuda, cuda:N"),
    ):
        job = parse(f"{{device: '{device}', parallel: {{strategy: ddp, workers: 2}}}}", "job.yaml")
        monkeypatch.setenv("HORIZONML_DEVICE", told)
        with pytest.raises(JobError, match=words):
            plan_job(job, None, False, print)


def test_a_gpu_is_a_host_with_a_memory_of_its_own(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(None, 0, 1, 60.0, ["here"])
    (processor,) = find_hosts(group, [Capacity.here(group, 0.0)])
    assert group.devices == {}
    monkeypatch.setattr(accelerator, "_used", [Gpu(torch.device("cuda", 0), "GPU 0")])
    assert find_hosts(group, [Capacity.here(group, 0.0)]) == [Host((0,), 1.0, 6 * 2.0**30)]
    assert group.devices == {0: "cuda:0"}
    monkeypatch.setattr(accelerator, "_used", [Gpu(torch.device("cuda", 0), "GPU 0", shared=True)])
    (shared,) = find_hosts(group, [Capacity.here(group, 0.0)])
    assert shared.memory == min(processor.memory, 6 * 2.0**30)


class Watch:
    """A device that is busy until some time."""

    def __init__(self) -> None:
        self.marks, self.until = 0, None

    def mark(self) -> None:
        self.marks += 1

    def finished(self) -> float | None:
        return self.until


def test_time_in_which_the_device_was_busy_is_compute_although_the_rank_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(clock_module, "perf_counter", lambda: now[0])
    watch = Watch()
    clock = Clock(watch)

    def after(seconds: float, until: float | None, kind: clock_module.Kind, what: str) -> None:
        now[0] += seconds
        watch.until = until  # type: ignore[assignment]
        clock.switch(kind, what)

    after(1, None, "wait", "receive")
    after(10, 4.0, "transfer", "receive")  # it was busy for three of ten seconds
    after(10, 4.0, "wait", "others")
    after(10, None, "compute", "forward")  # and is still busy with something else: all ten of them
    after(1, None, "compute", "update")
    assert watch.marks == 1
    assert clock.finish() == 32
    assert clock.totals == {"compute": 1 + 3 + 10 + 1, "wait": 7, "transfer": 10}
    assert all(a.end == b.start for a, b in zip(clock.spans, clock.spans[1:], strict=False))
    assert [span.what for span in clock.spans if span.kind == "compute"] == [
        "prepare", "device", "device", "forward", "update"
    ]  # fmt: skip


DEVICES = """
devices:
  - {name: laptop, kind: cuda, speed: 60, cores: 8, memory: 6GiB}
  - {name: jetson, kind: cuda, profile: jetson.yaml, memory: 4GiB}
  - {name: pi, count: 2, memory: 1GiB, cores: 4}
"""


def test_devices_on_paper_may_have_gpus(tmp_path: Path) -> None:
    path = tmp_path / "devices.yaml"
    path.write_text(DEVICES)
    hosts = load_cluster(path).hosts()
    assert hosts[0] == Host((0,), 1.0, 6 * 2.0**30)
    assert [host.cores for host in hosts] == [1.0, 1.0, 4.0, 4.0]
    path.write_text("devices: [{name: laptop, kind: cuda, memory: 6GiB}]")
    with pytest.raises(JobError, match="kind: cuda needs a profile that was measured on such a device"):
        load_cluster(path)


def test_a_machine_with_a_gpu_and_a_processor_has_a_profile_of_each(tmp_path: Path) -> None:
    layer = LayerProfile("layer", (0.1,), (0.2,), 8, 8, 8)
    slow = Profile("processor", (4,), 1e-9, (layer,))
    fast = replace(slow, device="GPU", layers=(replace(layer, forward=(0.001,)),))
    hosts = [Host((0,), 1.0, 2.0**30), Host((1, 2), 4.0, 2.0**30)]
    write_cluster(tmp_path, ["pc", "pc", "pc"], hosts, Network(1e-3, 1e8), [fast, slow, slow])
    cluster = load_cluster(tmp_path / "cluster.yaml")

    def none() -> Profile:
        raise AssertionError("every device has a profile of its own")

    assert [one.device for one in cluster.profiles(none, ["layer"], tmp_path)] == ["GPU", "processor", "processor"]
    assert read_profile(tmp_path / "profile-pc-rank1.yaml", ["layer"]).device == "processor"


def test_a_jetson_tells_of_its_gpu_in_files(tmp_path: Path) -> None:
    zone = tmp_path / "class/thermal/thermal_zone1"
    zone.mkdir(parents=True)
    (zone / "type").write_text("GPU-therm\n")
    (zone / "temp").write_text("48500\n")
    load = tmp_path / "devices/gpu.0"
    load.mkdir(parents=True)
    (load / "load").write_text("250\n")
    assert readings("no such GPU", tmp_path) == GpuReadings(48.5, 0.25)
    assert readings("no such GPU", tmp_path / "nothing") == GpuReadings()
