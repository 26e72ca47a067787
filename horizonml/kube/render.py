"""Makes the objects of a job in Kubernetes, from the same base manifests that `kubectl apply -k` and the chart use.

A job is named by its objects: each of them begins with the job's name, and is labelled and selected by
`app.kubernetes.io/instance`, so that jobs in one namespace do not see each other.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from horizonml.errors import JobError
from horizonml.job.jobfile import changed, code_fields
from horizonml.job.schema import Job
from horizonml.security.token import Token
from horizonml.text import count

BASE = Path(__file__).parent / "base"
NAME, INSTANCE, CLASS = "app.kubernetes.io/name", "app.kubernetes.io/instance", "horizonml/class"
SETTINGS = "horizonml/settings"  # annotation of the rendezvous service: what the job was submitted with
NODE = "node"  # as an amount of cpu: all that the node has
CLASS_NAME = "[a-z][a-z0-9]*"  # without hyphens: the class pi of job a-b is not the class b-pi of job a
TAKEN = ("job", "data")  # names in the base manifests that are not those of a class
_LABEL = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"  # the value of one
AMOUNT = r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi)?"
_MOST_NAME, MOST_CLASS, _MOST_FILES = 35, 12, 900_000  # characters; Kubernetes adds to names; bytes of a ConfigMap

Document = dict[str, Any]


@dataclass(frozen=True)
class WorkerClass:
    """Workers that are alike: how many there are, what each may use, and on which nodes they run."""

    name: str = "worker"
    count: int = 5
    cpu: str | None = None  # limit and request, or `node`
    memory: str | None = None
    arch: str | None = None
    accelerator: str | None = None  # resource of which each worker gets one, such as nvidia.com/gpu
    node: Mapping[str, str] = field(default_factory=dict)  # labels that its nodes have

    @classmethod
    def parse(cls, text: str) -> WorkerClass:
        """Return the class that an option states: `pi=3,cpu=4,memory=2Gi,arch=arm64,KEY=VALUE`. Raises JobError."""
        head, *rest = text.split(",")
        name, _, number = head.partition("=")
        if not re.fullmatch(CLASS_NAME, name) or len(name) > MOST_CLASS or not re.fullmatch("[0-9]+", number):
            raise JobError(
                f"--class {text!r}: it begins with a name of at most {MOST_CLASS} lower-case letters and digits, and a "
                "number of workers: --class pi=3,cpu=4,memory=2Gi"
            )
        if name in TAKEN:
            raise JobError(f"--class {text!r}: the name {name} is taken; choose another one")
        if int(number) < 1:
            raise JobError(f"--class {text!r}: a class has at least one worker")
        found: dict[str, str] = {}
        labels: dict[str, str] = {}
        for entry in rest:
            key, equals, value = entry.partition("=")
            if not equals or not value:
                raise JobError(f"--class {text!r}: {entry!r} is not KEY=VALUE")
            if key in ("cpu", "memory", "arch", "accelerator"):
                found[key] = value
            elif ("/" in key or "." in key) and re.fullmatch(_LABEL, value):
                labels[key] = value
            else:
                raise JobError(
                    f"--class {text!r}: {entry!r} is neither cpu, memory, arch, accelerator nor the label of a node, "
                    "which has a prefix, such as feature.node.kubernetes.io/cpu-model.family=6"
                )
        check_amount("--class: cpu", None if found.get("cpu") == NODE else found.get("cpu"))
        check_amount("--class: memory", found.get("memory"))
        return cls(name, int(number), node=labels, **found)


def check_amount(name: str, text: str | None) -> None:
    """Raise JobError for what Kubernetes would not take as an amount."""
    if text is not None and not re.fullmatch(AMOUNT, text):
        raise JobError(f"{name}: {text!r} is not an amount; write 400m or 2 for cores, 512Mi or 1Gi for memory")


@dataclass(frozen=True)
class ManifestSettings:
    """What Kubernetes has to know beside the job file."""

    namespace: str
    name: str
    classes: tuple[WorkerClass, ...] = (WorkerClass(),)
    image: str | None = None
    disk: str | None = None
    storage_class: str | None = None
    form: str = "statefulset"  # or `job`, an Indexed Job, which ends
    queue: str | None = None  # of Kueue, which starts the job when there is room
    ttl: int | None = None  # seconds after which a finished job gives back what it occupies

    def first_ranks(self) -> dict[str, int]:
        """Return the rank with which each class begins."""
        counts = [one.count for one in self.classes]
        return {one.name: sum(counts[:at]) for at, one in enumerate(self.classes)}

    @property
    def workers(self) -> int:
        """Return with how many ranks the job begins."""
        return sum(one.count for one in self.classes)

    def to_json(self) -> str:
        """Return the settings as a text of JSON, for an annotation."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ManifestSettings:
        """Return the settings that `to_json` was given. Raises ValueError for any other text."""
        return TypeAdapter(cls).validate_json(text)


