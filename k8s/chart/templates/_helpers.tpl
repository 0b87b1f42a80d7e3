{{- define "slipstream.name" -}}
{{- default .Chart.Name .Values.nameOverride -}}
{{- end -}}

{{- define "slipstream.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains (include "slipstream.name" .) .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "slipstream.name" .) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.selectorLabels" -}}
app.kubernetes.io/name: {{ include "slipstream.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The Ray of k8s/Dockerfile. */}}
{{- define "slipstream.rayVersion" -}}2.60.0{{- end -}}

{{/*
The groups of pods, as JSON {"groups": [...]}: name, role, gpus, min, max, numCpus, and `values`, where the
pod's own are. A replica has a pod of its own.
*/}}
{{- define "slipstream.groups" -}}
{{- $groups := list -}}
{{- range $key, $model := .Values.models -}}
{{- $groups = append $groups (include "slipstream.group" (list "target" $key $model.target) | fromJson) -}}
{{- end -}}
{{- range $key, $pool := .Values.drafts -}}
{{- $groups = append $groups (include "slipstream.group" (list "draft" $key $pool) | fromJson) -}}
{{- end -}}
{{- if eq .Values.coordinators.placement "own" -}}
{{- $groups = append $groups (include "slipstream.group" (list "coordinator" "" .Values.coordinators) | fromJson) -}}
{{- end -}}
{{- dict "groups" $groups | toJson -}}
{{- end -}}

{{- define "slipstream.group" -}}
{{- $role := index . 0 -}}
{{- $key := index . 1 -}}
{{- $values := index . 2 -}}
{{- $replicas := $values.replicas | default (dict "min" 1 "max" 1) -}}
{{- $group := dict
  "name" (ternary (printf "%s-%s" $role $key) "coordinators" (ne $key ""))
  "role" $role
  "gpus" ($values.gpus | default 0)
  "min" $replicas.min
  "max" $replicas.max
  "numCpus" ($values.numCpus | default 1)
  "values" $values -}}
{{- toJson $group -}}
{{- end -}}

{{/* "true" if a group can grow: then KubeRay's autoscaler runs. */}}
{{- define "slipstream.autoscaling" -}}
{{- range (include "slipstream.groups" . | fromJson).groups -}}
{{- if gt (int .max) (int .min) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The CPUs that KubeRay tells Ray of a limit: whole ones, rounded up. */}}
{{- define "slipstream.cpus" -}}
{{- $cpu := toString . -}}
{{- if hasSuffix "m" $cpu -}}
{{- divf (trimSuffix "m" $cpu | float64) 1000 | ceil | int -}}
{{- else -}}
{{- float64 $cpu | ceil | int -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (.pod.image | default dict) -}}
{{- printf "%s:%s" $image.repository (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}

{{/*
The template of a pod. Takes root, pod (its values), role, group (its name), ports (YAML) and resources.
The labels are ours: KubeRay's name a cluster, and an upgrade makes another.
*/}}
{{- define "slipstream.podTemplate" -}}
{{- $values := .root.Values -}}
{{- $isHead := eq .role "head" -}}
{{- $fronts := has .role (list "coordinator" (ternary "target" "coordinator" (eq $values.coordinators.placement "targets"))) -}}
metadata:
  {{- with .pod.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
  labels:
    # None that a new chart version changes: a change of pods is a new cluster.
    {{- include "slipstream.selectorLabels" .root | nindent 4 }}
    {{- with $values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    slipstream/role: {{ .role }}
    slipstream/pool: {{ .group }}
    {{- with .pod.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if not (and $isHead (include "slipstream.autoscaling" .root)) }}
  automountServiceAccountToken: false
  {{- end }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with .pod.restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  {{- with .pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .pod.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" $isHead }}
      image: {{ include "slipstream.image" . | quote }}
      imagePullPolicy: {{ (.pod.image | default dict).pullPolicy | default $values.image.pullPolicy }}
      securityContext: {{- toYaml $values.securityContext | nindent 8 }}
      # Where any port is named, all of them must be.
      ports:
        {{- if $isHead }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: 8000}
        - {name: serve-grpc, containerPort: 9000}
      {{- include "slipstream.probes" (list $values.probes $isHead) | nindent 6 }}
      resources: {{- toYaml .resources | nindent 8 }}
      env:
        - {name: HF_HOME, value: /cache/huggingface}
        - {name: SLIPSTREAM_CACHE, value: /cache/slipstream}
        # What libraries keep in the home folder, which is read-only.
        - {name: XDG_CACHE_HOME, value: /tmp/cache}
        - {name: TRITON_CACHE_DIR, value: /tmp/triton}
        {{- with $values.modelStore.hubTokenSecret }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
        {{- end }}
        {{- with $values.common.containerEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with .pod.containerEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: cache, mountPath: /cache}
        {{- if $values.modelStore.volume.existingClaim }}
        - {name: models, mountPath: {{ $values.modelStore.volume.mountPath }}, readOnly: true}
        {{- end }}
        {{- if not $isHead }}
        {{- if $values.dataPlane.tokenSecret }}
        - {name: data-plane-token, mountPath: /etc/slipstream/data-plane-token, readOnly: true}
        {{- end }}
        {{- if $values.dataPlane.tlsSecret }}
        - {name: data-plane-tls, mountPath: /etc/slipstream/data-plane-tls, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if and $fronts $values.apiKeys.secretName }}
        - {name: api-keys, mountPath: /etc/slipstream/api-keys, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: cache
      {{- if $values.modelStore.cache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ $values.modelStore.cache.existingClaim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $values.modelStore.cache.sizeLimit }}}
      {{- end }}
    {{- with $values.modelStore.volume.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    {{- if not $isHead }}
    {{- with $values.dataPlane.tokenSecret }}
    - name: data-plane-token
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with $values.dataPlane.tlsSecret }}
    - name: data-plane-tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- end }}
    {{- if and $fronts $values.apiKeys.secretName }}
    - name: api-keys
      secret: {secretName: {{ $values.apiKeys.secretName }}, defaultMode: 0440}
    {{- end }}
{{- end -}}

{{/*
KubeRay's own probes, with another time limit. A worker is ready while Serve's proxy answers: one without a
replica has none, and is not. Takes the values and whether it is the head.
*/}}
{{- define "slipstream.probes" -}}
{{- $seconds := (index . 0).timeoutSeconds -}}
{{- $isHead := index . 1 -}}
{{- $raylet := "http://localhost:52365/api/local_raylet_healthz" -}}
{{- $alive := list $raylet -}}
{{- $ready := list $raylet "http://localhost:8000/-/healthz" -}}
{{- if $isHead -}}
{{- $alive = list $raylet "http://localhost:8265/api/gcs_healthz" -}}
{{- $ready = $alive -}}
{{- end -}}
livenessProbe:
  exec: {command: [bash, -c, {{ include "slipstream.probe" (list $seconds $alive) | quote }}]}
  initialDelaySeconds: 30
  periodSeconds: 5
  timeoutSeconds: {{ mul $seconds (len $alive) }}
  failureThreshold: 120
readinessProbe:
  exec: {command: [bash, -c, {{ include "slipstream.probe" (list $seconds $ready) | quote }}]}
  initialDelaySeconds: 10
  periodSeconds: 5
  timeoutSeconds: {{ mul $seconds (len $ready) }}
  failureThreshold: {{ ternary 10 1 $isHead }}
{{- end -}}

{{- define "slipstream.probe" -}}
{{- $checks := list -}}
{{- range index . 1 -}}
{{- $checks = append $checks (printf "wget --tries 1 -T %d -q -O- %s | grep success" (index $ 0 | int) .) -}}
{{- end -}}
{{- join " && " $checks -}}
{{- end -}}

{{/* The resources of a group's container: its own, and its GPUs. */}}
{{- define "slipstream.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- if .gpus -}}
{{- $gpus := dict "nvidia.com/gpu" (int .gpus) -}}
{{- $resources = mergeOverwrite $resources (dict "limits" $gpus "requests" $gpus) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
