"""Makes the objects of a job in Kubernetes, from the same base manifests that `kubectl apply -k` uses."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from horizonml.job.schema import Job
from horizonml.security.token import Token
from horizonml.text import count

BASE = Path(__file__).parent / "base"
PART_OF = "app.kubernetes.io/part-of=horizonml"
WORKERS = "app.kubernetes.io/name=horizonml,app.kubernetes.io/component=worker"
SETTINGS = "horizonml/settings"  # annotation of the StatefulSet: what `scale` needs to know again
DIGEST = "horizonml/job-digest"  # annotation of its pods: a change of job is a change of them
SECRET = "horizonml-token"  # noqa: S105  (the name of the Secret that the base's pods mount)

Document = dict[str, Any]


@dataclass(frozen=True)
class ManifestSettings:
    """What Kubernetes has to know beside the job file."""

    namespace: str
    workers: int
    image: str | None = None
    cpu: str | None = None  # limit of a worker; its request is at most that
    memory: str | None = None
    storage_class: str | None = None

    def to_json(self) -> str:
        """Return the settings as a text of JSON, for an annotation."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ManifestSettings:
        """Return the settings that `to_json` was given. Raises ValueError for any other text."""
        return TypeAdapter(cls).validate_json(text)


def render(job: Job, settings: ManifestSettings, token: Token | None = None) -> list[Document]:
    """Return the objects to apply, in order, with a Secret if there is a token for it.

    `job` must be for `settings.workers` ranks.
    """
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    documents: list[Document] = []
    for name in kustomization["resources"]:
        documents += [document for document in yaml.safe_load_all((BASE / name).read_text()) if document]
    content = yaml.safe_dump(job.model_dump(exclude_none=True), sort_keys=False)
    documents.insert(
        1, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "job"}, "data": {"job.yaml": content}}
    )
    if token is not None:
        documents.insert(1, secret(token))
    labels = {key: value for entry in kustomization["labels"] for key, value in entry["pairs"].items()}
    for document in documents:
        metadata = document["metadata"]
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        if document["kind"] == "Namespace":
            metadata["name"] = settings.namespace
        else:
            metadata["namespace"] = settings.namespace
        if document["kind"] in ("Deployment", "StatefulSet") and settings.image:
            containers(document)[0]["image"] = settings.image
        if document["kind"] == "StatefulSet":
            _set_workers(document, job, settings)
    return documents


def secret(token: Token) -> Document:
    """Return the Secret from which the pods of a job take their token."""
    content = {"token": token.text}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "type": "Opaque", "stringData": content}


def containers(document: Document) -> list[Document]:
    """Return the containers of a Deployment or StatefulSet."""
    found: list[Document] = document["spec"]["template"]["spec"]["containers"]
    return found


def version(workers: Document) -> tuple[str | None, int, str, Document]:
    """Return what must change in a StatefulSet for its pods to be replaced."""
    template = workers["spec"]["template"]
    digest = template["metadata"].get("annotations", {}).get(DIGEST)
    (container,) = containers(workers)
    return digest, workers["spec"]["replicas"], container["image"], container["resources"]


def _set_workers(document: Document, job: Job, settings: ManifestSettings) -> None:
    """Fill in what the StatefulSet of the workers has from the job and its settings."""
    document["spec"]["replicas"] = settings.workers
    document["metadata"]["annotations"] = {SETTINGS: settings.to_json()}
    template = document["spec"]["template"]
    template["metadata"]["annotations"] = {DIGEST: job.digest()}
    (worker,) = containers(document)
    for entry in worker["env"]:
        if entry["name"] == "WORLD_SIZE":
            entry["value"] = str(settings.workers)
    resources = worker["resources"]
    if settings.cpu:
        resources["limits"]["cpu"] = resources["requests"]["cpu"] = settings.cpu
    if settings.memory:
        resources["limits"]["memory"] = resources["requests"]["memory"] = settings.memory
    if settings.storage_class:
        for claim in document["spec"]["volumeClaimTemplates"]:
            claim["spec"]["storageClassName"] = settings.storage_class


def for_workers(job: Job, workers: int) -> Job:
    """Return the job for another number of ranks. Raises ValueError if its plan does not allow that."""
    if job.parallel.stages is not None and job.parallel.world_size() != workers:
        raise ValueError(
            f"parallel.stages: the plan names {count(job.parallel.world_size(), 'rank')}, not {workers}; change the "
            "stages in the job file, or leave them out and let a strategy make the plan"
        )
    values = copy.deepcopy(job.model_dump())
    values["parallel"]["workers"] = workers
    return Job.model_validate(values)
