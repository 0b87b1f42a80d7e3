{{/* What the RayService's serveConfigV2 holds: docs/pools.yaml, from the values. */}}
{{- define "slipstream.serveConfig" -}}
{{- $values := .Values -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  {{- with $values.serve.httpOptions }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
grpc_options:
  port: 9000
  grpc_servicer_functions:
    - protos.inference_pb2_grpc.add_InferenceServicer_to_server
applications:
  - name: front
    route_prefix: /
    import_path: deployments.app:front
    args:
      data_plane: {{- include "slipstream.dataPlane" $values | nindent 8 }}
      models:
        {{- range $key, $model := $values.models }}
        - model_id: {{ $model.modelId | default $key | quote }}
          target: target-{{ $key }}
          {{- with $model.drafts }}
          drafts:
            {{- range . }}
            - app: draft-{{ . }}
              drafters:
                {{- range (index $values.drafts .).drafters }}
                - {{ .name }}
                {{- end }}
            {{- end }}
          {{- end }}
        {{- end }}
    deployments:
      - name: Coordinator
        {{- include "slipstream.scaling" (list $values.coordinators $values.coordinators.targetOngoingRequests) | nindent 8 }}
        max_replicas_per_node: 1
        graceful_shutdown_timeout_s: {{ $values.gracefulShutdownTimeoutSeconds }}
        ray_actor_options:
          num_cpus: {{ $values.coordinators.numCpus }}
          label_selector: {slipstream/role: {{ ternary "coordinator" "target" (eq $values.coordinators.placement "own") }}}
        user_config:
          {{- toYaml $values.coordinators.thresholds | nindent 10 }}
          {{- if $values.apiKeys.secretName }}
          api_keys_file: /etc/slipstream/api-keys/{{ $values.apiKeys.key }}
          {{- end }}
  {{- range $key, $model := $values.models }}
  {{- $target := $model.target }}
  {{- $gpus := int ($target.gpus | default 0) }}
  {{- $ranks := max 1 $gpus }}
  {{- $cpus := $target.numCpus | default 1 }}
  {{- $seats := int ($target.args.max_num_seqs | default 256) }}
  {{- $device := ternary "cuda" "cpu" (gt $gpus 0) }}
  - name: target-{{ $key }}
    route_prefix: null
    import_path: deployments.app:target
    args:
      model_id: {{ $model.modelId | default $key | quote }}
      data_plane: {{- include "slipstream.dataPlane" $values | nindent 8 }}
      target:
        device: {{ $device }}
        tensor_parallel_size: {{ $ranks }}
        {{- toYaml $target.args | nindent 8 }}
      {{- with $model.drafters }}
      drafts:
        {{- range . }}
        - placement: target
          {{- include "slipstream.drafter" (list . $device) | nindent 10 }}
        {{- end }}
      {{- end }}
    deployments:
      - name: Target
        {{- include "slipstream.scaling" (list $target (max 1 (div (mul 3 $seats) 4))) | nindent 8 }}
        graceful_shutdown_timeout_s: {{ $values.gracefulShutdownTimeoutSeconds }}
        {{- with $model.thresholds }}
        user_config: {{- toYaml . | nindent 10 }}
        {{- end }}
        ray_actor_options:
          num_cpus: {{ $cpus }}
          {{- if $gpus }}
          num_gpus: 1
          {{- end }}
          {{- if eq (int $ranks) 1 }}
          label_selector: {slipstream/pool: target-{{ $key }}}
        max_replicas_per_node: 1
          {{- else }}
        # A bundle for each rank; the replica itself is the first.
        placement_group_strategy: STRICT_PACK
        placement_group_bundles:
          {{- range until (int $ranks) }}
          - {CPU: {{ $cpus }}, GPU: 1}
          {{- end }}
        placement_group_bundle_label_selector:
          - {slipstream/pool: target-{{ $key }}}
          {{- end }}
  {{- end }}
  {{- range $key, $pool := $values.drafts }}
  {{- $gpus := int ($pool.gpus | default 0) }}
  {{- $sessions := int ($pool.maxSessions | default 64) }}
  - name: draft-{{ $key }}
    route_prefix: null
    import_path: deployments.app:draft
    args:
      data_plane: {{- include "slipstream.dataPlane" $values | nindent 8 }}
      target: {{ (index $values.models $pool.target).target.args.model | quote }}
      max_sessions: {{ $sessions }}
      drafts:
        {{- range $pool.drafters }}
        - {{ include "slipstream.drafter" (list . (ternary "cuda" "cpu" (gt $gpus 0))) | nindent 10 | trim }}
        {{- end }}
    deployments:
      - name: Draft
        {{- include "slipstream.scaling" (list $pool (max 1 (div (mul 3 $sessions) 4))) | nindent 8 }}
        max_replicas_per_node: 1
        graceful_shutdown_timeout_s: {{ $values.gracefulShutdownTimeoutSeconds }}
        {{- with $pool.thresholds }}
        user_config: {{- toYaml . | nindent 10 }}
        {{- end }}
        ray_actor_options:
          num_cpus: {{ $pool.numCpus | default 1 }}
          {{- if $gpus }}
          num_gpus: 1
          {{- end }}
          label_selector: {slipstream/pool: draft-{{ $key }}}
  {{- end }}
{{- end -}}

{{- define "slipstream.dataPlane" -}}
host: node
{{- if .dataPlane.tokenSecret }}
token_file: /etc/slipstream/data-plane-token/token
{{- end }}
{{- if .dataPlane.tlsSecret }}
tls_folder: /etc/slipstream/data-plane-tls
tls_name: {{ .dataPlane.tlsName }}
{{- end }}
{{- end -}}

{{/* A drafter of the values and the device that its pod has. */}}
{{- define "slipstream.drafter" -}}
{{- $drafter := index . 0 -}}
{{- toYaml $drafter -}}
{{- if not (has $drafter.kind (list "lookup" "suffix" "datastore" "custom")) }}
device: {{ index . 1 }}
{{- end -}}
{{- end -}}

{{/* How many replicas. Takes a group's values and the default of its targetOngoingRequests. */}}
{{- define "slipstream.scaling" -}}
{{- $group := index . 0 -}}
{{- $replicas := $group.replicas | default (dict "min" 1 "max" 1) -}}
{{- if eq (int $replicas.min) (int $replicas.max) -}}
num_replicas: {{ $replicas.min }}
{{- else -}}
autoscaling_config:
  min_replicas: {{ $replicas.min }}
  max_replicas: {{ $replicas.max }}
  target_ongoing_requests: {{ $group.targetOngoingRequests | default (index . 1) }}
{{- end -}}
{{- end -}}
