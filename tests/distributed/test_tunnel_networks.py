"""A job on devices with networks of their own: which ports they open, and that tunnels do not change the result."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.chaos.network import Networks
from horizonml.comm.tunnel.addresses import entries, is_ours
from horizonml.security.token import make_token
from tests.distributed.processes import environment, wait_for
from tests.programs import need_networks

pytestmark = pytest.mark.slow
PORT, LINK_PORT, LISTENING = 29400, 29401, 0x0A  # the last one as the kernel writes it
DEVICES = 3


def train(folder: Path, **access: str) -> tuple[dict[str, torch.Tensor], set[str], set[int]]:
    """Train on three devices; return the parameters, and the addresses and ports at which the devices listened.

    The third result holds only ports that other devices reach.
    """
    folder.mkdir()
    (folder / "job.yaml").write_text((folder.parent / "job.yaml").read_text())
    program = [sys.executable, "-m", "horizonml"]
    with Networks(DEVICES) as networks, ExitStack() as started:

        def start(name: str, command: list[str], **extra: str) -> subprocess.Popen[str]:
            output = started.enter_context((folder / f"{name}.log").open("w"))
            env = environment(HORIZONML_TEST=str(folder.parent), **access, **extra)
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        service = ["rendezvous", "--host", networks.address, "--port", str(PORT)]
        start("service", networks.at_switch([*program, *service]))
        place = {"HORIZONML_RENDEZVOUS": f"{networks.address}:{PORT}", "WORLD_SIZE": str(DEVICES)}
        command = [*program, "train", "job.yaml", "--set=parallel.strategy=pipeline"]
        ranks = [
            start(f"rank-{rank}", networks.at_rank(rank, command), RANK=str(rank), **place) for rank in range(DEVICES)
        ]
        seen: set[tuple[str, int]] = set()

        def over() -> bool:
            for rank in range(DEVICES):
                asked = networks.at_rank(rank, ["cat", "/proc/net/tcp"])
                table = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
                seen.update(one.local for one in entries(table) if one.state == LISTENING)
            return all(process.poll() is not None for process in ranks)

        wait_for(over, "the end of the training", 120)
    for rank, process in enumerate(ranks):
        output = (folder / f"rank-{rank}.log").read_text()
        assert process.returncode == 0, output
        assert not any(secret in output for secret in access.values() if len(secret) > 1)
    newest = max((folder / "runs" / "test" / "checkpoints").glob("step-*"), key=lambda path: path.name)
    found = {key: value for shard in newest.glob("*.safetensors") for key, value in load_file(shard).items()}
    assert found
    reachable = {port for address, port in seen if not address.startswith("127.")}
    return found, {address for address, _ in seen}, reachable


@pytest.mark.longest
def test_each_device_opens_its_two_ports_and_the_result_is_that_without_a_token(folder: Path) -> None:
    need_networks()
    expected, _, open_ports = train(folder / "insecure", HORIZONML_INSECURE="1")
    assert LINK_PORT not in open_ports
    found, addresses, open_ports = train(folder / "encrypted", HORIZONML_TOKEN=make_token().text)
    assert open_ports == {LINK_PORT, LINK_PORT + 1}  # the latter for the service that it keeps in reserve
    assert any(is_ours(address) for address in addresses)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
