"""Reads what the pods of a job say: their metrics, and their logs.

The metrics of a worker's pod are read through the cluster's API. The API server asks a pod from its own address, which
no network policy can name. Where policies are enforced and the pod is on another node, that goes unanswered, and a
forwarded port is opened inside the pod instead, as `kubectl port-forward` does.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import urllib3
import websocket
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward

from horizonml.kube.status import Samples, parse

_PORT = 9400
_PROXY_TIMEOUT = (2.0, 3.0)  # to connect, to answer
_FORWARD_SECONDS = 5.0
_MOST_BYTES = 4 << 20
_QUIET_SECONDS = 60.0  # a log without a new line for so long is asked for again


class PodReader:
    """Reads metrics and logs of the pods of one namespace, from several threads at once."""

    def __init__(self, settings: client.Configuration, namespace: str) -> None:
        """Connect as `settings` say."""
        self._settings, self._namespace = settings, namespace
        self._core = client.CoreV1Api(client.ApiClient(settings))
        self._forward = False  # whether only that has worked so far
        self.refused = ""  # why the metrics may not be read, in the server's words
        websocket.setdefaulttimeout(_FORWARD_SECONDS)

    def scrape(self, pod: str) -> Samples:
        """Return the metrics of a pod, nothing if it does not serve any, because it starts or ends."""
        ways = [self._by_forwarding] if self._forward else [self._by_proxy, self._by_forwarding]
        for ask in ways:
            # It may not listen yet, or not to the API server.
            with suppress(urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError):
                try:
                    found = parse(ask(pod))
                except ApiException as error:
                    self.refused = message(error) if error.status == 403 else self.refused
                    continue
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

    def follow_log(
        self, rank: int, pods: Mapping[int, str], tail: int | None, follow: bool, show: Callable[[int, str], None],
        stop: threading.Event,
    ) -> bool:  # fmt: skip
        """Pass every line of a rank's log to `show`, and return whether there is a log.

        With `follow`, go on until `stop` is set, across restarts of its pod, and in another pod once `pods` names that
        one for the rank.
        """
        newest, since, options = "", time.monotonic(), {"tail_lines": tail}
        while not stop.is_set():
            try:
                response = self._core.read_namespaced_pod_log(
                    pods[rank], self._namespace, follow=follow, timestamps=True, **options,
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
                    return False
            except urllib3.exceptions.ReadTimeoutError:
                pass  # it had nothing to say: ask again
            except (urllib3.exceptions.HTTPError, OSError) as error:
                show(rank, f"(the log broke off: {type(error).__name__})")
            if not follow:
                break
            stop.wait(1.0)
            # Only what has come since; some lines twice, of which the stamps tell.
            options = {"since_seconds": int(time.monotonic() - since) + 5}
        return True


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
