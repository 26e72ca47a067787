{{/* The job's name, with which all objects begin: that of the release. */}}
{{- define "horizonml.name" -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]{0,34}$" .Release.Name) -}}
{{- fail (printf "the release name %q makes no name for a job: use at most 35 lower-case letters, digits and hyphens, beginning with a letter" .Release.Name) -}}
{{- end -}}
{{- .Release.Name -}}
{{- end -}}

{{/* The number of ranks. */}}
{{- define "horizonml.workers" -}}
{{- $sum := 0 -}}
{{- $names := list -}}
{{- range .Values.classes -}}
{{- if has .name $names -}}{{- fail (printf "classes: two classes have the name %q; give each its own" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- $sum = add $sum (int .count) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{- define "horizonml.form" -}}
{{- if .Values.queue -}}job{{- else -}}{{- .Values.form -}}{{- end -}}
{{- end -}}

{{- define "horizonml.image" -}}
{{- printf "%s:%s" .Values.image.repository (toString .Values.image.tag) -}}
{{- end -}}

{{/* The content of the ConfigMap. The number of workers is no part of it, because it may change while they train. */}}
{{- define "horizonml.files" -}}
{{- $job := .Values.job -}}
{{- if kindIs "string" $job -}}
{{- $job = fromYaml $job -}}
{{- if hasKey $job "Error" -}}{{- fail (printf "job: the text is not the YAML of a job file: %s" $job.Error) -}}{{- end -}}
{{- end -}}
{{- $job = $job | default (dict "parallel" (dict "strategy" "ddp")) -}}
{{- $parallel := omit ($job.parallel | default dict) "workers" -}}
{{- $workers := int (include "horizonml.workers" .) -}}
{{- $named := int (dig "parallel" "workers" $workers $job) -}}
{{- if ne $named $workers -}}
{{- fail (printf "job.parallel.workers is %d, and classes has %d workers; leave the former out" $named $workers) -}}
{{- end -}}
{{- if and (gt $workers 1) (not $parallel.stages) (eq "single" ($parallel.strategy | default "single")) -}}
{{- fail (printf "job.parallel.strategy: single trains on 1 worker, and classes has %d; choose another one, such as ddp, pipeline, hybrid or auto" $workers) -}}
{{- end -}}
{{- if $parallel -}}{{- $job = set (omit $job "parallel") "parallel" $parallel -}}{{- end -}}
{{- toYaml (set (deepCopy .Values.files) "job.yaml" (printf "%s\n" (toYaml $job))) -}}
{{- end -}}

{{/* Its name. Another job has another one, so pods are replaced, and none ever sees the files change. */}}
{{- define "horizonml.config" -}}
{{- printf "%s-job-%s" (include "horizonml.name" .) (include "horizonml.files" . | sha256sum | trunc 10) -}}
{{- end -}}

{{/* Refuses another job where Kubernetes can only delete and make anew, in words that say so. */}}
{{- define "horizonml.check-jobs" -}}
{{- $root := . -}}
{{- range .Values.classes -}}
{{- $old := lookup "batch/v1" "Job" $root.Release.Namespace (printf "%s-%s" $root.Release.Name .name) -}}
{{- range dig "spec" "template" "spec" "volumes" list ($old | default dict) -}}
{{- if and (eq .name "job") (ne .configMap.name (include "horizonml.config" $root)) -}}
{{- fail (printf "an Indexed Job cannot be given another job file: helm uninstall %s, and install it again" $root.Release.Name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "horizonml.secret" -}}
{{- .Values.token.existingSecret | default (printf "%s-token" (include "horizonml.name" .)) -}}
{{- end -}}

{{/* The token of the release's Secret, or a new one: 160 random bits and the 20 bits by which
horizonml/security/token.py finds mistakes, in base32. */}}
{{- define "horizonml.token" -}}
{{- $old := lookup "v1" "Secret" .Release.Namespace (include "horizonml.secret" .) -}}
{{- if $old -}}
{{- index $old.data "token" | b64dec -}}
{{- else -}}
{{- $secret := b64dec (randBytes 20) -}}
{{- $check := printf "horizonml token check\x00%s" $secret | sha256sum | trunc 5 | printf "0x%s" | int64 -}}
{{- $letters := "abcdefghijklmnopqrstuvwxyz234567" -}}
hml-{{ b32enc $secret | lower }}
{{- range list 32768 1024 32 1 -}}
{{- $at := int (mod (div $check .) 32) -}}
{{- substr $at (int (add $at 1)) $letters -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "yes" unless another release has an object that all jobs share. Takes the context, API version, kind and name. */}}
{{- define "horizonml.is-ours" -}}
{{- $root := index . 0 -}}
{{- $found := lookup (index . 1) (index . 2) $root.Release.Namespace (index . 3) -}}
{{- $owner := dig "metadata" "annotations" "meta.helm.sh/release-name" $root.Release.Name ($found | default dict) -}}
{{- if eq $owner $root.Release.Name -}}yes{{- end -}}
{{- end -}}

{{/* The labels that Helm wants on each object. */}}
{{- define "horizonml.labels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}