def job_name(text: str) -> str:
    """Return the name that a job has in a cluster. Raises JobError if it makes none."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not found or not found[0].isalpha() or len(found) > _MOST_NAME:
        raise JobError(
            f"{text!r} makes no name for a job in Kubernetes; give one that begins with a letter and has at most "
            f"{_MOST_NAME} characters: --name"
        )
    return found


def select(name: str | None = None, component: str | None = None) -> str:
    """Return the selector of a job's objects, or of all jobs'."""
    wanted = {NAME: "horizonml", INSTANCE: name, "app.kubernetes.io/component": component}
    return ",".join(f"{key}={value}" for key, value in wanted.items() if value is not None)


def files_of(job: Job, folder: Path) -> dict[str, str]:
    """Return the files of a job, by name: the job file, and the modules beside it that it names and that those import.

    The number of workers is no part of them, because it may change while they train. Raises JobError for modules that
    cannot travel.
    """
    values = job.model_dump(exclude_none=True)
    values["parallel"].pop("workers", None)
    found = {"job.yaml": yaml.safe_dump(values, sort_keys=False)}
    names = [entry.partition(": ")[2].partition(":")[0] for entry in code_fields(job)]
    while names:
        path = folder / f"{(name := names.pop())}.py"
        if "." in name or path.name in found or not path.is_file():
            continue  # a package that the image has to contain
        try:
            found[path.name] = path.read_text()
            tree = ast.parse(found[path.name])
        except (UnicodeDecodeError, SyntaxError) as error:
            raise JobError(f"{path} is no Python that can be read: {error}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
    if sum(len(text.encode()) for text in found.values()) > _MOST_FILES:
        raise JobError(f"the job and its modules have more than {_MOST_FILES} bytes; build an image that contains them")
    return found


def code_outside(job: Job, files: Mapping[str, str]) -> list[str]:
    """Return the code that a job names and that is not among its files."""
    named = [entry.partition(": ")[2] for entry in code_fields(job)]
    return [name for name in named if f"{name.partition(':')[0]}.py" not in files]


def differences(
    old_files: Mapping[str, str], old: ManifestSettings, files: Mapping[str, str], new: ManifestSettings
) -> list[str]:
    """Return what differs between a job that was submitted and one that is to take its place, for people."""
    before, after = _flat(asdict(old)), _flat(asdict(new))
    for values, content in ((before, old_files), (after, files)):
        values.update(_flat(yaml.safe_load(content["job.yaml"])))
        values.update({name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in content.items()
                       if name != "job.yaml"})  # fmt: skip
    return [
        f"{key}: {before.get(key, '-')} -> {after.get(key, '-')}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested values by their paths."""
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(one, dict) for one in value):
        entries = {
            one.get("name", str(at)) if isinstance(one, dict) else str(at): one for at, one in enumerate(value)
        }.items()
    else:
        return {path: value}
    return {
        key: leaf for name, one in entries for key, leaf in _flat(one, f"{path}.{name}" if path else str(name)).items()
    }


def is_another_kind(old: ManifestSettings, new: ManifestSettings) -> bool:
    """Return whether Kubernetes cannot change the objects of one into those of the other."""
    fixed = ("form", "disk", "storage_class")
    dropped = {one.name for one in old.classes} - {one.name for one in new.classes}  # and would go on running
    return new.form == "job" or bool(dropped) or any(getattr(old, one) != getattr(new, one) for one in fixed)


def lose_disks(old: ManifestSettings, new: ManifestSettings) -> bool:
    """Return whether the workers that begin would not find the checkpoints of the earlier ones on their disks."""
    fixed = ("form", "disk", "storage_class")
    return old.classes[0].name != new.classes[0].name or any(getattr(old, one) != getattr(new, one) for one in fixed)


def has_moved(old: ManifestSettings, new: ManifestSettings) -> bool:
    """Return whether workers of a class get other ranks, which those that run hold until all of them are gone."""
    before, after = old.first_ranks(), new.first_ranks()
    return any(before[name] != after[name] for name in before.keys() & after.keys())


