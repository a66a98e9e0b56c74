{{- /* Names. A run's name holds a digest of everything that makes it: other values are another run, the same ones the
same, so that an upgrade replaces a run and a rollback brings it back, with its checkpoints where there is a claim. */ -}}
{{- define "orch.name" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if or (ne $name .Release.Name) (gt (len $name) 40) -}}
{{- $name = printf "%s-%s" ($name | trunc 31 | trimSuffix "-") (.Release.Name | sha256sum | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- /* Of an object that belongs to no namespace: release b-c of namespace a is not release c of namespace a-b. */ -}}
{{- define "orch.clusterName" -}}
{{- $whose := printf "%s/%s" .Release.Namespace .Release.Name | sha256sum | trunc 8 -}}
{{- printf "%s-%s-%s" (.Release.Namespace | trunc 40 | trimSuffix "-") (include "orch.name" .) $whose -}}
{{- end -}}

{{- /* The accounts of the launcher and of the run's pods: the chart's own, or those that somebody else has made; "" for
the namespace's default one. */ -}}
{{- define "orch.launcherAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ include "orch.name" . }}-launcher{{- else -}}{{ .Values.serviceAccount.launcher }}{{- end -}}
{{- end -}}

{{- define "orch.podsAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ include "orch.name" . }}-pods{{- else -}}{{ .Values.serviceAccount.pods }}{{- end -}}
{{- end -}}

{{- define "orch.digest" -}}
{{- $made := dict "c" .Values.cluster "p" .Values.parallel "m" .Values.model "o" .Values.overrides "i" .Values.image "x" .Values.options "k" .Values.claim "n" .Values.networkPolicy "q" .Values.kueue -}}
{{- with .Values.serviceAccount.pods -}}{{- $_ := set $made "s" . -}}{{- end -}}
{{- $made | toJson | sha256sum | trunc 8 -}}
{{- end -}}

{{- define "orch.run" -}}
{{- printf "%s-%s" (include "orch.name" .) (include "orch.digest" .) -}}
{{- end -}}

{{- /* What orch calls the run's objects: a Service starts with a letter (orchestrator/backends/kubernetes/names.py). */ -}}
{{- define "orch.object" -}}
{{- $run := include "orch.run" . -}}
{{- if regexMatch "^[0-9]" $run -}}r{{- end -}}{{- $run -}}
{{- end -}}

{{- /* The launcher of that run. A Job's pods cannot be changed: another launcher is another Job, which finds the run sent. */ -}}
{{- define "orch.launcher" -}}
{{- $made := dict "l" .Values.launcher "s" .Values.serviceAccount "c" .Chart.Version "a" .Chart.AppVersion "m" .Release.Service -}}
{{- printf "%s-launch-%s" (include "orch.run" .) ($made | toJson | sha256sum | trunc 4) -}}
{{- end -}}

{{- define "orch.labels" -}}
app.kubernetes.io/name: orch
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: orch
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- /* The chart's own, and the user's, which are data and never YAML of ours. */ -}}
{{- define "orch.monitoringLabels" -}}
{{- merge (include "orch.labels" . | fromYaml) .Values.monitoring.labels | toYaml -}}
{{- end -}}

{{- /* Whether a controller of TrainRuns is there to give the run to; "" for no. */ -}}
{{- define "orch.controlled" -}}
{{- if eq .Values.controller "always" -}}yes
{{- else if and (eq .Values.controller "auto") (.Capabilities.APIVersions.Has "orch.dev/v1alpha1/TrainRun") -}}yes
{{- end -}}
{{- end -}}

{{- define "orch.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "orch.claim" -}}
{{- if .Values.claim.existing -}}{{ .Values.claim.existing }}{{- else if .Values.claim.create -}}{{ include "orch.name" . }}-runs{{- end -}}
{{- end -}}

{{- define "orch.queue" -}}
{{- .Values.kueue.queue | default (include "orch.name" .) -}}
{{- end -}}

{{- /* backend.options of the run: the user's, and what the chart knows. */ -}}
{{- define "orch.options" -}}
{{- $own := dict "image" (include "orch.image" .) "pull_policy" .Values.image.pullPolicy "pull_secrets" .Values.image.pullSecrets "network_policy" .Values.networkPolicy.enabled "namespace" .Release.Namespace "owner" (dict "name" (printf "%s-values" (include "orch.run" .))) -}}
{{- if include "orch.claim" . -}}{{- $_ := set $own "claim" (include "orch.claim" .) -}}{{- end -}}
{{- with include "orch.podsAccount" . -}}{{- $_ := set $own "service_account" . -}}{{- end -}}
{{- if .Values.kueue.create -}}{{- $_ := set $own "queue" (include "orch.queue" .) -}}{{- end -}}
{{- merge $own .Values.options | toJson -}}
{{- end -}}

{{- /* Pod Security's restricted level, for the pods of this chart. The pods of the run have the same from orch. */ -}}
{{- define "orch.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "orch.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}
