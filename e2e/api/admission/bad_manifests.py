"""Manifests that cannot be served, and the error message of `kubectl apply` for each.

A row has a name of the mistake, fields of the manifest (`spec`, in some rows `metadata`), and a part of the message.
"""

from __future__ import annotations

from typing import Any

_MODEL = {"source": "builtin://smollm2-135m"}
_SOURCES = "use one of hf://ORG/NAME"


def _spec(**fields: Any) -> dict[str, Any]:
    return {"spec": {"model": _MODEL, **fields}}


def _model(**fields: Any) -> dict[str, Any]:
    return {"spec": {"model": {**_MODEL, **fields}}}


_ADAPTER = {"name": "sql", "source": "pvc://adapters/sql"}


def _adapters(**fields: Any) -> dict[str, Any]:
    return _model(adapters=[{**_ADAPTER, **fields}])


def _drafted(**fields: Any) -> dict[str, Any]:
    return _model(draft={**_MODEL, **fields})


def _engine(**fields: Any) -> dict[str, Any]:
    return _spec(engine=fields)


def _args(**fields: Any) -> dict[str, Any]:
    return _engine(args=fields)


def _scaled(**fields: Any) -> dict[str, Any]:
    return _spec(autoscaling={"maxReplicas": 4, **fields})


def _gateway(**fields: Any) -> dict[str, Any]:
    return _spec(gateway=fields)


def _limited(**amounts: Any) -> dict[str, Any]:
    return _gateway(resources={"limits": amounts})


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, **_spec()}


def _head(**spec: Any) -> dict[str, Any]:
    return _spec(podTemplate={"head": {"spec": spec}})


def _worker(**spec: Any) -> dict[str, Any]:
    return _spec(podTemplate={"worker": {"spec": spec}})


def _labelled(kind: str, key: str, value: Any = "x") -> dict[str, Any]:
    return _spec(podTemplate={"head": {"metadata": {kind: {key: value}}}})


def _container(name: str, **fields: Any) -> dict[str, Any]:
    part = {"containers": [{"name": name, **fields}]}
    return _worker(**part) if name == "ray-worker" else _head(**part)


def _mount(name: str, path: str) -> dict[str, Any]:
    return {"volumeMounts": [{"name": name, "mountPath": path}]}


_KEYS = {"name": "RAYLOOM_API_KEYS", "value": "a"}
_RESERVED = "the operator sets this variable itself: remove it"
_NAME = "at most 40 lower-case letters, digits and '-', beginning with a letter"

