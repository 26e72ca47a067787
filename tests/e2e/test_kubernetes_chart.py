"""The Helm chart in a real cluster: install, test, scale, another job, uninstall."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import yaml

from tests.e2e.cluster import CLUSTER, NAMESPACE, Cluster
from tests.e2e.tools import ROOT, run, wait_for
from tests.programs import need

RELEASE = "released"


def test_a_release_from_its_installation_to_its_end(clean: Cluster, tmp_path: Path) -> None:
    need("helm", "it installs the chart (`make helm` gets it)")
    program = shutil.which("helm")  # the cluster's PATH may be another one
    assert program is not None

    def helm(verb: str, workers: int = 2, epochs: int = 4000) -> None:
        values = {
            "job": {"name": RELEASE, "epochs": epochs, "parallel": {"strategy": "ddp"}},
            "classes": [{"name": "worker", "count": workers, "cpu": "300m", "memory": "700Mi"}],
        }
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
        given = [str(ROOT / "k8s" / "chart"), "--values", str(tmp_path / "values.yaml")]
        options = ["--namespace", NAMESPACE, "--kube-context", f"kind-{CLUSTER}"]
        shown = run(
            program,
            verb,
            RELEASE,
            *(given if verb in ("install", "upgrade") else []),
            *options,
            env=clean.env,
            both=True,
        )
        assert "hml-" not in shown  # as every token begins

    def figure(name: str) -> float:
        return clean.metric(0, f"horizonml_{name}", RELEASE) or 0

    def token() -> str:
        return str(clean.get("secret", f"{RELEASE}-token")["data"]["token"])

    def uids() -> set[str]:
        return {pod["metadata"]["uid"] for pod in clean.pods(RELEASE)}

    started = time.monotonic()
    helm("install")
    wait_for(lambda: figure("step") > 0, "the first step", 60)
    print(f"seconds from install to the first step: {time.monotonic() - started:.1f}")
    first = token()
    helm("test")
    before = figure("step")
    helm("upgrade", workers=3)
    wait_for(lambda: figure("world_size") == 3, "a group of three", 120)
    assert figure("step") > before
    assert figure("steps_repeated_total") == 0
    old = uids()
    assert all(pod["status"]["containerStatuses"][0]["restartCount"] == 0 for pod in clean.pods(RELEASE))

    helm("upgrade", workers=3, epochs=3999)
    wait_for(lambda: not old & uids(), "the workers being replaced", 240)
    wait_for(lambda: figure("step") > before and "resumed from step" in clean.log(0, RELEASE), "more steps", 120)
    assert token() == first

    helm("uninstall")
    wait_for(lambda: not clean.pods(RELEASE), "the end of the pods", 120)
    kinds = "all,configmaps,secrets,networkpolicies,poddisruptionbudgets,serviceaccounts,roles,rolebindings,pvc"

    def left() -> list[str]:
        found = clean.get(kinds, "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
        return [one["kind"] for one in found]

    wait_for(lambda: left() == ["PersistentVolumeClaim"] * 3, "nothing but the claims being left", 60)
