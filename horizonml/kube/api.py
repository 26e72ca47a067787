"""Talks to Kubernetes' API about a job in a cluster, and turns what can go wrong into errors for people.

The metrics of a worker's pod are read through the cluster's API. The API server asks a pod from its own address, which
no network policy can name. Where policies are enforced and the pod is on another node, that goes unanswered, and a
forwarded port is opened inside the pod instead, as `kubectl port-forward` does.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import urllib3
import websocket
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError
from kubernetes.stream import portforward

from horizonml.errors import ClusterError
from horizonml.job.jobfile import parse as parse_job
from horizonml.job.schema import Job
from horizonml.kube.render import PART_OF, SETTINGS, WORKERS, Document, ManifestSettings
from horizonml.kube.status import Object, PodCondition, PodState, RankStatus, Samples, condition, parse, rank_status

_PORT = 9400
_PROXY_TIMEOUT = (2.0, 3.0)  # to connect, to answer
_FORWARD_SECONDS = 5.0
_MOST_BYTES = 4 << 20


class Scraper:
    """Reads metrics of the pods of one namespace, from several threads at once."""

    def __init__(self, settings: client.Configuration, namespace: str) -> None:
        """Connect as `settings` say."""
        self._settings, self._namespace = settings, namespace
        self._core = client.CoreV1Api(client.ApiClient(settings))
        self._forward = False  # whether only that has worked so far
        websocket.setdefaulttimeout(_FORWARD_SECONDS)

    def scrape(self, pod: str) -> Samples:
        """Return the metrics of a pod, nothing if it does not serve any, because it starts or ends."""
        ways = [self._by_forwarding] if self._forward else [self._by_proxy, self._by_forwarding]
        for ask in ways:
            # It may not listen yet, or not to the API server.
            with suppress(ApiException, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError):
                found = parse(ask(pod))
                self._forward = ask == self._by_forwarding
                return found
        return {}

    def _by_proxy(self, pod: str) -> str:
        response = self._core.connect_get_namespaced_pod_proxy_with_path(
            f"{pod}:{_PORT}", self._namespace, "metrics", _preload_content=False, _request_timeout=_PROXY_TIMEOUT
        )
        return str(checked(response).data.decode())

    def _by_forwarding(self, pod: str) -> str:
        # The function changes its client while it connects, so each call has one of its own.
        core = client.CoreV1Api(client.ApiClient(self._settings))
        connection: Any = portforward(
            core.connect_get_namespaced_pod_portforward, pod, self._namespace, ports=str(_PORT)
        )
        try:
            stream = connection.socket(_PORT)
            stream.settimeout(_FORWARD_SECONDS)
            stream.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            response = http.client.HTTPResponse(stream)
            response.begin()
            return response.read(_MOST_BYTES).decode()
        finally:
            connection.close()


_TIMEOUT = (5.0, 15.0)  # to connect, to answer
_GONE_SECONDS = 120.0
_QUIET_SECONDS = 60.0  # a log without a new line for so long is asked for again


class KubeCluster:
    """One namespace of a cluster. All its methods raise ClusterError."""

    def __init__(self, namespace: str, context: str | None) -> None:
        """Connect as kubectl would, or with the pod's own account inside a cluster."""
        self.namespace = namespace
        settings = client.Configuration()
        try:
            config.load_kube_config(context=context, client_configuration=settings)
        except ConfigException as error:
            try:
                config.load_incluster_config(client_configuration=settings)
            except ConfigException:
                raise ClusterError(
                    f"no Kubernetes cluster is configured ({error}); set KUBECONFIG, or make a cluster: make kind-up"
                ) from error
        settings.retries = urllib3.Retry(0)
        self._api = client.ApiClient(settings)
        self._core, self._apps = client.CoreV1Api(self._api), client.AppsV1Api(self._api)
        self._net = client.NetworkingV1Api(self._api)
        self._scraper = Scraper(settings, namespace)
        self._host = settings.host

    def _asking(self, what: str) -> AbstractContextManager[None]:
        return asking(self._host, self.namespace, what)

    def apply(self, documents: list[Document]) -> list[str]:
        """Apply documents on the server's side, and return the names of what was applied.

        A namespace that is there already stays as it is, and so does a Secret, because pods run with its token.
        """
        applied = []
        with self._asking("connect"):
            dynamic = DynamicClient(self._api)
        for document in documents:
            kind, name = document["kind"], document["metadata"]["name"]
            if kind == "Namespace" and self._exists():
                continue  # it may be somebody else's
            if kind == "Secret" and self._has_secret(name):
                continue
            with self._asking(f"apply {kind} {name}"):
                resource = dynamic.resources.get(api_version=document["apiVersion"], kind=kind)
                dynamic.server_side_apply(resource, body=document, field_manager="horizonml", force_conflicts=True)
            applied.append(f"{kind.lower()}/{name}")
        return applied

    def _exists(self) -> bool:
        """Return whether the namespace is there already."""
        with self._asking("look up the namespace"):
            try:
                self._core.read_namespace(self.namespace, _request_timeout=_TIMEOUT)
            except ApiException as error:
                if error.status == 404:
                    return False
                if error.status == 403:  # allowed inside it only
                    return True
                raise
        return True

    def _has_secret(self, name: str) -> bool:
        """Return whether the namespace has a Secret of this name."""
        with self._asking(f"read Secret {name}"):
            try:
                self._core.read_namespaced_secret(name, self.namespace, _request_timeout=_TIMEOUT)
            except ApiException as error:
                if error.status == 404:
                    return False
                raise
        return True

    def workers(self) -> Object | None:
        """Return the StatefulSet of the job, if there is one."""
        with self._asking("read the StatefulSet worker"):
            try:
                found = self._apps.read_namespaced_stateful_set("worker", self.namespace, _request_timeout=_TIMEOUT)
            except ApiException as error:
                if error.status == 404:
                    return None
                raise
            return self._plain(found)

    def require_workers(self) -> Object:
        """Return the StatefulSet of the job."""
        found = self.workers()
        if found is None:
            raise ClusterError(
                f"no job in namespace {self.namespace}; submit one (horizonml cluster submit JOB.yaml), or name the "
                "right --namespace"
            )
        return found

    def submitted(self) -> tuple[Job, ManifestSettings]:
        """Return the job and the settings that were submitted."""
        annotation = self.require_workers()["metadata"].get("annotations", {}).get(SETTINGS)
        if annotation is None:
            raise ClusterError(
                f"the job in namespace {self.namespace} was not submitted by `horizonml cluster submit`; change the "
                "number of replicas where its manifests are, apply them, and delete the pods"
            )
        with self._asking("read the job"):
            found = self._plain(self._core.read_namespaced_config_map("job", self.namespace, _request_timeout=_TIMEOUT))
        try:
            settings = ManifestSettings.from_json(annotation)
        except ValueError as error:
            raise ClusterError(f"the annotation {SETTINGS} of the StatefulSet worker cannot be read: {error}") from None
        return parse_job(found["data"]["job.yaml"], "the cluster's job"), settings

    def pods(self) -> list[Object]:
        """Return the workers' pods, in the order of ranks."""
        with self._asking("list the pods"):
            found = self._core.list_namespaced_pod(self.namespace, label_selector=WORKERS, _request_timeout=_TIMEOUT)
            return sorted((self._plain(pod) for pod in found.items), key=rank_of)

    def restart(self) -> None:
        """Delete the workers' pods, which save a checkpoint first, and wait until those are gone."""
        before = {pod["metadata"]["uid"] for pod in self.pods()}
        with self._asking("delete the pods"):
            checked(
                self._core.delete_collection_namespaced_pod(
                    self.namespace, label_selector=WORKERS, _preload_content=False, _request_timeout=_TIMEOUT
                )
            )
        deadline = time.monotonic() + _GONE_SECONDS
        while left := [p["metadata"]["name"] for p in self.pods() if p["metadata"]["uid"] in before]:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{', '.join(left)} did not end within {_GONE_SECONDS:.0f} s; see kubectl describe pod"
                )
            time.sleep(0.5)

    def delete(self, data: bool) -> tuple[list[str], list[str]]:
        """Delete the job's objects, and with `data` its volumes; return what was deleted, and the claims that stay."""
        groups: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
            ("statefulset", self._apps.list_namespaced_stateful_set, self._apps.delete_namespaced_stateful_set),
            ("deployment", self._apps.list_namespaced_deployment, self._apps.delete_namespaced_deployment),
            ("service", self._core.list_namespaced_service, self._core.delete_namespaced_service),
            ("configmap", self._core.list_namespaced_config_map, self._core.delete_namespaced_config_map),
            ("networkpolicy", self._net.list_namespaced_network_policy, self._net.delete_namespaced_network_policy),
            ("secret", self._core.list_namespaced_secret, self._core.delete_namespaced_secret),
        ]
        claims = [
            ("persistentvolumeclaim", self._core.list_namespaced_persistent_volume_claim,
             self._core.delete_namespaced_persistent_volume_claim)
        ]  # fmt: skip
        deleted, kept = [], []
        for kind, find, remove in [*groups, *claims]:
            with self._asking(f"delete {kind}s"):
                selector = WORKERS if kind == "persistentvolumeclaim" else PART_OF
                for found in find(self.namespace, label_selector=selector, _request_timeout=_TIMEOUT).items:
                    name = found.metadata.name
                    if kind == "persistentvolumeclaim" and not data:
                        kept.append(name)
                        continue
                    # What comes back is the object or a Status, as the server's age has it: not looked at.
                    options = {"propagation_policy": "Background", "_preload_content": False}
                    checked(remove(name, self.namespace, **options, _request_timeout=_TIMEOUT))
                    deleted.append(f"{kind}/{name}")
        return deleted, kept

    def observe(self, pause: float) -> tuple[list[RankStatus], dict[int, PodCondition]]:
        """Watch every rank for `pause` seconds, and return how it is doing, and the condition of its pod."""
        wanted = int(self.require_workers()["spec"]["replicas"])
        pods = {rank_of(pod): pod for pod in self.pods()}
        with ThreadPoolExecutor(max_workers=16) as threads:
            started = time.monotonic()
            before = dict(zip(pods, threads.map(self._metrics, pods.values()), strict=True))
            time.sleep(pause)
            seconds = time.monotonic() - started
            after = dict(zip(pods, threads.map(self._metrics, pods.values()), strict=True))
        nodes, everything = self._nodes()
        conditions = {rank: condition(pod, nodes, everything or list(pods.values())) for rank, pod in pods.items()}
        for rank in range(wanted):
            conditions.setdefault(rank, PodCondition(PodState.MISSING))
        rows = []
        for rank in sorted(conditions):
            node = pods.get(rank, {}).get("spec", {}).get("nodeName")
            shown = before.get(rank, {}), after.get(rank, {})
            rows.append(rank_status(rank, node, conditions[rank], *shown, seconds))
        return rows, conditions

    def _metrics(self, pod: Object) -> Samples:
        """Return the metrics of a worker, or nothing if it does not serve them."""
        if not any("running" in (c.get("state") or {}) for c in pod["status"].get("containerStatuses") or []):
            return {}
        return self._scraper.scrape(str(pod["metadata"]["name"]))

    def _nodes(self) -> tuple[list[Object], list[Object]]:
        """Return all nodes and pods, or nothing if that may not be seen."""
        try:
            nodes = self._core.list_node(_request_timeout=_TIMEOUT).items
            pods = self._core.list_pod_for_all_namespaces(_request_timeout=_TIMEOUT).items
        except (ApiException, urllib3.exceptions.HTTPError):
            return [], []
        return [self._plain(node) for node in nodes], [self._plain(pod) for pod in pods]

    def follow_log(
        self, rank: int, tail: int | None, follow: bool, show: Callable[[int, str], None], stop: threading.Event
    ) -> None:
        """Pass every line of a rank's log to `show`; with `follow`, across restarts of its pod, until `stop` is set."""
        newest, since, options = "", time.monotonic(), {"tail_lines": tail}
        while not stop.is_set():
            try:
                response = self._core.read_namespaced_pod_log(
                    f"worker-{rank}", self.namespace, follow=follow, timestamps=True, **options,
                    _preload_content=False, _request_timeout=(5.0, _QUIET_SECONDS),
                )  # fmt: skip
                for raw in checked(response):
                    stamp, _, line = raw.decode(errors="replace").rstrip("\n").partition(" ")
                    # What the node itself says, when a pod is just being replaced, has no stamp.
                    if stamp > newest and stamp[:4].isdigit():
                        newest, since = stamp, time.monotonic()
                        show(rank, line)
            except ApiException as error:
                if not follow or error.status in (401, 403):
                    show(rank, f"(no log: {message(error)})")
                    return
            except urllib3.exceptions.ReadTimeoutError:
                pass  # it had nothing to say: ask again
            except (urllib3.exceptions.HTTPError, OSError) as error:
                show(rank, f"(the log broke off: {type(error).__name__})")
            if not follow:
                return
            stop.wait(1.0)
            # Only what has come since; some lines twice, of which the stamps tell.
            options = {"since_seconds": int(time.monotonic() - since) + 5}

    def _plain(self, found: Any) -> Object:
        """Return an object of the client as the API's JSON."""
        plain: Object = self._api.sanitize_for_serialization(found)
        return plain


