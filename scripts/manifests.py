"""Writes the manifests of a job in other forms than that of k8s/base, from the same files.

An Indexed Job (a kustomize component), a JobSet, and a runtime for Kubeflow Trainer. What each controller adds to a pod
was read in its own sources: JobSet's labels and names, Trainer's PET_ variables.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from horizonml.job.jobfile import load
from horizonml.kube.render import BASE, ManifestSettings, WorkerClass, as_job, render

ROOT = Path(__file__).resolve().parent.parent
Document = dict[str, Any]
JOBSET_NAME = {
    "name": "JOBSET",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}},
}
RENDEZVOUS = {"name": "HORIZONML_RENDEZVOUS", "value": "$(JOBSET)-rendezvous-0-0.$(JOBSET):29400"}


def files() -> dict[Path, str]:
    """Return every file with its text."""
    folder = ROOT / "k8s"
    return {
        folder / "components" / "job" / "job.yaml": text(
            "An Indexed Job with the pods of k8s/base/workers.yaml.", [job()]
        ),
        folder / "jobset" / "jobset.yaml": text(
            "A JobSet: two classes of workers, and the rendezvous service, which ends with them.", jobset()
        ),
        folder / "unequal" / "classes.yaml": text(
            "All but the job file of a job with two classes of workers: two strong ones, and three weak ones.",
            unequal(),
        ),
        folder / "kubeflow" / "runtime.yaml": text("HorizonML as a runtime of Kubeflow Trainer.", [runtime()]),
    }


def text(about: str, documents: list[Document]) -> str:
    """Return documents as a file."""
    head = f"# {about}\n# Made from k8s/base by `make generate`.\n"
    return head + yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=120)


class Plain(yaml.SafeDumper):
    """Writes lists as the other manifests have them, and never an alias."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def job() -> Document:
    """Return the workers of k8s/base as an Indexed Job."""
    documents = yaml.safe_load_all((BASE / "workers.yaml").read_text())
    workers = next(one for one in documents if one["kind"] == "StatefulSet")
    (made,) = as_job(workers, ManifestSettings("horizonml", "digits"))
    made["metadata"]["namespace"] = "horizonml"  # or kustomize would not give it the names of what it refers to
    return made


def unequal() -> list[Document]:
    """Return the objects of a job with two classes of workers, whose ConfigMap an overlay makes from a file."""
    classes = (WorkerClass("pc", 2, cpu="1"), WorkerClass("pi", 3, cpu="400m", memory="700Mi"))
    documents = render(
        load(ROOT / "k8s" / "unequal" / "job.yaml"), ManifestSettings("horizonml", "digits-unequal", classes)
    )
    (config,) = [one["metadata"]["name"] for one in documents if one["kind"] == "ConfigMap"]
    for document in documents:
        document["metadata"].pop("annotations", None)  # that submit would read
    kept = [one for one in documents if one["kind"] not in ("Namespace", "ConfigMap")]
    return list(yaml.safe_load_all(yaml.safe_dump_all(kept).replace(config, "digits-unequal-job")))


def jobset() -> list[Document]:
    """Return a JobSet for the job of k8s/hybrid, with what else it needs."""
    classes = (WorkerClass("pc", 2, cpu="1"), WorkerClass("pi", 3, cpu="500m"))
    content = (ROOT / "k8s" / "hybrid" / "job.yaml").read_text()
    documents = render(
        load(ROOT / "k8s" / "hybrid" / "job.yaml"), ManifestSettings("horizonml", "digits", classes, form="job"),
        files={"job.yaml": content},
    )  # fmt: skip
    found = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    members = [replicated("rendezvous", pod_template(found["Deployment", "digits-rendezvous"]), {"backoffLimit": 1000})]
    for one in classes:
        made = found["Job", f"digits-{one.name}"]["spec"]
        own = {key: made[key] for key in ("completions", "parallelism", "completionMode", "podFailurePolicy")}
        member = replicated(one.name, pod_template({"spec": made}), {"backoffLimit": 1000, **own})
        members.append({**member, "dependsOn": [{"name": "rendezvous", "status": "Ready"}]})
    spec = {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [one.name for one in classes]},
        "failurePolicy": {"maxRestarts": 0},  # a restart would begin all workers anew; a lost one comes back alone
        "replicatedJobs": members,
    }
    labels = found["Deployment", "digits-rendezvous"]["metadata"]["labels"]
    labels = {key: value for key, value in labels.items() if not key.endswith("component")}
    metadata = {"name": "digits", "namespace": "horizonml", "labels": labels}
    policies = [one for one in documents if one["kind"] in ("ConfigMap", "NetworkPolicy")]
    return [*policies, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}]


def runtime() -> Document:
    """Return a ClusterTrainingRuntime, whose TrainJobs say how many nodes there are and what is trained."""
    documents = render(load(ROOT / "k8s" / "dp" / "job.yaml"), ManifestSettings("horizonml", "horizonml", form="job"))
    found = {one["kind"]: one for one in documents if one["kind"] in ("Deployment", "Job")}
    service, worker = pod_template(found["Deployment"]), pod_template(found["Job"])
    for template in (service, worker):
        for volume in template["spec"]["volumes"]:
            if volume["name"] == "job":  # for TrainJobs with a job file of their own
                volume["configMap"] = {"name": "horizonml-job", "optional": True}
        (container,) = template["spec"]["containers"]
        names = ("WORLD_SIZE", "HORIZONML_ELASTIC", "HORIZONML_JOB_FOLDER")  # the controller numbers the ranks
        container["env"] = [entry for entry in container["env"] if entry["name"] not in names]
    (node,) = worker["spec"]["containers"]
    node.update(name="node", command=["horizonml"], args=["train", "digits"])
    trainer = replicated("node", worker, {"backoffLimit": 1000})
    trainer["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    trainer["dependsOn"] = [{"name": "rendezvous", "status": "Ready"}]
    spec = {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["node"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [replicated("rendezvous", service, {"backoffLimit": 1000}), trainer],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "horizonml", "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": 3, "torch": {}}, "template": {"spec": spec}},
    }


def replicated(name: str, template: Document, job: Document) -> Document:
    """Return one of the jobs of a JobSet."""
    return {"name": name, "replicas": 1, "template": {"spec": {**job, "template": template}}}


def pod_template(workload: Document) -> Document:
    """Return the template of a workload's pods as it is in a JobSet, whose controller names and connects them."""
    template = copy.deepcopy(workload["spec"]["template"])
    pod, (container,) = template["spec"], template["spec"]["containers"]
    for key in ("subdomain", "serviceAccountName"):
        pod.pop(key, None)
    pod.update(automountServiceAccountToken=False, restartPolicy=pod.get("restartPolicy", "OnFailure"))
    kept = [one for one in container["env"] if one["name"] not in ("HORIZONML_KUBE_OBJECT", "HORIZONML_RENDEZVOUS")]
    own = [JOBSET_NAME, RENDEZVOUS] if container["name"] == "worker" else []
    container["env"] = [*own, *kept]
    return template
