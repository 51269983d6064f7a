{{/*
Rights of the operator in the namespaces that it serves. Each right is needed by a request of the operator;
tests/operator_unit/test_rights.py compares rights and requests. Server-side apply needs patch, and create for a new
object.
*/}}
{{- define "rayloom-operator.rules" -}}
# get, because an object whose status could not be patched may have been deleted and recreated, and because the scaler
# reads a service before it writes spec.replicas.
- apiGroups: [rayloom.dev]
  resources: [llmservices, llmgateways]
  verbs: [get, list, watch]
- apiGroups: [rayloom.dev]
  resources: [llmservices/status, llmgateways/status]
  verbs: [patch]
# The scaler writes spec.replicas of services with spec.autoscaling, and no other field of a spec.
- apiGroups: [rayloom.dev]
  resources: [llmservices/scale]
  verbs: [patch]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
# Jobs that inspect a model before its engines are created. Kubernetes deletes them some time after they end.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create]
# patch sets two labels: Services select pods by the first, and a change of the second makes the kubelet update the
# models file of gateway pods at once. delete is for pods on lost nodes, which no controller deletes.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
# Protection of the engines' pods from evictions and from clients without access. The reasons for get and watch are the
# same as for Services, see below.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
# get, because an object of the same name may have another owner. watch, because a change or deletion by somebody else
# makes a service unreachable.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch]
# delete is for the objects of gateways, when spec.gateway is removed.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
# Gateway pods.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# The route to gateway pods, spec.gateway.route. The first kind exists only in clusters with the Gateway API.
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [ingresses]
  verbs: [get, list, watch, create, patch, delete]
# Secrets are created, replaced and deleted, never read: their content is derived from the operator's key. There is no
# patch: the response to a patch has the whole object, so everybody who may patch a Secret can read it. The response to
# an update has only what was sent. update is for LLMGateways, whose Secrets change with the names that they serve, and
# for renewed certificates.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, update, delete]
# get, because a ConfigMap of the same name may have another owner. The Secret of that name may then have this owner
# too.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, delete]
# The spec of each revision, from which its engines are recreated when they fail or a change is rolled back.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, create, delete]
# An engine counts as available once an EndpointSlice lists its head pod. Its drain begins once no EndpointSlice lists
# the head pod.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Only Events of kubelets have the reason why a volume cannot be mounted.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* Rights to cluster-scoped objects. */}}
{{- define "rayloom-operator.cluster-rules" -}}
# The installed version of KubeRay.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [rayclusters.ray.io]
  verbs: [list, watch]
# Conditions of nodes, and labels with the memory of their accelerators.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}

{{/* Rights in the operator's own namespace, for leader election. RBAC cannot restrict create to a name. */}}
{{- define "rayloom-operator.own-rules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "rayloom-operator.name" . }}]
  verbs: [get, patch]
{{- end }}

{{/* A role and its binding. Takes a dict: root, kind ("Role" or "ClusterRole"), name, namespace, rules. */}}
{{- define "rayloom-operator.role" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "rayloom-operator.labels" .root | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "rayloom-operator.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "rayloom-operator.name" .root }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}
