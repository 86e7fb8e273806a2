{{- define "pdserve.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "pdserve.secret" -}}
{{ default (include "pdserve.fullname" .) .Values.secretName }}
{{- end }}

{{- /* arguments of those below: dict "root" $ "component" NAME */ -}}
{{- define "pdserve.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "pdserve.metadata" -}}
name: {{ include "pdserve.fullname" .root }}{{ with .suffix | default .component }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "pdserve.labels" . | nindent 2 }}
{{- end }}

{{- define "pdserve.image" -}}
{{- with .Values.image }}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{- /* Settings as environment: a list has commas between its entries, and no number an exponent. */ -}}
{{- define "pdserve.settings" -}}
{{- range $name, $value := . }}
- name: PDSERVE_{{ upper $name }}
  value: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else if kindIs "string" $value }}{{ quote $value }}{{ else }}{{ toJson $value | quote }}{{ end }}
{{- end }}
{{- end }}

{{- /* "true" if every connection that the service accepts or makes has TLS */ -}}
{{- define "pdserve.encrypted" -}}
{{- $values := .root.Values -}}
{{- $redis := and $values.redis.external.enabled $values.redis.external.tls -}}
{{- $otlp := or (not $values.otlpEndpoint) (hasPrefix "https://" $values.otlpEndpoint) -}}
{{- $front := or (ne .component "router") $values.front.tls.enabled -}}
{{- if and $values.tls.enabled $redis $otlp $front }}true{{ end -}}
{{- end }}

{{- define "pdserve.environment" -}}
{{- $values := .root.Values -}}
- name: PDSERVE_MODEL
  value: {{ $values.model.name | quote }}
- name: PDSERVE_HOST
  value: {{ $values.bindAddress | quote }}
- name: PDSERVE_METRICS_HOST
  value: {{ $values.bindAddress | quote }}
- name: PDSERVE_METRICS_PORT
  value: {{ $values.ports.metrics | quote }}
- name: PDSERVE_DRAIN_S
  value: {{ $values.drainSeconds | quote }}
- name: PDSERVE_DEPLOYMENT_KEY_FILE
  value: /etc/pdserve/secrets/deployment_key
{{- if not (include "pdserve.encrypted" .) }}
- name: PDSERVE_INSECURE
  value: "true"
{{- end }}
{{- if $values.tls.enabled }}
- name: PDSERVE_TLS_CERT_FILE
  value: /etc/pdserve/tls/tls.crt
- name: PDSERVE_TLS_KEY_FILE
  value: /etc/pdserve/tls/tls.key
- name: PDSERVE_TLS_CA_FILE
  value: /etc/pdserve/tls/ca.crt
