"""Writes what is made of the Helm chart in k8s/chart: the templates of a job, the schema of its values, its README.

The templates are what `render` returns for settings that stand for themselves, such as the amount CPU-OF-CLASS, which
then give way to expressions. An option is rendered with and without it, and the lines that differ get a condition: YAML
in block style has its structure in the indentation of lines, so those of one can stand among those of the other.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml
from chart_values import readme, schema
from manifests import Document, Plain

from horizonml.job.schema import Job
from horizonml.kube.render import INSTANCE, NAME, ManifestSettings, WorkerClass, give_names, render
from horizonml.security.token import Token

ROOT = Path(__file__).resolve().parent.parent
CHART, COMPONENTS = ROOT / "k8s" / "chart", ROOT / "k8s" / "components"
COUNT, TTL = 7001, 7003
SETTINGS = ManifestSettings(
    "NAMESPACE", "RELEASE", (WorkerClass("FIRST", COUNT), WorkerClass("CLASS", COUNT)), image="IMAGE"
)
JOBS = replace(SETTINGS, form="job")
RELEASE = '{{ include "horizonml.name" $ }}'
IS_JOB = 'eq "job" (include "horizonml.form" $)'

# What stands in the documents, and what takes its place, in this order.
EXPRESSIONS = {
    r'if not \((kindIs "invalid" \$.Values.ttl)\) }}\n( *- statefulsets/scale)': rf"if not (or ({IS_JOB}) "
    r"(\1)) }}\n\2",
    r"( *)NODE-LABEL: NODE-VALUE": r"\1{{- range $key, $value := $one.node }}\n\1{{ $key }}: {{ $value | quote }}\n"
    r"\1{{- end }}",
    r"( *)kubernetes.io/arch: ARCH": r"\1{{- with $one.arch }}\n\1kubernetes.io/arch: {{ . }}\n\1{{- end }}",
    r"( *)- name: HORIZONML_DEVICE\n *value: cuda": r'\1{{- if hasPrefix "nvidia.com/" $one.accelerator }}\n\g<0>\n'
    r"\1{{- end }}",
    r"( *)- name: HORIZONML_RANKS\n.*": r"\1{{- if gt (len $.Values.classes) 1 }}\n\1- name: HORIZONML_RANKS\n"
    r'\1  value: "{{ $rank }}-{{ sub (add $rank $one.count) 1 }}"\n\1{{- end }}',
    r"( *)job.yaml: FILES": r'\1{{- include "horizonml.files" $ | nindent 2 }}',
    r"( *)imagePullSecrets: SECRETS": r"\1imagePullSecrets: {{ toJson $.Values.imagePullSecrets }}",
    r"( *)image: IMAGE": r'\1image: {{ include "horizonml.image" $ | quote }}\n'
    r"\1imagePullPolicy: {{ $.Values.image.pullPolicy }}",
    r"( *)helm.sh/chart: CHART": r'\1{{- include "horizonml.labels" $ | nindent 4 }}',
    r"RELEASE-job-\w{10}": '{{ include "horizonml.config" $ }}',
    r"(secretName: |name: )RELEASE-token": r'\1{{ include "horizonml.secret" $ }}',
    r"token: TOKEN": 'token: {{ include "horizonml.token" $ | quote }}',
    r"( *)- RELEASE-FIRST\n *- RELEASE-CLASS": r"\1{{- range $one := $.Values.classes }}\n\1- RELEASE-CLASS\n"
    r"\1{{- end }}",
    r"RELEASE-FIRST": f"{RELEASE}-{{{{ (index $.Values.classes 0).name }}}}",
    r"RELEASE": RELEASE,
    r"NAMESPACE": "{{ $.Release.Namespace }}",
    r"\bCLASS\b": "{{ $one.name }}",
    r"CPU-AMOUNT": "{{ $one.cpu | quote }}",
    r"MEMORY-AMOUNT": "{{ $one.memory | quote }}",
    r"nvidia.com/ACCELERATOR": "{{ $one.accelerator }}",
    r"DISK-SIZE": "{{ $.Values.disk | quote }}",
    r"STORAGE-KIND": "{{ $.Values.storageClass | quote }}",
    r"QUEUE": "{{ $.Values.queue | quote }}",
    r"PRIORITY": "{{ $.Values.priorityClassName | quote }}",
    r"MONITOR": "{{ $.Values.monitoring.release | quote }}",
    rf"'{2 * COUNT}'": '{{ include "horizonml.workers" $ | quote }}',
    rf"'{TTL}'": "{{ int $.Values.ttl | quote }}",
    rf"\b{TTL}\b": "{{ int $.Values.ttl }}",
    rf"\b{COUNT}\b": "{{ int $one.count }}",
}


def options(base: ManifestSettings) -> dict[str, ManifestSettings | Document]:
    """Return by their conditions the settings that differ from `base`, or what is added to a pod."""

    def of_class(**values: Any) -> ManifestSettings:
        return replace(base, classes=(base.classes[0], replace(base.classes[1], **values)))

    return {
        IS_JOB: replace(base, form="job"),
        "$.Values.queue": replace(base, queue="QUEUE"),
        'and $one.cpu (ne "node" (toString $one.cpu))': of_class(cpu="CPU-AMOUNT"),
        'eq "node" (toString $one.cpu)': of_class(cpu="node"),
        "$one.memory": of_class(memory="MEMORY-AMOUNT"),
        "or $one.arch $one.node": of_class(arch="ARCH", node={"NODE-LABEL": "NODE-VALUE"}),
        "$one.accelerator": of_class(accelerator="nvidia.com/ACCELERATOR"),
        'not (kindIs "invalid" $.Values.ttl)': replace(base, ttl=TTL),
        "$.Values.disk": replace(base, disk="DISK-SIZE"),
        "$.Values.storageClass": replace(base, storage_class="STORAGE-KIND"),
        "$.Values.priorityClassName": {"priorityClassName": "PRIORITY"},
        "$.Values.imagePullSecrets": {"imagePullSecrets": "SECRETS"},
    }


def files() -> dict[Path, str]:
    """Return every generated file with its text."""
    shared = template("PersistentVolumeClaim", "disk", replace(JOBS, disk="DISK-SIZE"))
    workers = "---\n".join([
        template("Service", "worker"),
        when(f"not ({IS_JOB})", each_class(template("StatefulSet", "CLASS"))),
        when(f"and ({IS_JOB}) $.Values.disk", shared),
        when(IS_JOB, '{{- include "horizonml.check-jobs" $ }}\n' + each_class(template("Job", "CLASS", JOBS))),
    ])  # fmt: skip
    policies = [template("NetworkPolicy", name) for name in ("rendezvous", "worker")]
    downloads = component("downloads/policy.yaml", "worker-downloads")
    status = [template(kind, "worker") for kind in ("ServiceAccount", "Role", "RoleBinding")]
    has_budgets = '$.Capabilities.APIVersions.Has "policy/v1"'
    budget = template("PodDisruptionBudget", "worker")
    monitor = component("monitoring/podmonitor.yaml", "worker", release="MONITOR")
    made = {
        "job": template("ConfigMap", "job-"),
        "token": when("not $.Values.token.existingSecret", template("Secret", "token")),
        "rendezvous": template("Service", "rendezvous") + "---\n" + template("Deployment", "rendezvous"),
        "workers": workers,
        "network-policies": when(
            "$.Values.networkPolicies.enabled", "---\n".join([*policies, when("$.Values.downloads", downloads)])
        ),
        "status": "---\n".join(status),
        "disruption-budget": when(f"and $.Values.podDisruptionBudget.enabled ({has_budgets}) (not ({IS_JOB}))", budget),
        "pod-monitor": when("$.Values.monitoring.enabled", monitor),
        "test": template("StatefulSet", "CLASS", shape=as_test),
    }
    head = "{{- /* Made from k8s/base by `make generate`. */}}\n"
    found = {CHART / "templates" / f"{name}.yaml": head + body for name, body in made.items()}
    values = (CHART / "values.yaml").read_text()
    found[CHART / "values.schema.json"] = json.dumps(schema(values), indent=1) + "\n"
    found[CHART / "README.md"] = readme((CHART / "README.md").read_text(), values)
    return found


def template(
    kind: str, name: str, settings: ManifestSettings = SETTINGS, shape: Callable[[Document], Document] | None = None
) -> str:
    """Return an object of `render` as a template, with all its options, or what a function makes of it."""

    def lines(made: ManifestSettings, pod: Document | None = None) -> list[str]:
        found = [one for one in documents(made) if one["kind"] == kind and named(one, name)]
        if found and pod and "template" in found[0].get("spec", {}):
            found[0]["spec"]["template"]["spec"].update(pod)
        return [line for one in found for line in dump(shape(one) if shape else one).splitlines()]

    base = lines(settings)
    edits = {
        condition: lines(settings, other) if isinstance(other, dict) else lines(other)
        for condition, other in options(settings).items()
        if isinstance(other, dict) or (other != settings and shape is None)
    }
    return expressed(merged(base, {condition: made for condition, made in edits.items() if made}))


def named(document: Document, name: str) -> bool:
    """Return whether a document is a job's object of this name, or one whose name begins so and ends with a hash."""
    found = document["metadata"]["name"].removeprefix("RELEASE-")
    return bool(found == name or (name.endswith("-") and found.startswith(name)))


