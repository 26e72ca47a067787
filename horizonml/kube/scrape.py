"""Reads the metrics of a worker's pod: through the cluster's API, and where network policies keep that out, past them.

The API server asks a pod from its own address, which no policy can name. Where policies are enforced and the pod is on
another node, that goes unanswered. A forwarded port is opened inside the pod instead, as `kubectl port-forward` does.
"""

from __future__ import annotations

import http.client
from contextlib import suppress
from typing import Any

import urllib3
import websocket
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward

from horizonml.kube.access import checked
from horizonml.kube.status import Samples, parse

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