- name: PDSERVE_TLS_SERVER_NAME
  value: {{ $values.tls.serverName | quote }}
{{- end }}
- name: PDSERVE_REDIS_NAMESPACE
  value: {{ $values.redis.namespace | quote }}
{{- if $values.redis.external.enabled }}
- name: PDSERVE_REDIS
  valueFrom: {secretKeyRef: {name: {{ include "pdserve.secret" .root }}, key: PDSERVE_REDIS}}
{{- if $values.redis.external.caSecret }}
- name: PDSERVE_REDIS_CA_FILE
  value: /etc/pdserve/redis/ca.crt
{{- end }}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "pdserve.secret" .root }}, key: REDIS_PASSWORD}}
- name: PDSERVE_REDIS
  value: redis://pdserve:$(REDIS_PASSWORD)@{{ include "pdserve.fullname" .root }}-redis:6379/0
{{- end }}
{{- with $values.otlpEndpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ quote . }}
{{- end }}
{{- if $values.model.hub.enabled }}
- name: HF_HOME
  value: /hub
{{- with $values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
{{- end }}
{{- end }}
{{- include "pdserve.settings" (merge (dict) .set.settings $values.settings) }}
{{- with concat $values.extraEnv .set.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "pdserve.volumeMounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
- {name: secrets, mountPath: /etc/pdserve/secrets, readOnly: true}
{{- if $values.tls.enabled }}
- {name: tls, mountPath: /etc/pdserve/tls, readOnly: true}
{{- end }}
{{- if and $values.redis.external.enabled $values.redis.external.caSecret }}
- {name: redis-ca, mountPath: /etc/pdserve/redis, readOnly: true}
{{- end }}
{{- if and (eq .component "router") $values.front.tls.enabled }}
- {name: front-tls, mountPath: /etc/pdserve/front, readOnly: true}
{{- end }}
{{- if ne $values.model.volume.type "none" }}
- name: model
  mountPath: /models
  readOnly: true
  {{- with $values.model.volume.subPath }}
  subPath: {{ quote . }}
  {{- end }}
{{- end }}
{{- if $values.model.hub.enabled }}
- {name: hub, mountPath: /hub}
{{- end }}
{{- end }}

{{- define "pdserve.volumes" -}}
{{- $values := .root.Values -}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: secrets
  secret:
    secretName: {{ include "pdserve.secret" .root }}
    defaultMode: 0440
    items:
      - {key: PDSERVE_DEPLOYMENT_KEY, path: deployment_key}
      {{- if and (eq .component "router") (eq $values.front.apiKeys "file") }}
      - {key: api_keys.toml, path: api_keys.toml}
      {{- end }}
{{- if $values.tls.enabled }}
- name: tls
  secret: {secretName: {{ get $values.tls.secrets .component }}, defaultMode: 0440}
{{- end }}
{{- if and $values.redis.external.enabled $values.redis.external.caSecret }}
- name: redis-ca
  secret: {secretName: {{ $values.redis.external.caSecret }}, defaultMode: 0440, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- if and (eq .component "router") $values.front.tls.enabled }}
- name: front-tls
  secret: {secretName: {{ $values.front.tls.secret }}, defaultMode: 0440}
{{- end }}
{{- with $values.model.volume }}
{{- if eq .type "persistentVolumeClaim" }}
- name: model
  persistentVolumeClaim: {claimName: {{ required "model.volume.claimName is needed" .claimName }}, readOnly: true}
{{- else if eq .type "hostPath" }}
- name: model
  hostPath: {path: {{ required "model.volume.hostPath is needed" .hostPath }}, type: Directory}
{{- end }}
{{- end }}
{{- with $values.model.hub }}
{{- if and .enabled .claimName }}
- name: hub
  persistentVolumeClaim: {claimName: {{ .claimName }}}
{{- else if .enabled }}
- name: hub
  emptyDir: {sizeLimit: {{ .sizeLimit }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* Probes of one container. scheme: of HTTP; httpPort, grpcPort: numbers */ -}}
{{- define "pdserve.probes" -}}
{{- $probes := .root.Values.probes -}}
{{- $context := . -}}
{{- range $probe, $service := dict "startupProbe" "live" "livenessProbe" "live" "readinessProbe" "ready" }}
{{ $probe }}:
  {{- if eq $context.scheme "" }}
  tcpSocket: {port: {{ $context.httpPort }}}
  {{- else if eq $probes.protocol "grpc" }}
  grpc: {port: {{ $context.grpcPort }}, service: {{ $service }}}
  {{- else }}
  httpGet: {path: /{{ $service }}, port: {{ $context.httpPort }}, scheme: {{ $context.scheme }}}
  {{- end }}
  periodSeconds: {{ $probes.periodSeconds }}
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ if eq $probe "startupProbe" }}{{ divf $probes.startupSeconds $probes.periodSeconds | ceil | int }}{{ else }}{{ $probes.failureThreshold }}{{ end }}
{{- end }}
{{- end }}

{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* What the specs of all pods share. */ -}}
{{- define "pdserve.pod" -}}
serviceAccountName: {{ include "pdserve.serviceAccount" .root }}
automountServiceAccountToken: false
# variables of a Service named pdserve-router would begin as those of settings do, and be refused
enableServiceLinks: false
# pause is process 1, collects orphans, and a service that has no handler yet ends at SIGTERM
shareProcessNamespace: true
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $name := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with get $.set $name }}
{{ $name }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pdserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "pdserve.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}
