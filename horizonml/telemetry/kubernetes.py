"""Publishes the progress of a run in Kubernetes: in the status of a Kubeflow TrainJob, or on the job's own object.

The rank that leads the group hands its records to a `Publisher`. A thread sends the newest values, so that a server
that is slow or away never holds up a step. Environment variables, which manifests set, say what to write to.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from horizonml.telemetry.fields import Record
from horizonml.telemetry.record import EndRecord, EvaluationRecord, RecoveryRecord, StepRecord, judged, metric_key
from horizonml.telemetry.run_info import RunInfo
from horizonml.text import count, printable

_log = logging.getLogger(__name__)
TRAINER = "KUBEFLOW_TRAINER_SERVER"  # and _URL, _CA_CERT, _TOKEN: where Kubeflow takes the status of a TrainJob
OBJECT, NAMESPACE = "HORIZONML_KUBE_OBJECT", "HORIZONML_KUBE_NAMESPACE"
PROGRESS, STATUS = "horizonml/progress", "horizonml/trainer-status"  # annotations: for people, and for programs
TTL = "HORIZONML_TTL"  # seconds after which the pods of a finished job are given back
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts a pod's token
_OBJECT = re.compile(r"([a-z0-9.-]+/v[0-9a-z]+)/([a-z]+)/([a-z0-9.-]+)")
_EVERY_SECONDS, _MOST_SECONDS = 10.0, 60.0  # between two writes; between two attempts while they fail, at most
_REQUEST_SECONDS, _CLOSE_SECONDS = 3.0, 5.0  # for which the end of a run waits until its last state is written
_MOST_BYTES, _WAITING = 4 << 20, 50  # of an answer; events
_MOST_NAME, _MOST_MESSAGE = 64, 1000  # characters that the servers take


def _stamp(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))


@dataclass(frozen=True)
class TrainerStatus:
    """Says how far a run is, and how good its model is."""

    step: int = 0
    steps: int = 0  # 0 if it is not known
    time: float = 0.0
    remaining: float | None = None  # seconds, if they can be estimated
    trained: StepRecord | None = None
    evaluated: EvaluationRecord | None = None
    ended: str = ""  # "complete", "stopped", or "failed" and why

    @property
    def percentage(self) -> int | None:
        """Return the percentage of the steps, which is 100 only once the run is complete; None if it is not known."""
        if self.ended == "complete":
            return 100
        return min(99, 100 * self.step // self.steps) if self.steps else None

    def words(self) -> str:
        """Return the progress for people, in one line."""
        known = [f"{self.percentage}%" if self.percentage is not None else "", self.ended]
        if self.remaining is not None and not self.ended:
            known.append(f"{timedelta(seconds=round(self.remaining))} left")
        if self.trained is not None:
            known.append(judged(self.trained.loss, self.trained.metrics))
        if self.evaluated is not None:
            known.append(f"held-out {judged(self.evaluated.loss, self.evaluated.metrics)}")
        return printable(", ".join(filter(None, known)))

    def to_json(self) -> dict[str, Any]:
        """Return it as the `trainerStatus` of a Kubeflow TrainJob."""
        values = {"step": float(self.step)}
        for record, prefix in ((self.trained, ""), (self.evaluated, "held_out_")):
            found = {} if record is None else {"loss": record.loss, **record.metrics}
            values |= {prefix + metric_key(name): value for name, value in found.items()}
        metrics = [{"name": name[:_MOST_NAME], "value": f"{value:.6g}"} for name, value in values.items()]
        left = None if self.remaining is None else min(round(self.remaining), 2**31 - 1)
        known = {"progressPercentage": self.percentage, "estimatedRemainingSeconds": left, "metrics": metrics}
        known = {name: value for name, value in known.items() if value is not None}
        return {**known, "lastUpdatedTime": _stamp(self.time)}


class StatusServer:
    """Is where progress is published. Its certificate is verified, and it alone gets the token."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Take the server that the environment names. Raises OSError or ValueError if it does not say enough."""
        self._name, self._namespace = "", ""  # of the object; empty for a TrainJob
        self._known: dict[str, str] = {}  # how events refer to the object, once the server has said that
        place, folder = env.get(f"{TRAINER}_URL", ""), Path("/var/run/secrets/kubeflow/trainer")
        if not place:
            found, folder = _OBJECT.fullmatch(env.get(OBJECT, "")), ACCOUNT
            if found is None:
                raise ValueError(f"{OBJECT} is {env.get(OBJECT)!r}, and not like apps/v1/statefulsets/NAME")
            version, kind, self._name = found.groups()
            self._namespace = env.get(NAMESPACE) or (ACCOUNT / "namespace").read_text().strip()
            host, port = (env.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
            # The right to write an object's status includes its annotations, but not what its pods run.
            path = f"namespaces/{self._namespace}/{kind}/{self._name}/status?fieldManager=horizonml-worker"
            place = f"https://{f'[{host}]' if ':' in host else host}:{port}/apis/{version}/{path}"
        url = urlsplit(place)
        if url.scheme != "https" or not url.hostname:
            raise ValueError(f"{place} is not the https:// address of a server")
        self._host, self._port, self._path = url.hostname, url.port or 443, url._replace(scheme="", netloc="").geturl()
        known = env if not self._name else {}
        self._ca = Path(known.get(f"{TRAINER}_CA_CERT") or folder / "ca.crt")
        self._token = Path(known.get(f"{TRAINER}_TOKEN") or folder / "token")

    def show(self, progress: TrainerStatus) -> None:
        """Write the progress. Raises OSError, HTTPException or ValueError."""
        if not self._name:
            self._ask("POST", self._path, "application/json", {"trainerStatus": progress.to_json()})
        else:
            self._annotate({PROGRESS: progress.words(), STATUS: json.dumps(progress.to_json())})

    def tell(self, happening: Mapping[str, str]) -> None:
        """Make an Event about the object; a TrainJob's status has no place for it. Raises as `show` does."""
        if not self._name:
            return
        event = {
            "metadata": {"generateName": f"{self._name}.", "namespace": self._namespace},
            "involvedObject": self._known or self._annotate({}),
            "source": {"component": "horizonml"},
            **happening,
        }
        self._ask("POST", f"/api/v1/namespaces/{self._namespace}/events", "application/json", event)

    def free(self, workers: str) -> None:
        """Scale a StatefulSet beside the object to no pods. Raises as `show` does."""
        path = f"{self._path.partition('/status')[0].rpartition('/')[0]}/{workers}/scale"
        self._ask("PATCH", path, "application/merge-patch+json", {"spec": {"replicas": 0}})

    def _annotate(self, annotations: Mapping[str, str]) -> dict[str, str]:
        body = {"metadata": {"annotations": annotations}}
        found = self._ask("PATCH", self._path, "application/merge-patch+json", body)
        about = {key: found["metadata"][key] for key in ("name", "namespace", "uid")}
        self._known = {"apiVersion": found["apiVersion"], "kind": found["kind"], **about}
        return self._known

    def _ask(self, method: str, path: str, content: str, body: object) -> Any:
        """Return the answer, within seconds; no redirection is followed."""
        headers = {"Content-Type": content, "Authorization": f"Bearer {self._token.read_text().strip()}"}  # it changes
        trusted = ssl.create_default_context(cafile=str(self._ca))
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=_REQUEST_SECONDS, context=trusted)
        with closing(connection):
            connection.connect()
            # The connection's limit is for each byte that is awaited.
            ender = threading.Timer(2 * _REQUEST_SECONDS, connection.sock.shutdown, (socket.SHUT_RDWR,))
            ender.start()
            try:
                connection.request(method, path, json.dumps(body).encode(), headers)
                response = connection.getresponse()
                text, reason = response.read(_MOST_BYTES), response.reason
            finally:
                ender.cancel()
        if 200 <= response.status < 300:
            return json.loads(text)
        with suppress(ValueError, LookupError, TypeError):
            reason = json.loads(text)["message"]
        raise OSError(f"{response.status} {printable(str(reason))}")


