"""Progress in Kubernetes while ranks are lost and come back: whoever leads the group publishes, and nobody else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.processes import Service, rank_process, wait_for
from tests.unit.test_kubernetes_status import serving

pytestmark = pytest.mark.slow


def test_who_leads_after_a_loss_goes_on_publishing(
    folder: Path, start: Callable[..., subprocess.Popen[str]], service: Service
) -> None:
    with serving(folder / "mounted") as api:

        def rank(number: int) -> subprocess.Popen[str]:
            token = folder / f"token-{number}"
            token.write_text(f"rank-{number}")
            return start(
                "train", "job.yaml", "-n", "2", "--set", "epochs=5000", "--set", "rendezvous.replace_timeout=1",
                RANK=str(number), WORLD_SIZE="2", HORIZONML_RENDEZVOUS=service.address,
                KUBEFLOW_TRAINER_SERVER_URL=f"https://127.0.0.1:{api.port}/status",
                KUBEFLOW_TRAINER_SERVER_CA_CERT=str(folder / "mounted" / "ca.crt"),
                KUBEFLOW_TRAINER_SERVER_TOKEN=str(token),
            )  # fmt: skip

        def leads(number: int) -> bool:
            return api.tokens[-1:] == [f"Bearer rank-{number}"]

        ranks = [rank(0), rank(1)]
        wait_for(lambda: leads(0), "rank 0 publishing")
        rank_process(folder, 0).kill()
        wait_for(lambda: leads(1), "rank 1 publishing")
        ranks[0] = rank(0)
        wait_for(lambda: leads(0), "rank 0 publishing again")
        for process in ranks:
            process.terminate()
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], outputs
        assert not any("cannot be shown" in output for output in outputs), outputs
        changes = [one for one, before in zip(api.tokens, ["", *api.tokens], strict=False) if one != before]
        assert changes == ["Bearer rank-0", "Bearer rank-1", "Bearer rank-0"]
