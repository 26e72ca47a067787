"""The image: what `docker buildx bake` would build, and that our own code is in the last layer. Devices of Compose."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.programs import need_buildx

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "images" / "worker" / "Dockerfile").read_text()


def targets(*names: str) -> dict[str, Any]:
    command = ["docker", "buildx", "bake", "--file", "images/docker-bake.hcl", "--print", *names]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout)["target"])


def test_bake_builds_for_processors_and_accelerators() -> None:
    need_buildx()
    assert targets().keys() == {"worker"}
    found = targets("worker", "cuda", "jetson")
    assert {name: target["platforms"] for name, target in found.items()} == {
        "worker": ["linux/amd64", "linux/arm64"],
        "cuda": ["linux/amd64"],
        "jetson": ["linux/arm64"],
    }
    declared = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    for target in found.values():
        assert target["args"].keys() <= declared
        assert {"VERSION", "REVISION", "CREATED", "SOURCE"} <= target["args"].keys()
        assert {kind.split(",")[0] for kind in target["attest"]} == {"type=sbom", "type=provenance"}
        # The index and the build agree: that of processors has none for GPUs.
        build = target["args"].get("TORCH_BUILD", "+cpu")
        assert target["args"]["TORCH_INDEX"].endswith(f"/{build[1:]}")


def test_a_change_of_our_code_changes_no_layer_but_the_last_that_is_copied() -> None:
    final = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    copied = re.findall(r"^COPY --from=(\w+)", final, re.MULTILINE)
    assert copied == ["torch", "libraries", "code"]
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM )", DOCKERFILE, re.MULTILINE | re.DOTALL))
    for name in ("requirements", "torch", "libraries"):
        sources = [word for line in re.findall(r"^COPY (.*)", stages[name], re.MULTILINE) for word in line.split()[:-1]]
        assert not {word for word in sources if word.startswith("horizonml")}, name
    arguments = final[final.index("ARG ") :]
    assert not re.search(r"^(RUN|COPY)", arguments, re.MULTILINE)  # which a new revision would repeat


def test_compose_has_equal_devices_and_two_classes_of_unequal_ones() -> None:
    equal = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    workers = {name: service for name, service in equal.items() if name.startswith("worker-")}
    limits = ("cpus", "mem_limit", "memswap_limit")
    assert all(service["hostname"] == name and service["init"] for name, service in workers.items())
    assert len({tuple(service[limit] for limit in limits) for service in workers.values()}) == 1
    unequal = yaml.safe_load((ROOT / "compose.unequal.yaml").read_text())
    classes = [unequal["x-pc"], unequal["x-pi"]]
    assert unequal["services"].keys() == workers.keys()
    assert [classes.index(service) for service in unequal["services"].values()] == [0, 0, 1, 1, 1]
    assert all(one.keys() == set(limits) and one["mem_limit"] == one["memswap_limit"] for one in classes)