class Release:
    """Gives back what the pods of a finished job occupy, some time after its end, where the environment says so."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        """Begin to wait. The first pod of each class of workers acts for all of its class."""
        workers, _, ordinal = env.get("HOSTNAME", "").rpartition("-")
        seconds = float("inf")
        if ordinal == "0" and env.get(OBJECT) and (text := env.get(TTL)):
            if text.isdecimal():
                seconds = float(text)
            else:
                _log.warning("%s is %r, and not a number of seconds: the pods stay", TTL, text)
        self._env, self._workers, self._due = env, workers, time.monotonic() + seconds

    def look(self) -> None:
        """Scale the class to no pods if it is time to; try again later if that fails."""
        if time.monotonic() < self._due:
            return
        try:
            StatusServer(self._env).free(self._workers)
            print(f"the job is done, and {self._workers} is scaled to no pods ({TTL})", flush=True)
            self._due = float("inf")
        except (OSError, http.client.HTTPException, ValueError) as error:
            _log.warning("the pods of %s cannot be given back: %s", self._workers, error)
            self._due = time.monotonic() + _MOST_SECONDS


class Publisher:
    """Publishes what the lead of a group records; other ranks have nothing to publish.

    One thread calls the methods, and another one sends: each variable is set by one of them only.
    """

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        """Publish to the server that the environment names; do nothing if it names none."""
        self._thread: threading.Thread | None = None
        self._now, self._is_closing, self._progress = threading.Event(), False, TrainerStatus()
        self._due: TrainerStatus | None = None  # what is to be written
        self._events: deque[Mapping[str, str]] = deque(maxlen=_WAITING)
        self._group: RunInfo | None = None
        self._since = 0.0  # when that began, a time of `monotonic`
        self._warned: set[str] = set()
        if env.get(f"{TRAINER}_URL") or env.get(OBJECT):
            try:
                thread = threading.Thread(target=self._run, args=(StatusServer(env),), name="kubernetes", daemon=True)
                thread.start()
                self._thread = thread
            except (OSError, ValueError, RuntimeError) as error:
                self._warn(error)

    def put(self, record: Record) -> None:
        """Take a record; return at once."""
        if self._thread is None:
            return
        match record:
            case RunInfo():
                self._begin(record)
            case StepRecord():
                done = record.step - (self._group.resumed_at if self._group is not None else 0)
                left = (time.monotonic() - self._since) / max(1, done) * max(0, self._progress.steps - record.step)
                self._show(step=record.step, trained=record, remaining=left)
            case EvaluationRecord():
                self._show(evaluated=record)
            case RecoveryRecord():
                lost = f"rank {', '.join(map(str, record.lost))}" if record.lost else "a rank"
                again = f"{record.seconds:.1f} s, from {record.source}; {count(record.steps_repeated, 'step')} repeated"
                self._tell("Recovered", f"{lost} was lost, and training went on after {again}")
            case EndRecord(outcome="complete" | "already complete" | "stopped"):
                ended = "stopped" if record.outcome == "stopped" else "complete"
                self._show(ended=ended, remaining=0.0 if ended == "complete" else None)
                self._tell(ended.capitalize(), f"training is {ended}: {self._progress.words()}", at_once=True)
            case EndRecord():  # the next group may have another lead, whose values this rank must not replace
                self._due = None

    def trouble(self, problem: str, ends: bool) -> None:
        """Take note that a rank is lost, as the first of those that remain, or why the lead `ends`."""
        if ends:
            self._show(ended=f"failed: {problem}", remaining=None)
        self._tell("Failed" if ends else "RankLost", problem, "Warning", at_once=ends)

    def close(self) -> None:
        """Wait some seconds until all is written. If it is not, the thread tries on as long as the process stays."""
        self._is_closing = True
        self._now.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                self._warn(TimeoutError(f"the end of the run is not written within {_CLOSE_SECONDS:.0f} s"))

    def _begin(self, record: RunInfo) -> None:
        now, before, self._group = {one.started_as_rank for one in record.members}, self._group, record
        step, steps = record.resumed_at, record.total_steps or 0
        self._since = time.monotonic()
        self._show(step=step, steps=steps, remaining=None, ended="")
        going_on = f"training goes on from step {step} of {steps} with {count(len(now), 'rank')}"
        if before is None and step < steps:
            begun = f"training begins: {count(steps, 'step')}, {count(len(now), 'rank')}"
            self._tell("Resumed" if step else "Started", going_on if step else begun, at_once=True)
        elif before is not None and before.generation != record.generation:
            then = {one.started_as_rank for one in before.members}
            changes = [(sorted(now - then), "joined"), (sorted(then - now), "left")]
            words = [f"rank {', '.join(map(str, ranks))} {verb}" for ranks, verb in changes if ranks]
            self._tell("GroupChanged", f"{'; '.join(words) or 'the ranks have met again'}; {going_on}")

    def _show(self, **changes: Any) -> None:
        self._due = self._progress = replace(self._progress, time=time.time(), **changes)

    def _tell(self, reason: str, message: str, kind: str = "Normal", at_once: bool = False) -> None:
        when, text = _stamp(time.time()), printable(message, _MOST_MESSAGE)
        event = {"type": kind, "reason": reason, "message": text}
        self._events.append({**event, "firstTimestamp": when, "lastTimestamp": when})
        if at_once:
            self._now.set()

    def _run(self, server: StatusServer) -> None:
        pause, failures = 0.0, 0
        written: TrainerStatus | None = None
        while True:
            self._now.wait(pause)
            self._now.clear()
            ending, progress = self._is_closing, self._due  # this order, so that nothing can come in between
            try:
                if progress is not None and progress is not written:
                    server.show(progress)
                    written = progress
                while self._events:
                    server.tell(self._events.popleft())  # once: one that is refused would be refused again
                failures = 0
                if ending:
                    return
            except (OSError, http.client.HTTPException, RuntimeError, LookupError, TypeError, ValueError) as error:
                self._warn(error)
                failures += 1
            pause = min(2.0 ** (failures - 1), _MOST_SECONDS) if failures else _EVERY_SECONDS

    def _warn(self, error: Exception) -> None:
        """Log a reason once."""
        reason = str(error).strip() or type(error).__name__
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("the progress cannot be shown in Kubernetes (%s); the training goes on", reason)
