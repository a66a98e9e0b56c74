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

{{- define "orch.labels" -}}
app.kubernetes.io/name: orch-controller
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: orch
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "orch.selector" -}}
app.kubernetes.io/name: orch-controller
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "orch.monitoringLabels" -}}
{{- merge (include "orch.labels" . | fromYaml) .Values.monitoring.labels | toYaml -}}
{{- end -}}

{{- define "orch.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* What the controller may do where runs are. It makes Secrets and reads none. */ -}}
{{- define "orch.rules" -}}
- { apiGroups: [orch.dev], resources: [trainruns], verbs: [get, list, watch, delete] }
- { apiGroups: [orch.dev], resources: [trainruns/status], verbs: [patch] }
- { apiGroups: [batch], resources: [jobs], verbs: [get, list, watch, create, delete] }
- { apiGroups: [""], resources: [pods], verbs: [get, list, watch, patch, delete] }
- { apiGroups: [""], resources: [pods/status], verbs: [patch] }
- { apiGroups: [""], resources: [pods/eviction], verbs: [create] }
- { apiGroups: [""], resources: [pods/log], verbs: [get] }
- { apiGroups: [""], resources: [secrets], verbs: [create] }
- { apiGroups: [""], resources: [configmaps], verbs: [get, create, patch] }
- { apiGroups: [""], resources: [services], verbs: [create, patch] }
- { apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [create, patch] }
- { apiGroups: [""], resources: [events], verbs: [list] }
- { apiGroups: [kueue.x-k8s.io], resources: [workloads], verbs: [list] }
{{- end -}}
