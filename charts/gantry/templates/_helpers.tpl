{{- define "gantry.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- /* The version of kube-scheduler's image: the cluster's, without the suffix of a distribution. */}}
{{- define "gantry.kubeScheduler.image" -}}
{{- $image := .Values.scheduler.own.image -}}
{{ $image.repository }}:{{ $image.tag | default (regexFind "^v?[0-9]+\\.[0-9]+\\.[0-9]+" .Capabilities.KubeVersion.Version) }}
{{- end }}

{{- /* The API version of MutatingAdmissionPolicy; a cluster without one cannot have the policy. */}}
{{- define "gantry.mutatingPolicyVersion" -}}
{{- if semverCompare ">=1.36.0-0" .root.Capabilities.KubeVersion.Version -}}
admissionregistration.k8s.io/v1
{{- else if semverCompare ">=1.34.0-0" .root.Capabilities.KubeVersion.Version -}}
admissionregistration.k8s.io/v1beta1
{{- else -}}
{{- fail (printf "%s needs MutatingAdmissionPolicy, which Kubernetes has since 1.34 (beta) and 1.36; this cluster has %s%s" .value .root.Capabilities.KubeVersion.Version (.instead | default "")) -}}
{{- end -}}
{{- end }}

{{- define "gantry.plugin.configMap" -}}
{{- if .Values.plugin.existingConfigMap -}}
{{ .Values.plugin.existingConfigMap }}
{{- else if .Values.plugin.configs -}}
gantry-plugin-config
{{- end -}}
{{- end }}

{{- define "gantry.plugin.args" -}}
{{- $args := list "plugin" -}}
{{- with include "gantry.plugin.configMap" . -}}
{{- $args = append $args (printf "--config-map=%s/%s" $.Release.Namespace .) -}}
{{- end -}}
{{- with .Values.plugin.defaultConfig }}{{ $args = append $args (printf "--default-config=%s" .) }}{{ end -}}
{{- if ne .Values.plugin.labels "off" }}{{ $args = append $args (printf "--labels=%s" .Values.plugin.labels) }}{{ end -}}
{{- if .Values.plugin.podMetrics }}{{ $args = append $args "--pod-metrics" }}{{ end -}}
{{- if .Values.plugin.ncclTopology }}{{ $args = append $args "--nccl-topology" }}{{ end -}}
{{- if .Values.plugin.dcgmMetrics }}{{ $args = append $args "--dcgm-metrics" }}{{ end -}}
{{- concat $args .Values.plugin.extraArgs | toJson -}}
{{- end }}

{{- /* Arguments of the extender, after those of its shape. */}}
{{- define "gantry.extender.args" -}}
{{- $root := .root -}}
{{- $extender := $root.Values.extender -}}
{{- $args := .args -}}
{{- with $extender.resources }}{{ $args = append $args (printf "--resource=%s" (join "," .)) }}{{ end -}}
{{- with $extender.fabric }}{{ $args = append $args (printf "--fabric=%s" .) }}{{ end -}}
{{- if ne $extender.policy "" }}{{ $args = append $args (printf "--policy=%s" $extender.policy) }}{{ end -}}
{{- if ne $extender.foreignNodes "" }}{{ $args = append $args (printf "--foreign-nodes=%s" $extender.foreignNodes) }}{{ end -}}
{{- if $extender.gates }}{{ $args = append $args "--gates" }}{{ end -}}
{{- if $extender.remediationRules }}{{ $args = append $args "--remediation-rules=/etc/gantry/remediation/rules.yaml" }}{{ end -}}
{{- with $extender.explainListen }}{{ $args = append $args (printf "--explain-listen=%s" .) }}{{ end -}}
{{- if $extender.page.enabled }}
{{- $args = append $args (printf "--page-listen=%s" $extender.page.listen) -}}
{{- with $extender.page.hosts }}{{ $args = append $args (printf "--page-host=%s" (join "," .)) }}{{ end -}}
{{- end -}}
{{- concat $args $extender.extraArgs | toJson -}}
{{- end }}

{{- /* Port of the web page where clients outside of the pod reach it; empty if it is off or on loopback. */}}
{{- define "gantry.extender.pagePort" -}}
{{- with .Values.extender.page -}}
{{- if and .enabled (not (regexMatch "^(127\\.|localhost:|\\[::1\\])" .listen)) }}{{ regexFind "[0-9]+$" .listen }}{{ end -}}
{{- end -}}
{{- end }}

{{- /* Ingress to it, from namespaces with a label. */}}
{{- define "gantry.extender.pageIngress" -}}
{{- if include "gantry.extender.pagePort" . }}
    # The web page has no authentication: only for the proxy in front of it.
    - from:
        - namespaceSelector: {matchLabels: {gantry.dev/page: "true"}}
      ports:
        - {protocol: TCP, port: page}
{{- end }}
{{- end }}

{{- /* The conditions of a pod that the policy and the webhook assign to Gantry's scheduler. */}}
{{- define "gantry.assign.matchConditions" -}}
- name: asks-for-gpus
  expression: "(object.spec.containers + object.spec.?initContainers.orValue([])).exists(c, c.?resources.?limits.orValue({}).exists(name, {{ include "gantry.isManaged" . }}))"
- name: names-no-scheduler
  expression: "object.spec.?schedulerName.orValue('default-scheduler') == 'default-scheduler'"
- name: is-not-bound
  expression: "object.spec.?nodeName.orValue('') == ''"
{{- end }}

{{- /* The Secret with the certificate of the webhook. */}}
{{- define "gantry.webhook.secret" -}}
{{ .Values.scheduler.webhook.tlsSecret | default "gantry-webhook-tls" }}
{{- end }}

{{- /* Security context of the extender, which needs no rights on its node. */}}
{{- define "gantry.extender.securityContext" -}}
runAsNonRoot: true
runAsUser: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- with .Values.extender.seLinuxOptions }}
seLinuxOptions: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "gantry.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
      imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{- /* The expression of a policy that a resource of this name is managed. */}}
{{- define "gantry.isManaged" -}}
name.startsWith('nvidia.com/'){{ range .Values.extender.resources }} || name == '{{ . }}'{{ end }}
{{- end }}
