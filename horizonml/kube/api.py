"""Talks to Kubernetes' API about a job in a cluster, and turns what can go wrong into errors for people."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError, ResourceNotFoundError
from yaml import YAMLError

from horizonml.errors import ClusterError
from horizonml.job.jobfile import parse as parse_job
from horizonml.job.schema import Job
from horizonml.kube.pods import PodReader, checked, message
from horizonml.kube.render import CLASS, INSTANCE, SETTINGS, Document, ManifestSettings, job_name, lose_disks, select
from horizonml.kube.status import (
    Object,
    PodCondition,
    RankStatus,
    Samples,
    condition,
    missing,
    ordinal,
    rank_status,
    ranked,
    ranks_of,
    size_of,
)
from horizonml.text import nearest, printable

WORKER_KINDS = ("stateful_set", "job")
# What a job consists of, as the client's functions are called, in the order in which it is deleted.
KINDS = (
    *WORKER_KINDS, "deployment", "service", "config_map", "network_policy", "pod_disruption_budget", "role_binding",
    "role", "service_account", "secret",
)  # fmt: skip
_TIMEOUT = (5.0, 15.0)  # to connect, to answer
_GONE_SECONDS = 120.0


class KubeCluster:
    """One namespace of a cluster. All its methods raise ClusterError."""

    def __init__(self, namespace: str, context: str | None) -> None:
        """Connect as kubectl would, or with the pod's own account inside a cluster."""
        self.namespace = namespace
        settings = client.Configuration()
        try:
            config.load_kube_config(context=context, client_configuration=settings)
        except (ConfigException, YAMLError, OSError) as error:
            if context is not None or not isinstance(error, ConfigException):
                raise ClusterError(f"the kubeconfig cannot be used: {printable(str(error))}") from error
            try:
                config.load_incluster_config(client_configuration=settings)
            except ConfigException:
                raise ClusterError(
                    f"no Kubernetes cluster is configured ({error}); set KUBECONFIG, or make a cluster: make kind-up"
                ) from error
        settings.retries = urllib3.Retry(0)
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # more threads than connections are fine
        self._api = client.ApiClient(settings)
        self._core, self._apps = client.CoreV1Api(self._api), client.AppsV1Api(self._api)
        self._batch = client.BatchV1Api(self._api)
        others = (client.NetworkingV1Api, client.RbacAuthorizationV1Api, client.PolicyV1Api)
        self._clients = [self._core, self._apps, self._batch, *(one(self._api) for one in others)]
        self.reader = PodReader(settings, namespace)
        self._host = settings.host

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return asking(self._host, self.namespace, what)

    def apply(self, documents: list[Document], force: bool, rehearse: bool = False) -> list[str]:
        """Apply documents on the server's side, and return the names of what was applied.

        A namespace that is there already stays as it is, and so does a Secret, because pods run with its token. Without
        `force`, an object that somebody else has made stays, too, with an error. With `rehearse`, the server only says
        what it would refuse, if the namespace is there.
        """
        if rehearse and not self._is_there("the namespace", self._core.read_namespace, self.namespace):
            return []
        applied, options = [], {"dry_run": "All"} if rehearse else {}
        with self._asking("connect"):
            dynamic = DynamicClient(self._api)
        for document in documents:
            kind, name = document["kind"], document["metadata"]["name"]
            if kind == "Namespace" and self._is_there("the namespace", self._core.read_namespace, name):
                continue  # it may be somebody else's
            if kind == "RoleBinding" and rehearse:
                continue  # users with few rights can only bind a role that is there
            if kind == "Secret" and self._is_there(name, self._core.read_namespaced_secret, name, self.namespace):
                continue
            with self._asking(f"apply {kind} {name}"):
                try:
                    resource = dynamic.resources.get(api_version=document["apiVersion"], kind=kind)
                except ResourceNotFoundError:
                    if kind != "PodDisruptionBudget":
                        raise
                    applied.append(f"nothing for {kind.lower()}/{name}: clusters before 1.21 do not know it")
                    continue
                if rehearse and kind in ("StatefulSet", "Job", "PersistentVolumeClaim"):  # which may be made anew
                    document = {**document, "metadata": {**document["metadata"], "name": f"{name}-check"}}
                dynamic.server_side_apply(
                    resource, body=document, field_manager="horizonml", force_conflicts=force, **options
                )
            applied.append(f"{kind.lower()}/{name}")
        return applied

    def _is_there(self, what: str, read: Callable[..., Any], *names: str) -> bool:
        """Return whether what a function of the client reads is there."""
        with self._asking(f"look up {what}"):
            try:
                read(*names, _request_timeout=_TIMEOUT)
            except ApiException as error:
                if error.status == 404:
                    return False
                if error.status != 403 or what != "the namespace":  # one may be allowed inside it only
                    raise
        return True

    def _list(self, kind: str, selector: str) -> list[Object]:
        """Return the objects of a kind, as the API's JSON without its kind, in the order of their names."""
        with self._asking(f"list the {kind.replace('_', ' ')}s"):
            try:
                found = self._calls(kind)[0](self.namespace, label_selector=selector, _request_timeout=_TIMEOUT).items
            except ApiException as error:
                if error.status == 404:  # clusters before 1.21 do not know a PodDisruptionBudget in this version
                    return []
                raise
        return sorted((self._plain(one) for one in found), key=lambda one: str(one["metadata"]["name"]))

    def _calls(self, kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return what lists, and what deletes, the objects of a kind in a namespace."""
        client_of = next(one for one in self._clients if hasattr(one, f"list_namespaced_{kind}"))
        return getattr(client_of, f"list_namespaced_{kind}"), getattr(client_of, f"delete_namespaced_{kind}")

    def jobs(self) -> list[tuple[str, list[Object]]]:
        """Return the jobs of the namespace with their workers' StatefulSets or Jobs."""
        services = self._list("deployment", select(component="rendezvous"))
        names = [str(one["metadata"]["labels"][INSTANCE]) for one in services]
        workers = [one for kind in WORKER_KINDS for one in self._list(kind, select(component="worker"))]
        return [(name, [one for one in workers if one["metadata"]["labels"].get(INSTANCE) == name]) for name in names]

    def chosen(self, name: str | None) -> str:
        """Return the name of the job that is meant: the only one of the namespace, if none is named."""
        name, names = job_name(name) if name is not None else None, [found for found, _ in self.jobs()]
        if not names:
            raise ClusterError(
                f"no job in namespace {self.namespace}; submit one (horizonml cluster submit JOB.yaml), or name the "
                "right --namespace"
            )
        if name is None and len(names) > 1:
            raise ClusterError(f"namespace {self.namespace} has several jobs; name one of them: {', '.join(names)}")
        if name is not None and name not in names:
            raise ClusterError(
                f"no job {name} in namespace {self.namespace}{nearest(name, names)}; there are {', '.join(names)}"
            )
        return name or names[0]

    def workers(self, name: str) -> list[Object]:
        """Return the StatefulSets or Jobs of a job's classes of workers, in the order of their ranks."""
        found = [one for kind in WORKER_KINDS for one in self._list(kind, select(name, "worker"))]
        return sorted(found, key=lambda one: ranks_of(one["spec"]["template"])[0])

    def submitted(self, name: str) -> tuple[Mapping[str, str], ManifestSettings] | None:
        """Return the files and the settings with which a job was submitted, or None if there is no such job."""
        found = self._list("deployment", select(name, "rendezvous"))
        if not found:
            return None
        annotation = found[0]["metadata"].get("annotations", {}).get(SETTINGS)
        if annotation is None:
            raise ClusterError(
                f"job {name} in namespace {self.namespace} was not submitted by `horizonml cluster submit`; change it "
                "where its manifests are, and apply them, or upgrade its release"
            )
        try:
            return self._files(found[0]), ManifestSettings.from_json(annotation)
        except ValueError as error:
            raise ClusterError(f"the annotation {SETTINGS} of {name}-rendezvous cannot be read: {error}") from None

    def _files(self, service: Object) -> dict[str, str]:
        """Return the files of the job whose rendezvous service this is."""
        volumes = service["spec"]["template"]["spec"]["volumes"]
        config = next(one["configMap"]["name"] for one in volumes if one["name"] == "job")
        with self._asking(f"read ConfigMap {config}"):
            found = self._core.read_namespaced_config_map(config, self.namespace, _request_timeout=_TIMEOUT)
        return dict(found.data)

    def job(self, name: str) -> Job:
        """Return what a job trains."""
        (service,) = self._list("deployment", select(name, "rendezvous"))
        return parse_job(self._files(service)["job.yaml"], f"the job {name} of the cluster")

    def forget_files(self, name: str, documents: list[Document]) -> None:
        """Delete the ConfigMaps with earlier files of a job, of which `documents` are the newest."""
        kept = {str(one["metadata"]["name"]) for one in documents}
        for found in self._list("config_map", select(name)):
            if (own := str(found["metadata"]["name"])).startswith(f"{name}-job-") and own not in kept:
                with self._asking(f"delete {own}"):
                    self._core.delete_namespaced_config_map(own, self.namespace, _request_timeout=_TIMEOUT)

    def live(self, name: str, settings: ManifestSettings) -> ManifestSettings:
        """Return a job's settings with as many workers as there are now: some may have been added, or given back."""
        sizes = {str(one["metadata"]["labels"][CLASS]): size_of(one) for one in self.workers(name)}
        return replace(settings, classes=tuple(replace(one, count=sizes.get(one.name, 0)) for one in settings.classes))

    def keep_disks(self, name: str, before: ManifestSettings, settings: ManifestSettings) -> None:
        """Raise ClusterError if a job's workers cannot be made anew with other settings, because of their disks.

        Disks that have been given to workers hold their checkpoints: those stay, and with them the old settings, unless
        they are deleted first.
        """
        bound = self._claims(name, bound=True)
        if bound and lose_disks(before, settings):
            raise ClusterError(
                f"the disks {', '.join(bound)} hold the checkpoints of {name}, and workers of another form or first "
                "class, or with other disks, would not find them; delete them first "
                f"(horizonml cluster delete {name} --data), or choose another --name"
            )

    def _claims(self, name: str, bound: bool) -> list[str]:
        """Return the names of a job's claims that have been given a disk, or of those that have not."""
        found = self._list("persistent_volume_claim", select(name))
        return [str(one["metadata"]["name"]) for one in found if (one["status"].get("phase") == "Bound") == bound]

    def remake(self, name: str) -> None:
        """Delete a job's workers, which save a checkpoint first, so that they can be made anew with other disks."""
        selector = select(name, "worker")
        pods = {pod["metadata"]["uid"] for pod in self._list("pod", selector)}
        self.delete(name, False, (*WORKER_KINDS, "pod_disruption_budget"))  # which an Indexed Job does without
        self._wait_until_gone("pod", selector, pods)
        for claim in self._claims(name, bound=False):
            with self._asking(f"delete {claim}"):
                self._core.delete_namespaced_persistent_volume_claim(claim, self.namespace, _request_timeout=_TIMEOUT)

    def pods(self, name: str) -> list[Object]:
        """Return the pods of a job's workers, without those that are replaced already."""
        found = self._list("pod", select(name, "worker"))
        found.sort(key=lambda one: str(one["metadata"].get("creationTimestamp")))
        newest = {(one["metadata"]["labels"].get(CLASS), ordinal(one)): one for one in found}
        return sorted(newest.values(), key=lambda one: (ranks_of(one)[0], ordinal(one)))

    def by_rank(self, name: str) -> dict[int, str]:
        """Return the names of the pods of a job's workers by their ranks."""
        pods = self.pods(name)
        looks = [self._metrics(pod) if ranked([pod], [{}])[0] > ranks_of(pod)[1] else {} for pod in pods]
        return dict(zip(ranked(pods, looks), (str(pod["metadata"]["name"]) for pod in pods), strict=True))

    def restart(self, name: str) -> None:
        """Delete the workers' pods, which save a checkpoint first, and wait until those are gone."""
        before = {pod["metadata"]["uid"] for pod in self.pods(name)}
        with self._asking("delete the pods"):
            checked(
                self._core.delete_collection_namespaced_pod(
                    self.namespace, label_selector=select(name, "worker"), _preload_content=False,
                    _request_timeout=_TIMEOUT,
                )
            )  # fmt: skip
        self._wait_until_gone("pod", select(name, "worker"), before)

    def _wait_until_gone(self, kind: str, selector: str, uids: set[str]) -> None:
        deadline = time.monotonic() + _GONE_SECONDS
        while left := [o["metadata"]["name"] for o in self._list(kind, selector) if o["metadata"]["uid"] in uids]:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{', '.join(left)} did not end within {_GONE_SECONDS:.0f} s; see kubectl describe {kind}"
                )
            time.sleep(0.5)

    def scale(self, name: str, worker_class: str, count: int) -> None:
        """Change the number of workers of a class, while they train."""
        found = next(one for one in self.workers(name) if one["metadata"]["labels"][CLASS] == worker_class)
        with self._asking(f"scale {found['metadata']['name']}"):
            if "replicas" in found["spec"]:
                self._apps.patch_namespaced_stateful_set_scale(
                    found["metadata"]["name"], self.namespace, {"spec": {"replicas": count}}, _request_timeout=_TIMEOUT
                )
            else:
                body = {"spec": {"parallelism": count, "completions": count}}
                self._batch.patch_namespaced_job(
                    found["metadata"]["name"], self.namespace, body, _request_timeout=_TIMEOUT
                )

    def delete(self, name: str, data: bool, kinds: Sequence[str] = KINDS) -> tuple[list[str], list[str]]:
        """Delete a job's objects, and with `data` its volumes; return what was deleted, and the claims that stay."""
        deleted, kept = [], []
        for kind in (*kinds, "persistent_volume_claim"):
            for found in self._list(kind, select(name)):
                own = str(found["metadata"]["name"])
                if kind == "persistent_volume_claim" and not data:
                    kept.append(own)
                    continue
                with self._asking(f"delete {own}"):
                    # What comes back is the object or a Status, as the server's age has it: not looked at.
                    options = {"propagation_policy": "Background", "_preload_content": False}
                    checked(self._calls(kind)[1](own, self.namespace, **options, _request_timeout=_TIMEOUT))
                deleted.append(f"{kind.replace('_', '')}/{own}")
        return deleted, kept

    def observe(self, name: str, pause: float) -> tuple[list[RankStatus], dict[int, PodCondition]]:
        """Watch every rank of a job for `pause` seconds; return how it is doing, and the condition of its pod."""
        workers, pods = self.workers(name), self.pods(name)
        with ThreadPoolExecutor(max_workers=16) as threads:
            started = time.monotonic()
            before = list(threads.map(self._metrics, pods))
            time.sleep(pause)
            seconds = time.monotonic() - started
            after = list(threads.map(self._metrics, pods))
        (nodes, everything), events = self._nodes(), self._events()
        rows, conditions = [], {}
        ranks = ranked(pods, [last or first for first, last in zip(before, after, strict=True)])
        for rank, pod, first_look, last_look in zip(ranks, pods, before, after, strict=True):
            node = pod["spec"].get("nodeName")
            conditions[rank] = condition(pod, nodes, everything or pods, events)
            rows.append(rank_status(rank, node, conditions[rank], first_look, last_look, seconds))
        present = {(pod["metadata"]["labels"].get(CLASS), ordinal(pod)) for pod in pods}
        spans = [ranks_of(one["spec"]["template"]) for one in workers]
        further = count(1 + max([*conditions, *(last for _, last in spans)], default=0))
        for one, (first, last) in zip(workers, spans, strict=True):
            for at in range(size_of(one)):
                if (one["metadata"]["labels"].get(CLASS), at) not in present:
                    rank = first + at if first + at <= last else next(further)
                    conditions[rank] = missing(f"{one['metadata']['name']}-{at}", events)
                    rows.append(rank_status(rank, None, conditions[rank], {}, {}, seconds))
        return sorted(rows, key=lambda row: row.rank), conditions

    def _metrics(self, pod: Object) -> Samples:
        """Return the metrics of a worker, or nothing if it does not serve them."""
        if not any("running" in (c.get("state") or {}) for c in pod["status"].get("containerStatuses") or []):
            return {}
        return self.reader.scrape(str(pod["metadata"]["name"]))

    def _events(self) -> list[Object]:
        """Return the namespace's Events, or nothing if those may not be seen."""
        try:
            found = self._core.list_namespaced_event(self.namespace, _request_timeout=_TIMEOUT).items
        except (ApiException, urllib3.exceptions.HTTPError):
            return []
        return [self._plain(event) for event in found]

    def _nodes(self) -> tuple[list[Object], list[Object]]:
        """Return all nodes and pods, or nothing if that may not be seen."""
        try:
            nodes = self._core.list_node(_request_timeout=_TIMEOUT).items
            pods = self._core.list_pod_for_all_namespaces(_request_timeout=_TIMEOUT).items
        except (ApiException, urllib3.exceptions.HTTPError):
            return [], []
        return [self._plain(node) for node in nodes], [self._plain(pod) for pod in pods]

    def _plain(self, found: Any) -> Object:
        """Return an object of the client as the API's JSON."""
        plain: Object = self._api.sanitize_for_serialization(found)
        return plain


@contextmanager
def asking(host: str, namespace: str, what: str) -> Iterator[None]:
    """Raise ClusterError for whatever keeps the cluster at `host` from doing `what`."""
    try:
        yield
    except (ApiException, DynamicApiError) as error:
        reason = message(error)
        if error.status == 401:
            text = f"{host} does not know who you are ({reason}); log in again, or choose another --context"
        elif error.status == 403 and "exceeded quota" not in reason:
            text = (
                f"you may not {what} in namespace {namespace}: {reason}; try: kubectl auth can-i --list -n {namespace}"
            )
        else:
            text = f"cannot {what} in namespace {namespace}: {reason}"
        raise ClusterError(text) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        why = type(getattr(error, "reason", None) or error).__name__  # of a last attempt, of which there is one
        raise ClusterError(
            f"the cluster at {host} does not answer ({why}); is it running, and is this the right context (kubectl "
            "config current-context)?"
        ) from error