def render(
    job: Job, settings: ManifestSettings, token: Token | None = None, files: Mapping[str, str] | None = None
) -> list[Document]:
    """Return the objects to apply, in order, with a Secret if there is a token for it.

    `files` are the job's, by default the job file alone.
    """
    content = dict(files or files_of(job, Path()))
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
    config = f"{settings.name}-job-{digest}"
    documents = [_object("Namespace", {"name": settings.namespace, "labels": {"pod-security.kubernetes.io/enforce":
                                                                             "restricted"}})]  # fmt: skip
    if token is not None:
        documents.append(secret("token", token))
    documents.append({**_object("ConfigMap", {"name": "job"}), "data": content})
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        documents += [document for document in yaml.safe_load_all((BASE / name).read_text()) if document]
    documents = [made for document in documents for made in _for_classes(document, settings)]
    labels = {key: value for entry in kustomization["labels"] for key, value in entry["pairs"].items()}
    for document in documents:
        metadata = document["metadata"]
        if document["kind"] == "Namespace":
            continue
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        metadata["namespace"] = settings.namespace
        for subject in document.get("subjects", []):
            subject["namespace"] = settings.namespace
        give_names(document, settings.name, config)
        if document["kind"] == "Deployment":
            metadata["annotations"] = {SETTINGS: settings.to_json()}
            _environment(document)["WORLD_SIZE"]["value"] = str(settings.workers)
        if settings.image and document["kind"] in ("Deployment", "StatefulSet", "Job"):
            containers(document)[0]["image"] = settings.image
    return documents


def _object(kind: str, metadata: Document) -> Document:
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata}


def secret(name: str, token: Token) -> Document:
    """Return the Secret of this name from which the pods of a job take their token."""
    return {**_object("Secret", {"name": name}), "type": "Opaque", "stringData": {"token": token.text}}


def containers(document: Document) -> list[Document]:
    """Return the containers of a Deployment, a StatefulSet or a Job."""
    found: list[Document] = document["spec"]["template"]["spec"]["containers"]
    return found


def _environment(document: Document) -> dict[str, Document]:
    return {entry["name"]: entry for entry in containers(document)[0]["env"]}


def give_names(value: Any, name: str, config: str) -> None:
    """Give an object, and what it refers to, the names of a job, and its labels and selectors that of the instance."""

    def own(text: str) -> str:
        return config if text == "job" else f"{name}-{text.removeprefix('job-')}"

    if isinstance(value, list):
        for entry in value:
            give_names(entry, name, config)
    if not isinstance(value, dict):
        return
    if value.get(NAME) == "horizonml":
        value[INSTANCE] = name
    for key, found in value.items():
        if key in ("serviceName", "secretName", "serviceAccountName", "subdomain", "claimName"):
            value[key] = own(found)
        elif key == "resourceNames":
            value[key] = [own(one) for one in found]
        elif key in ("metadata", "configMap", "roleRef") and "name" in found and "containers" not in value:
            found["name"] = own(found["name"]) if found["name"] != "data" else "data"
        elif key == "subjects":
            for one in found:
                one["name"] = own(one["name"])
        elif key == "value" and isinstance(found, str):  # of an environment variable: an address, or an object
            value[key] = re.sub(r"(^|/)job-", rf"\g<1>{name}-", found)
        give_names(value[key], name, config)


def _for_classes(document: Document, settings: ManifestSettings) -> list[Document]:
    """Return the objects that one of the base becomes: that of the workers, one for each class of them."""
    if document["kind"] == "Role":
        document["rules"][0]["resourceNames"] = [f"job-{one.name}" for one in settings.classes]
        if settings.form == "job":
            document["rules"][0].update(apiGroups=["batch"], resources=["jobs/status"])
        elif settings.ttl is not None:  # the first pod of each class scales it to none
            document["rules"][0]["resources"].append("statefulsets/scale")
    if document["kind"] == "PodDisruptionBudget" and settings.form == "job":
        return []  # Kubernetes cannot count how many pods a Job is to have, and would let none be evicted at all
    if document["kind"] != "StatefulSet":
        return [document]
    found, first = [], 0
    for one in settings.classes:
        made = copy.deepcopy(document)
        made["metadata"]["name"] = one.name
        _set_class(made, one, settings)
        if len(settings.classes) > 1:
            ranks = {"name": "HORIZONML_RANKS", "value": f"{first}-{first + one.count - 1}"}
            containers(made)[0]["env"].append(ranks)
            first += one.count
        found += as_job(made, settings) if settings.form == "job" else [made]
    claims = [one for one in found if one["kind"] == "PersistentVolumeClaim"]
    return [*claims[:1], *(one for one in found if one not in claims)]  # which all classes share