_rendered: dict[str, list[Document]] = {}


def documents(settings: ManifestSettings) -> list[Document]:
    """Return what `render` makes of settings, with a place for Helm's labels."""
    key = settings.to_json()
    if key not in _rendered:
        _rendered[key] = render(Job(), settings, Token("TOKEN"), {"job.yaml": "FILES"})[1:]
        for one in _rendered[key]:
            one["metadata"]["labels"]["helm.sh/chart"] = "CHART"
            if one["kind"] == "Deployment":
                del one["metadata"]["annotations"]  # by which `submit` knows its own jobs
            if one["kind"] == "PersistentVolumeClaim":
                one["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    return copy.deepcopy(_rendered[key])


def component(path: str, name: str, **labels: str) -> str:
    """Return an object of k8s/components as a template for one job."""
    document = yaml.safe_load((COMPONENTS / path).read_text())
    document["spec"].pop("namespaceSelector", None)  # which a PodMonitor for all jobs has
    own = {NAME: "horizonml", "app.kubernetes.io/part-of": "horizonml", **labels, "helm.sh/chart": "CHART"}
    document["metadata"] = {"name": name, "namespace": "NAMESPACE", "labels": own}
    give_names(document, "RELEASE", "")
    return expressed(dump(document).splitlines())


def as_test(workers: Document) -> Document:
    """Return a pod like those of the workers that trains alone for a moment, for `helm test`."""
    pod = workers["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    kept = {key: worker[key] for key in ("image", "resources", "securityContext")}
    args = ["train", "digits", "--workers", "1", "--device", "cpu", "--set", "steps=20"]
    threads = [entry for entry in worker["env"] if entry["name"] == "OMP_NUM_THREADS"]
    mounts = [one for one in worker["volumeMounts"] if one["name"] in ("data", "tmp")]
    keys = ("enableServiceLinks", "securityContext", "priorityClassName", "imagePullSecrets")
    labels = {NAME: "horizonml", "app.kubernetes.io/component": "test", INSTANCE: "RELEASE", "helm.sh/chart": "CHART"}
    hook = {"helm.sh/hook": "test", "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded"}
    metadata = {"name": "RELEASE-test", "namespace": "NAMESPACE", "labels": labels, "annotations": hook}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            **{key: pod[key] for key in keys if key in pod},
            "containers": [{"name": "test", "args": args, "env": threads, **kept, "volumeMounts": mounts}],
            "volumes": [{"name": name, "emptyDir": {"sizeLimit": "256Mi"}} for name in ("data", "tmp")],
        },
    }