def rank_of(pod: Object) -> int:
    """Return the ordinal of a worker's pod."""
    return int(str(pod["metadata"]["name"]).rpartition("-")[2])


@contextmanager
def asking(host: str, namespace: str, what: str) -> Iterator[None]:
    """Raise ClusterError for whatever keeps the cluster at `host` from doing `what`."""
    try:
        yield
    except (ApiException, DynamicApiError) as error:
        reason = message(error)
        if error.status == 401:
            text = f"{host} does not know who you are ({reason}); log in again, or choose another --context"
        elif error.status == 403:
            text = (
                f"you may not {what} in namespace {namespace}: {reason}; try: kubectl auth can-i --list -n {namespace}"
            )
        else:
            text = f"cannot {what} in namespace {namespace}: {reason}"
        raise ClusterError(text) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ClusterError(
            f"the cluster at {host} does not answer ({type(error).__name__}); is it running, and is this the right "
            "context (kubectl config current-context)?"
        ) from error


def checked(response: Any) -> Any:
    """Return a raw response if it is a good one, because the client does not check those. Raises ApiException."""
    if response.status >= 400:
        error = ApiException(status=response.status, reason=response.reason)
        error.body = response.data.decode(errors="replace")
        raise error
    return response


def message(error: Exception) -> str:
    """Return what the API says is wrong, without the rest."""
    try:
        return str(json.loads(getattr(error, "body", "") or "")["message"])
    except (ValueError, KeyError, TypeError):
        return str(getattr(error, "reason", None) or error)