def _set_class(document: Document, one: WorkerClass, settings: ManifestSettings) -> None:
    """Fill in what the StatefulSet of a class has from that class and the settings."""
    spec, pod = document["spec"], document["spec"]["template"]["spec"]
    spec["replicas"] = one.count
    for labels in (
        document["metadata"]["labels"],
        spec["selector"]["matchLabels"],
        spec["template"]["metadata"]["labels"],
    ):
        labels[CLASS] = one.name
    (worker,) = containers(document)
    env, limits, asked = _environment(document), worker["resources"]["limits"], worker["resources"]["requests"]
    env["HORIZONML_KUBE_OBJECT"]["value"] = f"apps/v1/statefulsets/job-{settings.classes[0].name}"
    if one.cpu == NODE:  # no limit, and the number of threads is the node's; two such workers would share it
        del limits["cpu"]
        own = dict(spec["template"]["metadata"]["labels"])
        apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": own}}
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    elif one.cpu:
        limits["cpu"] = asked["cpu"] = one.cpu
    if one.memory:
        limits["memory"] = asked["memory"] = one.memory
    nodes = {**({"kubernetes.io/arch": one.arch} if one.arch else {}), **one.node}
    if nodes:
        pod["nodeSelector"] = nodes
    if one.accelerator:
        limits[one.accelerator] = "1"
        if one.accelerator.startswith("nvidia.com/"):  # and not auto: a worker whose GPU cannot be used says so
            worker["env"].append({"name": "HORIZONML_DEVICE", "value": "cuda"})
        pod["tolerations"] = [{"key": one.accelerator, "operator": "Exists", "effect": "NoSchedule"}]
    if settings.ttl is not None:
        worker["env"].append({"name": "HORIZONML_TTL", "value": str(settings.ttl)})
    for claim in spec.get("volumeClaimTemplates", []):
        if settings.storage_class:
            claim["spec"]["storageClassName"] = settings.storage_class
        if settings.disk:
            claim["spec"]["resources"]["requests"]["storage"] = settings.disk


def as_job(workers: Document, settings: ManifestSettings) -> list[Document]:
    """Return the workers of a StatefulSet as an Indexed Job, which ends, and which Kueue can queue and suspend.

    Its workers have no disks of their own. With `settings.disk` they share a claim, from which a suspended job goes on.
    """
    spec, template = workers["spec"], copy.deepcopy(workers["spec"]["template"])
    pod, (worker,) = template["spec"], template["spec"]["containers"]
    worker["args"].remove("--stay")
    for entry in worker["env"]:
        if entry["name"] == "HORIZONML_KUBE_OBJECT":
            entry["value"] = entry["value"].replace("apps/v1/statefulsets", "batch/v1/jobs")
    data: Document = {"emptyDir": {"sizeLimit": "2Gi"}}
    claims: list[Document] = []
    if settings.disk:
        (claim,) = spec["volumeClaimTemplates"]
        claims = [{**claim, "metadata": {"name": "disk", "labels": {NAME: "horizonml"}}}]
        claims[0]["spec"]["accessModes"] = ["ReadWriteMany"]
        data = {"persistentVolumeClaim": {"claimName": "disk"}}
    pod.update(restartPolicy="Never", subdomain=spec["serviceName"])
    pod["volumes"].append({"name": "data", **data})
    metadata = copy.deepcopy(workers["metadata"])
    if settings.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
        metadata["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    job = {
        "completionMode": "Indexed",
        "completions": spec["replicas"],
        "parallelism": spec["replicas"],
        "backoffLimit": 20,
        "podReplacementPolicy": "Failed",
        # Nodes that are drained, jobs that make room for others, and workers that are asked to stop are no failures.
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "Ignore",
                    "onExitCodes": {"operator": "In", "values": [128 + signal.SIGTERM]},
                    "onPodConditions": [],  # which schemas before that of Kubernetes 1.31 require
                },
            ]
        },
        **({"suspend": True} if settings.queue else {}),
        **({"ttlSecondsAfterFinished": settings.ttl} if settings.ttl is not None else {}),
        "template": template,
    }
    return [*claims, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}]


def for_workers(job: Job, workers: int) -> Job:
    """Return the job for another number of ranks. Raises JobError if its plan or its limits do not allow that."""
    if job.parallel.stages is not None and job.parallel.world_size() != workers:
        raise JobError(
            f"parallel.stages: the plan names {count(job.parallel.world_size(), 'rank')}, not {workers}; change the "
            "stages in the job file, or leave them out and let a strategy make the plan"
        )
    if job.parallel.max_workers is None and workers > (most := job.parallel.most_elastic()):
        raise JobError(f"parallel.max_workers: at most {count(most, 'rank')} may take part, unless it allows more")
    return changed(job, {"parallel.workers": workers})
