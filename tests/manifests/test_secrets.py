"""The token in deployments: where it comes from, who mounts it, and that none stands in a file of the repository."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonml.job.schema import Job
from horizonml.kube.render import ManifestSettings, render, secret
from horizonml.security.token import make_token, parse_token

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "new_token.py"
LOOKS_LIKE_ONE = re.compile(rb"hml-[a-z2-7]{36}")
COMPOSE = [ROOT / "compose.yaml", *sorted((ROOT / "examples").glob("*/compose.yaml"))]


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def files_of_the_repository() -> list[Path]:
    """What git tracks or would, or without git all files that are not in folders of tools."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
        assert listed.returncode == 0, listed.stderr
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        skipped = {".venv", "runs", "build", "dist", ".git", "__pycache__"}
        found = [path for path in ROOT.rglob("*") if not skipped & set(path.relative_to(ROOT).parts)]
        found = [path for path in found if path != ROOT / ".env"]
    return [path for path in found if path.is_file()]


def tokens_in(path: Path) -> list[str]:
    return [match.group().decode() for match in LOOKS_LIKE_ONE.finditer(path.read_bytes())]


def test_no_file_of_the_repository_has_a_token(tmp_path: Path) -> None:
    paths = files_of_the_repository()
    assert ROOT / "compose.yaml" in paths
    assert not {path.relative_to(ROOT).as_posix(): len(found) for path in paths if (found := tokens_in(path))}
    (tmp_path / "one").write_text(f"HORIZONML_TOKEN={make_token().text}\n")
    assert len(tokens_in(tmp_path / "one")) == 1
    assert "/.env" in (ROOT / ".gitignore").read_text().split()


def test_the_file_for_compose_is_made_kept_and_rotated(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("STRATEGY=pipeline\n# GRAFANA_PASSWORD=no\n")

    def make(*options: str) -> tuple[str, dict[str, str]]:
        # Without the packages of the virtual environment: only Docker need be installed.
        result = run(sys.executable, "-I", "-S", str(SCRIPT), "env", str(file), *options)
        assert result.returncode == 0, result.stderr
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        values = dict(line.split("=", 1) for line in file.read_text().splitlines() if not line.startswith("#"))
        assert values["HORIZONML_TOKEN"] not in result.stdout + result.stderr
        assert values["GRAFANA_PASSWORD"] not in result.stdout + result.stderr
        assert values["STRATEGY"] == "pipeline"
        assert parse_token(values["HORIZONML_TOKEN"]).id in result.stdout
        return result.stdout, values

    shown, first = make()
    assert "a new token" in shown
    assert len(first["GRAFANA_PASSWORD"]) >= 20
    assert make()[1] == first
    rotated = make("--rotate")[1]
    assert rotated["HORIZONML_TOKEN"] != first["HORIZONML_TOKEN"]
    assert rotated["GRAFANA_PASSWORD"] == first["GRAFANA_PASSWORD"]
    assert file.read_text().count("HORIZONML_TOKEN=") == 1

    file.write_text("HORIZONML_TOKEN=guessable\n")
    refused = run(sys.executable, str(SCRIPT), "env", str(file))
    assert refused.returncode == 1
    assert "HORIZONML_TOKEN in" in refused.stderr
    assert "make token ROTATE=1" in refused.stderr
    assert "guessable" not in refused.stderr
    assert "Traceback" not in refused.stderr


def test_every_way_makes_the_secret_that_the_pods_mount() -> None:
    token = make_token()
    made = [
        yaml.safe_load(run(sys.executable, "-I", "-S", str(SCRIPT), "secret", "digits").stdout),
        secret("digits-token", token),
    ]
    for document in made:
        parse_token(document["stringData"].pop("token"))
        assert document == made[0]
    assert made[0] == {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "digits-token"}, "type": "Opaque", "stringData": {},
    }  # fmt: skip
    first, second = (run(sys.executable, str(SCRIPT), "secret", "digits").stdout for _ in range(2))
    assert first != second


def test_a_submitted_job_has_a_secret_of_its_own_and_shows_it_nowhere_else() -> None:
    job, token = Job.model_validate({"parallel": {"strategy": "ddp", "workers": 3}}), make_token()
    documents = render(job, ManifestSettings("team", "mine"), token)
    (found,) = [document for document in documents if document["kind"] == "Secret"]
    assert documents.index(found) == 1  # after the namespace, before the pods
    assert found["metadata"]["namespace"] == "team"
    assert found["metadata"]["name"] == "mine-token"
    assert found["metadata"]["labels"]["app.kubernetes.io/part-of"] == "horizonml"
    assert found["stringData"] == {"token": token.text}
    documents.remove(found)
    assert token.text not in str(documents)
    assert documents == render(job, ManifestSettings("team", "mine"))
    assert [d for d in documents if d["kind"] == "NetworkPolicy"]
    assert all(d["metadata"]["namespace"] == "team" for d in documents if d["kind"] == "NetworkPolicy")


def services(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text())["services"])


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_compose_asks_for_the_token_and_has_no_default(path: Path) -> None:
    for name, service in services(path).items():
        environment = service.get("environment", {})
        if name in ("rendezvous", "join") or name.startswith("worker-"):
            # The words name the command that helps.
            assert re.fullmatch(r"\$\{HORIZONML_TOKEN:\?.*`(make|horizonml) \w+`.*\}", environment["HORIZONML_TOKEN"])
        else:
            assert "HORIZONML_TOKEN" not in environment
        for variable, value in environment.items():
            if re.search("TOKEN|PASSWORD|SECRET", variable):
                assert str(value).startswith("${")
                assert ":?" in str(value), f"{name}: {variable} has a default"


def test_compose_separates_who_need_not_meet() -> None:
    whole = yaml.safe_load((ROOT / "compose.yaml").read_text())
    networks = {name: set(service["networks"]) for name, service in whole["services"].items()}

    def meet(one: str, other: str) -> bool:
        return bool(networks[one] & networks[other])

    for number in range(5):
        assert meet("rendezvous", f"worker-{number}")
        assert meet("prometheus", f"worker-{number}")
        assert not meet("grafana", f"worker-{number}")
    assert meet("grafana", "prometheus")
    assert not meet("prometheus", "rendezvous")
    assert not meet("grafana", "rendezvous")
    assert whole["networks"]["metrics"] == {"internal": True}
    for name, service in whole["services"].items():
        for port in service.get("ports", []):
            assert str(port).startswith("127.0.0.1:"), f"{name} is open to other machines"


def test_grafana_lets_nobody_in_with_a_password_that_everybody_knows() -> None:
    compose = services(ROOT / "compose.yaml")["grafana"]["environment"]
    assert compose["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")
    assert compose["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    manifest = (ROOT / "k8s" / "components" / "monitoring-standalone" / "grafana.yaml").read_text()
    (deployment,) = [d for d in yaml.safe_load_all(manifest) if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert env["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