AT_ADMISSION: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("no spec", {}, "spec: Required value"),
    ("spec is a list", {"spec": []}, "spec in body must be of type object"),
    ("empty spec", {"spec": {}}, "spec.model: Required value"),
    ("model is a string", {"spec": {"model": "builtin://smollm2-135m"}}, "spec.model in body must be of type object"),
    ("no source", {"spec": {"model": {}}}, "spec.model.source: Required value"),
    ("a source without a scheme", _model(source="Qwen/Qwen3-8B"), _SOURCES),
    ("a source with an unknown scheme", _model(source="s3://bucket/model"), _SOURCES),
    ("a hub source without an organisation", _model(source="hf://Qwen3-8B"), _SOURCES),
    ("a hub source with a revision in it", _model(source="hf://Qwen/Qwen3-8B@main"), _SOURCES),
    ("a hub source with three parts", _model(source="hf://a/b/c"), _SOURCES),
    ("a relative file source", _model(source="file://models/x"), _SOURCES),
    ("a file source without a path", _model(source="file:///"), _SOURCES),
    ("an unknown builtin", _model(source="builtin://llama"), _SOURCES),
    ("a source in capitals", _model(source="HF://Qwen/Qwen3-8B"), _SOURCES),
    ("an empty source", _model(source=""), _SOURCES),
    ("a source that is a number", _model(source=7), "must be of type string"),
    ("a source that is too long", _model(source="file:///" + "x" * 1100), "may not be more than 1024"),
    ("a revision of a builtin model", _model(revision="main"), "remove it, or use an hf:// source"),
    ("an empty revision", _model(source="hf://a/b", revision=""), "should be at least 1 chars long"),
    ("an empty served name", _model(servedName=""), "should be at least 1 chars long"),
    ("an unknown dtype", _model(dtype="fp16"), 'supported values: "auto", "bfloat16", "float16", "float32"'),
    ("a dtype in capitals", _model(dtype="BFLOAT16"), 'supported values: "auto"'),
    ("a restart at no time", _spec(restartedAt="now"), "this is not a time; use a time such as 2026-11-24T08:00:00Z"),
    ("a restart in a thirteenth month", _spec(restartedAt="2026-13-01T00:00:00Z"), "this is not a time"),
    ("a restart without a zone", _spec(restartedAt="2026-11-24T08:00:00"), "this is not a time"),
    ("an adapter of no repository", _adapters(source="hf://org"), "use hf://ORG/NAME, hf://ORG/NAME@REVISION"),
    ("an adapter of a wrong revision", _adapters(source="hf://org/a@../b"), "this is not the source of an adapter"),
    ("an adapter beside the root", _adapters(source="file:///a"), "pvc://CLAIM/PATH or file:///FOLDER/NAME"),
    ("an adapter outside of its claim", _adapters(source="pvc://c/../a"), "the path must not have a part '.' or '..'"),
    ("an adapter in the pods' own folder", _adapters(source="file:///tmp/sql"), "a folder of their own"),
    (
        "an adapter in a folder of the image",
        _adapters(source="file:///usr/local/adapters/sql"),
        "of the engine's image",
    ),
    (
        "an adapter of the nodes where the model's claim is",
        _model(source="pvc://models/a", adapters=[{**_ADAPTER, "source": "file:///models/sql"}]),
        "the claim of the model is mounted at /models",
    ),
    ("an adapter without a name", _adapters(name=""), "spec.model.adapters[0].name in body should match"),
    ("an adapter's name with a blank", _adapters(name="a b"), "spec.model.adapters[0].name in body should match"),
    ("an adapter with the model's name", _adapters(name="bad"), "an adapter has the name of the model"),
    ("an adapter twice", _model(adapters=[_ADAPTER, _ADAPTER]), "Duplicate value"),
    ("no adapters yet on a GPU", {"spec": {**_model(adapters=[])["spec"], "accelerator": {}}}, "work on CPU only"),
    (
        "an adapter beside the device cuda",
        {"spec": {**_args(device="cuda")["spec"], **_adapters()["spec"]}},
        "LoRA adapters work on CPU only",
    ),
    ("an adapter on a GPU", {"spec": {**_adapters()["spec"], "accelerator": {}}}, "LoRA adapters work on CPU only"),
    (
        "an adapter beside a volume of its name",
        {
            "spec": {
                **_adapters()["spec"],
                "podTemplate": {"head": {"spec": {"volumes": [{"name": "adapters-0", "emptyDir": {}}]}}},
            }
        },
        "cannot have the names of the adapters' volumes",
    ),
    ("a draft model without a source", _model(draft={}), "spec.model.draft.source: Required value"),
    ("a draft model that is a string", _model(draft=_MODEL["source"]), "spec.model.draft in body must be of type obj"),
    ("a draft model of an unknown source", _drafted(source="s3://bucket/model"), _SOURCES),
    ("a draft model's revision of no hub", _drafted(revision="main"), "remove it, or use an hf:// source"),
    ("a draft model in int4", _drafted(quantization="int4"), 'supported values: "auto", "none", "int8"'),
    ("a draft model outside of its claim", _drafted(source="pvc://c/../a"), "an empty part, or a part '.' or '..'"),
    ("a draft model outside of its folder", _drafted(source="file:///data/../etc"), "an empty part, or a part '.' or"),
    ("a draft model behind two slashes", _drafted(source="file:///data//d"), "an empty part, or a part '.' or '..'"),
    ("a draft model in the pods' own folder", _drafted(source="file:///tmp"), "a folder of their own"),
    ("a draft model among the keys", _drafted(source="file:///etc/rayloom-keys"), "a folder of their own"),
    ("a draft model in a folder of the image", _drafted(source="file:///usr/lib"), "of the engine's image"),
    (
        "a draft model of the nodes where the model's claim is",
        _model(source="pvc://models/a", draft={"source": "file:///models/d"}),
        "the claim of the model is mounted at /models",
    ),
    (
        "a model of the nodes where the draft model's claim is",
        _model(source="file:///draft-model/m", draft={"source": "pvc://drafts/d"}),
        "the claim of the draft model is mounted at /draft-model",
    ),
    (
        "an adapter of the nodes where the draft model's claim is",
        _model(adapters=[{**_ADAPTER, "source": "file:///draft-model/a"}], draft={"source": "pvc://drafts/d"}),
        "the claim of the draft model is mounted at /draft-model",
    ),
    (
        "an int8 draft model in float16",
        _model(dtype="float16", draft={**_MODEL, "quantization": "int8"}),
        "model.draft.quantization int8 works with model.dtype auto, bfloat16 or float32",
    ),
    (
        "an int8 draft model on a GPU",
        {"spec": {**_drafted(quantization="int8")["spec"], "accelerator": {}}},
        "model.draft.quantization int8 works on CPU only",
    ),
    (
        "an int8 draft model beside the device cuda",
        {"spec": {**_args(device="cuda")["spec"], **_drafted(quantization="int8")["spec"]}},
        "model.draft.quantization int8 works on CPU only",
    ),
    (
        "n-grams beside a draft model",
        {"spec": {**_args(speculation="ngram")["spec"], **_drafted()["spec"]}},
        "engine.args.speculation chooses another kind of drafts",
    ),
    (
        "no drafts beside a draft model",
        {"spec": {**_args(speculation="off")["spec"], **_drafted()["spec"]}},
        "engine.args.speculation chooses another kind of drafts",
    ),
    ("drafts without a draft model", _args(speculation="draft"), "no draft model is named: name it in model.draft"),
    (
        "a draft model beside a volume of its name",
        {
            "spec": {
                **_drafted()["spec"],
                "podTemplate": {"worker": {"spec": {"volumes": [{"name": "draft-model", "emptyDir": {}}]}}},
            }
        },
        "beside model.draft no volume of podTemplate can be called draft-model",
    ),
    ("a LoRA rank of 512", _args(maxLoraRank=512), "should be less than or equal to 256"),
    ("a maxModelLen of 1", _model(maxModelLen=1), "should be greater than or equal to 2"),
    ("a maxModelLen in text", _model(maxModelLen="8k"), "must be of type integer"),
    ("a maxModelLen with a fraction", _model(maxModelLen=8192.5), "must be of type integer"),
    ("vLLM's name of a field", _model(max_model_len=8192), 'unknown field "spec.model.max_model_len"'),
    ("a misspelt field of the model", _model(soruce="x"), 'unknown field "spec.model.soruce"'),
    ("a misspelt part of the spec", _spec(paralelism={"tensor": 2}), 'unknown field "spec.paralelism"'),
    ("a field of a later version", _spec(autoscalingg={}), 'unknown field "spec.autoscalingg"'),
    ("a tensor of 0", _spec(parallelism={"tensor": 0}), "should be greater than or equal to 1"),
    ("a negative pipeline", _spec(parallelism={"pipeline": -2}), "should be greater than or equal to 1"),
    ("a tensor beyond any machine", _spec(parallelism={"tensor": 5000}), "should be less than or equal to 1024"),
    ("a tensor in text", _spec(parallelism={"tensor": "two"}), "must be of type integer"),
    ("parallelism as a number", _spec(parallelism=2), "spec.parallelism in body must be of type object"),
    ("negative replicas", _spec(replicas=-1), "replicas"),
    ("a roll that may move nothing", _spec(rollout={"maxSurge": 0, "maxUnavailable": 0}), "raise one of them"),
    ("replicas in text", _spec(replicas="one"), "must be of type integer"),
    ("a negative drain", _spec(drainSeconds=-1), "should be greater than or equal to 0"),
    ("a drain of days", _spec(drainSeconds=1_000_000), "should be less than or equal to 86400"),
    ("a drain with a unit", _spec(drainSeconds="30s"), "must be of type integer"),
    ("an empty image", _engine(image=""), "should be at least 1 chars long"),
    ("an unknown pull policy", _engine(imagePullPolicy="Sometimes"), 'supported values: "Always"'),
    ("a memory without meaning", _engine(resources={"requests": {"memory": "lots"}}), "memory"),
    ("memory as a number", _engine(resources={"limits": {"memory": 8}}), "must be of type string"),
    ("a negative cpu", _engine(resources={"requests": {"cpu": "-1"}}), "cpu"),
    ("an unknown argument of the engine", _args(gpuMemoryUtilization=0.9), "gpuMemoryUtilization"),
    ("an unknown device", _args(device="tpu"), 'supported values: "auto", "cpu", "cuda"'),
    ("no sequences at once", _args(maxNumSeqs=0), "should be greater than or equal to 1"),
    ("one KV block", _args(numKvBlocks=1), "should be greater than or equal to 2"),
    ("an unknown log level", _args(logLevel="trace"), 'supported values: "debug"'),
    ("Ray without its token", _engine(env=[{"name": "RAY_AUTH_MODE", "value": "disabled"}]), _RESERVED),
    ("another Ray", _engine(env=[{"name": "RAY_ADDRESS", "value": "10.0.0.1:6379"}]), _RESERVED),
    ("another command for Ray", _engine(env=[{"name": "KUBERAY_GEN_RAY_START_CMD", "value": "sh"}]), _RESERVED),
    ("a file of the operator's", _engine(env=[{"name": "RAYLOOM_ALIVE_FILE", "value": "/x"}]), _RESERVED),
    ("257 variables", _engine(env=[{"name": f"A{n}", "value": ""} for n in range(257)]), "must have at most 256 items"),
    ("a variable without a value", _engine(env=[{"name": "A"}]), "value: Required value"),
    ("a variable's value that is a number", _engine(env=[{"name": "A", "value": 1}]), "must be of type string"),
    ("a variable's name with a dash", _engine(env=[{"name": "A-B", "value": "1"}]), "should match"),
    ("a variable twice", _engine(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]), "uplicate"),
    ("variables as a map", _engine(env={"A": "1"}), 'unknown field "spec.engine.env.A"'),
    ("a pod template for no pod", _spec(podTemplate={"spec": {}}), 'unknown field "spec.podTemplate.spec"'),
    ("a pod template of RayClusters", _spec(podTemplate={"headGroupSpec": {}}), "spec.podTemplate.headGroupSpec"),
    ("a whole pod template", _worker(template={"spec": {}}), 'unknown field "spec.podTemplate.worker.spec.template"'),
    ("a misspelt field of a pod", _worker(runtimeClass="nvidia"), "spec.podTemplate.worker.spec.runtimeClass"),
    ("a pod's field in its metadata", _spec(podTemplate={"head": {"metadata": {"name": "x"}}}), "head.metadata.name"),
    ("another end of a pod", _head(terminationGracePeriodSeconds=5), "use spec.drainSeconds"),
    ("a pod that is not restarted", _worker(restartPolicy="Never"), "restartPolicy is the operator's own"),
    ("an account with rights", _worker(serviceAccountName="admin"), "pods use the account NAME-rayloom"),
    ("a token in the pod", _head(automountServiceAccountToken=True), "use a projected volume"),
    ("a chosen node", _worker(nodeName="n1"), "use nodeSelector or affinity"),
    ("a name of the pod's own", _head(hostname="ray"), "hostname is the operator's own"),
    ("the node's processes", _worker(hostPID=True), "hostPID is the operator's own"),
    ("process namespaces apart", _head(shareProcessNamespace=False), "Ray finds its raylet among the processes"),
    ("a pod that ends by itself", _worker(activeDeadlineSeconds=60), "an engine runs until it is replaced"),
    ("a priority as a number", _worker(priority=7), "use priorityClassName"),
    ("another image", _container("engine", image="mine"), "use spec.engine.image"),
    ("another pull policy", _container("ray-worker", imagePullPolicy="Always"), "use spec.engine.imagePullPolicy"),
    ("another command", _container("ray-head", command=["sh"]), "use spec.engine.args for settings of the engine"),
    ("arguments for the engine", _container("engine", args=["--port", "1"]), "use spec.engine.args"),
    ("a port of the engine", _container("engine", ports=[{"containerPort": 9}]), "add a container of your own"),
    ("a probe of the engine", _container("engine", livenessProbe={"tcpSocket": {"port": 1}}), "use spec.recovery"),
    ("another preStop", _container("engine", lifecycle={}), "use spec.drainSeconds for how long a pod may take to end"),
    ("resources of ranks", _container("ray-worker", resources={"limits": {"cpu": "1"}}), "use spec.engine.resources"),
    ("no token by a template", _container("engine", env=[{"name": "RAY_AUTH_MODE", "value": "no"}]), _RESERVED),
    (
        "a Secret as another Ray",
        _container(
            "ray-worker", env=[{"name": "RAY_ADDRESS", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]
        ),
        _RESERVED,
    ),
    (
        "a variable of two values",
        _container(
            "engine", env=[{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
        ),
        "give either value or valueFrom",
    ),
    ("a mount over a folder of ours", _container("engine", **_mount("a", "/etc/rayloom")), "use another mountPath"),
    ("a mount over shared memory", _container("ray-worker", **_mount("a", "/dev/shm")), "use another mountPath"),
    (
        "a mount of the admin token",
        _container("proxy", image="i", **_mount("config", "/x")),
        "add a volume of your own",
    ),
    ("a volume with a name of ours", _head(volumes=[{"name": "ray", "emptyDir": {}}]), "use another name"),
    ("a mount of no volume", _container("engine", **_mount("none", "/x")), "must be the name of a volume"),
    ("ranks in the head pod", _head(containers=[{"name": "ray-worker"}]), "the operator's own there are ray-head and"),
    ("an engine in worker pods", _worker(containers=[{"name": "engine"}]), "the operator's own there is ray-worker"),
    ("a container without an image", _container("proxy"), "a container of your own needs an image"),
    (
        "an init container of KubeRay's",
        _worker(initContainers=[{"name": "wait-gcs-ready", "image": "i"}]),
        "initContainers cannot have a name of the operator's own",
    ),
    ("a container twice", _head(containers=[{"name": "a", "image": "i"}] * 2), "uplicate"),
    ("a volume twice", _worker(volumes=[{"name": "a", "emptyDir": {}}] * 2), "uplicate"),
    ("a label of ours", _labelled("labels", "rayloom.dev/service"), "use another key"),
    ("a label of KubeRay's", _labelled("labels", "ray.io/node-type", "worker"), "use another key"),
    ("the name of the application", _labelled("labels", "app.kubernetes.io/name"), "use another key"),
    ("an annotation of KubeRay's", _labelled("annotations", "ray.io/overwrite-container-cmd"), "use another key"),
    ("a label with a blank", _labelled("labels", "team", "a b"), "should match"),
    ("a label that is a number", _labelled("labels", "team", 7), "must be of type string"),
    (
        "a GPU for the head",
        _spec(
            accelerator={"memory": "80Gi"},
            podTemplate={
                "head": {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}
            },
        ),
        "accelerators are for the ranks",
    ),
    ("an unknown DNS policy", _head(dnsPolicy="Host"), 'supported values: "ClusterFirst"'),
    ("hostNetwork in text", _worker(hostNetwork="true"), "must be of type boolean"),
    ("a user in text", _head(securityContext={"runAsUser": "1000"}), "must be of type integer"),
    (
        "capabilities that are dropped",
        _container("engine", securityContext={"capabilities": {"drop": ["ALL"]}}),
        "drop",
    ),
    ("a spread without a place", _worker(topologySpreadConstraints=[{"maxSkew": 1}]), "topologyKey: Required value"),
    ("an unknown kind of affinity", _head(affinity={"nodeAfinity": {}}), "affinity.nodeAfinity"),
    (
        "required neighbours as a number",
        _head(affinity={"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": 5}}),
        "podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution",
    ),
    (
        "required nodes as a list",
        _worker(affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}),
        "nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
    ),
    ("volumes as a map", _head(volumes={"a": {"emptyDir": {}}}), "spec.podTemplate.head.spec.volumes"),
    ("an unknown user of pods", _spec(podTemplate={"user": "OpenShift"}), 'supported values: "Operator", "Cluster"'),
    ("autoscaling without a maximum", _spec(autoscaling={}), "spec.autoscaling.maxReplicas: Required value"),
    ("autoscaling that is switched on", _spec(autoscaling=True), "spec.autoscaling in body must be of type object"),
    ("bounds in the wrong order", _scaled(minReplicas=5), "minReplicas is more than maxReplicas: lower it, or raise"),
    ("zero engines without a gateway", _scaled(minReplicas=0), "minReplicas 0 needs a gateway that holds requests"),
    ("a negative minimum", _scaled(minReplicas=-1), "spec.autoscaling.minReplicas in body should be greater than or"),
    ("too high a minimum", _scaled(minReplicas=65), "spec.autoscaling.minReplicas in body should be less than or"),
    ("a minimum in text", _scaled(minReplicas="1"), "spec.autoscaling.minReplicas in body must be of type integer"),
    ("a broken minimum", _scaled(minReplicas=1.5), "spec.autoscaling.minReplicas in body must be of type integer"),
    ("a maximum of zero", _scaled(maxReplicas=0), "spec.autoscaling.maxReplicas in body should be greater than or"),
    ("too high a maximum", _scaled(maxReplicas=65), "spec.autoscaling.maxReplicas in body should be less than or"),
    ("a goal without a name", _scaled(goal=2), "spec.autoscaling.goal in body must be of type object"),
    ("a goal of no time", _scaled(goal={"ttftSeconds": 0}), "ttftSeconds is too small; use 0.05 or more"),
    ("a goal of an hour", _scaled(goal={"ttftSeconds": 3600}), "goal.ttftSeconds in body should be less than or equal"),
    ("a goal with a unit", _scaled(goal={"ttftSeconds": "2s"}), "goal.ttftSeconds in body must be of type number"),
    ("a goal of another kind", _scaled(goal={"p99Seconds": 2}), 'unknown field "spec.autoscaling.goal.p99Seconds"'),
    ("an idle time of a moment", _scaled(idleSeconds=1), "autoscaling.idleSeconds in body should be greater than or"),
    ("an idle time in text", _scaled(idleSeconds="5m"), "autoscaling.idleSeconds in body must be of type integer"),
    ("a field of an HPA", _scaled(targetCPUUtilizationPercentage=80), 'unknown field "spec.autoscaling.targetCPU'),
    ("metrics of an HPA", _scaled(metrics=[]), 'unknown field "spec.autoscaling.metrics"'),
    ("a gateway that is a number", _spec(gateway=2), "spec.gateway in body must be of type object"),
    ("a list of gateways", _spec(gateway=[]), "spec.gateway in body must be of type object"),
    ("fewer than no gateways", _gateway(replicas=-1), "use 0 to 16 gateway pods; with 0, clients reach the engines"),
    ("too many gateways", _gateway(replicas=17), "use 0 to 16 gateway pods; with 0, clients reach the engines"),
    ("gateways in text", _gateway(replicas="2"), "spec.gateway.replicas in body must be of type integer"),
    ("a gateway image without a name", _gateway(image=""), "spec.gateway.image in body should be at least 1 chars"),
    ("a gateway image that is a number", _gateway(image=7), "spec.gateway.image in body must be of type string"),
    ("a hold of less than no time", _gateway(holdSeconds=-1), "gateway.holdSeconds in body should be greater than or"),
    ("a hold of weeks", _gateway(holdSeconds=10**6), "spec.gateway.holdSeconds in body should be less than or equal"),
    ("a hold with a unit", _gateway(holdSeconds="5m"), "spec.gateway.holdSeconds in body must be of type integer"),
    ("a hold in another style", _gateway(hold_seconds=5), 'unknown field "spec.gateway.hold_seconds"'),
    ("resources in a list", _gateway(resources=[]), "spec.gateway.resources in body must be of type object"),
    ("a gateway with a GPU", _limited(**{"nvidia.com/gpu": "1"}), "a gateway uses cpu, memory and ephemeral-storage"),
    ("a gateway with much memory", _limited(memory="much"), "gateway.resources.limits.memory in body should match"),
    ("half a core in a number", _limited(cpu=0.5), "spec.gateway.resources.limits.cpu in body must be of type string"),
    (
        "keys that gateway pods do not get",
        _spec(gateway={}, engine={"env": [_KEYS]}),
        "RAYLOOM_API_KEYS does not reach gateway pods, so they would serve everybody",
    ),
    (
        "keys of a template that gateway pods do not get",
        _spec(gateway={}, podTemplate={"head": {"spec": {"containers": [{"name": "engine", "env": [_KEYS]}]}}}),
        "RAYLOOM_API_KEYS does not reach gateway pods, so they would serve everybody",
    ),
    (
        "a key that no Secret can have",
        _spec(auth={"apiKeySecretRef": {"name": "keys", "key": "..data"}}),
        "spec.auth.apiKeySecretRef.key in body should match",
    ),
    ("a gateway's port", _gateway(port=8080), 'unknown field "spec.gateway.port"'),
    ("a name with capitals", _named("Chat"), "lowercase RFC 1123"),
    ("a name with a dot", _named("chat.v1"), _NAME),
    ("a name that begins with a digit", _named("8b"), _NAME),
    ("a name of 41 letters", _named("a" * 41), _NAME),
)
