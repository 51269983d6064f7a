{{/*
What the operator may do with the objects of the namespaces that it serves. Each right is there because a request of the
operator needs it; tests/operator_unit/test_rights.py compares. Server-side apply is patch, and create where the object
is new.
*/}}
{{- define "rayloom-operator.rules" -}}
# One is read when its status is refused, for it may be another one by now.
- apiGroups: [rayloom.dev]
  resources: [llmservices]
  verbs: [get, list, watch]
- apiGroups: [rayloom.dev]
  resources: [llmservices/status]
  verbs: [patch]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
# One looks at a model before anything is made for it; Kubernetes removes it a while after it ended.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create]
# The route label; and pods on lost nodes, which nobody else takes away.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch, delete]
# What guards the engines' pods from drains and from strangers; watched like Services, below.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch]
# One of that name may be somebody else's, so each is looked at first. They are watched: who changes or deletes one
# takes a service away.
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
# Made and removed, never read: admin tokens are derived from the operator's key. No patch, because its answer is the
# whole object, so that whoever may patch Secrets may read them.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
# One that is there is looked at before it is replaced: it may be somebody else's, and so may the Secret beside it.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, delete]
# What engines of a revision were made from, to make them again when a change is undone.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, create, delete]
# An engine serves once clients find it, and is drained once none does any more.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Kubelets say why a volume cannot be mounted only there.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}

{{/* What it may do with objects that are in no namespace. */}}
{{- define "rayloom-operator.cluster-rules" -}}
# Which KubeRay there is.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [rayclusters.ray.io]
  verbs: [list, watch]
# Which nodes are not ready.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}

{{/* What it may do in its own namespace: leader election. Who creates an object cannot be held to a name. */}}
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
