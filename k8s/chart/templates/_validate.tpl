{{/* Fails with what is wrong, for what a schema cannot say: rules of KubeRay's, and values that need each other. */}}
{{- define "slipstream.validate" -}}
{{- include "slipstream.validateModels" .Values -}}
{{- include "slipstream.validateName" . -}}
{{- include "slipstream.validateTimes" .Values -}}
{{- include "slipstream.validateHead" .Values -}}
{{- include "slipstream.validateRedis" .Values -}}
{{- include "slipstream.validateFrontDoor" .Values -}}
{{- include "slipstream.validateCoordinators" . -}}
{{- include "slipstream.validateGroups" . -}}
{{- end -}}

{{- define "slipstream.validateName" -}}
{{- $name := include "slipstream.fullname" . -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "the name %q has %d characters, and KubeRay takes 47 at most: set fullnameOverride to a shorter one" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q is no DNS label: KubeRay takes lower-case letters, digits and \"-\", a letter first; set fullnameOverride" $name) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.validateTimes" -}}
{{- $limit := .coordinators.thresholds.request_limit_s | default 600 -}}
{{- range $name := list "rayClusterDeletionDelaySeconds" "gracefulShutdownTimeoutSeconds" -}}
{{- $seconds := get $ $name -}}
{{- if lt (float64 $seconds) (float64 $limit) -}}
{{- fail (printf "%s: %v seconds are less than coordinators.thresholds.request_limit_s (%v): answers would be cut; raise it, or lower the limit" $name $seconds $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.validateHead" -}}
{{- $params := .head.rayStartParams -}}
{{- if hasKey $params "labels" -}}
{{- fail "head.rayStartParams.labels: KubeRay refuses Ray's labels there; the chart sets those that it needs" -}}
{{- end -}}
{{- range $name := list "redis-password" "redis-username" -}}
{{- if hasKey $params $name -}}
{{- fail (printf "head.rayStartParams.%s: KubeRay takes Redis's credentials in one place; set gcsFaultTolerance.%s" $name (camelcase $name | untitle)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.validateRedis" -}}
{{- $ft := .gcsFaultTolerance -}}
{{- if and $ft.enabled (not $ft.redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: enabled without an address; give host:port of a Redis" -}}
{{- end -}}
{{- range concat .common.containerEnv .head.containerEnv -}}
{{- if has .name (list "RAY_REDIS_ADDRESS" "REDIS_PASSWORD" "REDIS_USERNAME") -}}
{{- fail (printf "containerEnv: %s is set, and KubeRay refuses Redis settings in two places; take it out and use gcsFaultTolerance" .name) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "ray.io/ft-enabled" "ray.io/external-storage-namespace" -}}
{{- if hasKey $.annotations $name -}}
{{- fail (printf "annotations: %s is set, and KubeRay refuses Redis settings in two places; take it out and use gcsFaultTolerance" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.validateFrontDoor" -}}
{{- range $name, $value := .serve.httpOptions -}}
{{- if hasPrefix "ssl_" $name -}}
{{- fail (printf "serve.httpOptions.%s: with TLS in Serve KubeRay's readiness probe, which speaks HTTP, fails and no worker becomes ready; end TLS in what stands before the Service" $name) -}}
{{- end -}}
{{- end -}}
{{- if not (or .dataPlane.tokenSecret .dataPlane.tlsSecret) -}}
{{- fail "dataPlane: workers listen beyond loopback here; set dataPlane.tokenSecret (kubectl create secret generic slipstream-data-plane --from-literal=token=$(openssl rand -hex 32)), dataPlane.tlsSecret, or both" -}}
{{- end -}}
{{- if and .podMonitor.enabled .networkPolicy.enabled (not .networkPolicy.scrapers) -}}
{{- fail "networkPolicy.scrapers: podMonitor is enabled, and nobody may read metrics; say where Prometheus runs, for example [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" -}}
{{- end -}}
{{- if and .service.headless (ne .service.type "ClusterIP") -}}
{{- fail (printf "service.headless: a Service of type %s has an address; take headless out, or set service.type to ClusterIP" .service.type) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.validateModels" -}}
{{- if not .models -}}
{{- fail "models: none is named; begin with one of the files in k8s/values, for example -f k8s/values/cpu-trial.yaml" -}}
{{- end -}}
{{- range $key, $model := .models -}}
{{- $names := list -}}
{{- range $model.drafters -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $pool := $model.drafts -}}
{{- if not (hasKey $.drafts $pool) -}}
{{- fail (printf "models.%s.drafts: no pool %q under drafts (there are: %s)" $key $pool (keys $.drafts | sortAlpha | join ", " | default "none")) -}}
{{- end -}}
{{- range (index $.drafts $pool).drafters -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "models.%s: the names of its drafters must differ, beside the target and in all its pools: %s" $key (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- range $key, $pool := .drafts -}}
{{- if not (hasKey $.models $pool.target) -}}
{{- fail (printf "drafts.%s.target: no model %q under models (there are: %s)" $key $pool.target (keys $.models | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.validateCoordinators" -}}
{{- $most := int .Values.coordinators.replicas.max -}}
{{- if eq .Values.coordinators.placement "targets" -}}
{{- $pods := 0 -}}
{{- range (include "slipstream.groups" . | fromJson).groups -}}
{{- if eq .role "target" -}}{{- $pods = add $pods (int .min) -}}{{- end -}}
{{- end -}}
{{- if gt $most (int $pods) -}}
{{- fail (printf "coordinators.replicas.max: %d of them need as many target pods, and there may be %d only; lower it, or set coordinators.placement to own" $most (int $pods)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.validateGroups" -}}
{{- $values := .Values -}}
{{- $autoscaling := include "slipstream.autoscaling" . -}}
{{- $groups := (include "slipstream.groups" . | fromJson).groups -}}
{{- range prepend $groups (dict "name" "head" "role" "head" "values" $values.head) -}}
{{- $policy := .values.restartPolicy | default "Never" -}}
{{- if and $autoscaling (ne $policy "Never") -}}
{{- fail (printf "restartPolicy of %s: %s, and KubeRay's autoscaler (a group's max is above its min) allows Never only; take it out" .name $policy) -}}
{{- end -}}
{{- end -}}
{{- range $group := $groups -}}
{{- if gt (int .min) (int .max) -}}
{{- fail (printf "replicas of %s: min %d is above max %d" .name (int .min) (int .max)) -}}
{{- end -}}
{{- range $kind, $amounts := .values.resources -}}
{{- if hasKey (default dict $amounts) "nvidia.com/gpu" -}}
{{- fail (printf "resources of %s: nvidia.com/gpu in %s; set gpus instead, which counts ranks, too" $group.name $kind) -}}
{{- end -}}
{{- end -}}
{{- $limit := (default dict .values.resources.limits).cpu -}}
{{- if not $limit -}}
{{- fail (printf "resources of %s: no limits.cpu; Ray would count the CPUs of the whole machine" .name) -}}
{{- end -}}
{{- $needed := mulf .numCpus (max 1 (int .gpus)) -}}
{{- if and (eq .role "target") (eq $values.coordinators.placement "targets") -}}
{{- $needed = addf $needed $values.coordinators.numCpus -}}
{{- end -}}
{{- $cpus := include "slipstream.cpus" $limit | int -}}
{{- if gt $needed (float64 $cpus) -}}
{{- fail (printf "resources of %s: limits.cpu %v is %d for Ray, and its replicas ask for %v (numCpus for each rank, and a coordinator's on targets): they would wait for ever; raise the limit" .name $limit $cpus $needed) -}}
{{- end -}}
{{- end -}}
{{- end -}}
