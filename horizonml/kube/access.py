"""Turns what can go wrong between a cluster and its user into errors for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import urllib3
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic.exceptions import DynamicApiError

from horizonml.errors import ClusterError


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