def dump(document: Document) -> str:
    """Return a document as YAML, without line breaks in texts."""
    return str(yaml.dump(document, Dumper=Plain, sort_keys=False, width=10_000))


def merged(base: list[str], edits: Mapping[str, list[str]]) -> list[str]:
    """Return lines that are `base`, or other ones where a condition holds."""
    cells, before = [[line] for line in base], [list[str]() for _ in range(len(base) + 1)]
    for condition, other in edits.items():
        for tag, start, end, first, last in SequenceMatcher(None, base, other, autojunk=False).get_opcodes():
            new, old = other[first:last], cells[start:end]
            indent = re.match(" *", [*new, *base[start:end], ""][0])[0]
            begin, otherwise, finish = (
                f"{indent}{{{{- if {condition} }}}}",
                f"{indent}{{{{- else }}}}",
                f"{indent}{{{{- end }}}}",
            )
            if tag == "insert":
                before[start] += [begin, *new, finish]
            elif tag == "delete":
                old[0].insert(0, f"{indent}{{{{- if not ({condition}) }}}}")
                old[-1].append(finish)
            elif tag == "replace":
                # Line by line where that is possible, since another option may remove one of the lines.
                alike = len(new) == len(old)
                for these, lines in (
                    zip([[cell] for cell in old], [[line] for line in new], strict=True) if alike else [(old, new)]
                ):
                    these[0][:0] = [begin, *lines, otherwise]
                    these[-1].append(finish)
    return [line for added, cell in zip(before, [*cells, []], strict=True) for line in [*added, *cell]]


def expressed(lines: list[str]) -> str:
    """Return lines as a template, with expressions for what stands for settings."""
    made = "".join(f"{line}\n" for line in lines)
    for pattern, expression in EXPRESSIONS.items():
        made = re.sub(pattern, expression, made)
    return made


def when(condition: str, body: str) -> str:
    """Return a template that is empty unless a condition holds."""
    return f"{{{{- if {condition} }}}}\n{body}{{{{- end }}}}\n"


def each_class(body: str) -> str:
    """Return a template of one document for each class of workers, which knows the number of its first rank."""
    head = "{{- $rank := 0 }}\n{{- range $one := $.Values.classes }}\n---\n"
    return f"{head}{body}{{{{- $rank = add $rank $one.count }}}}\n{{{{- end }}}}\n"
