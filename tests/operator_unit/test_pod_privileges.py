"""Fields of a pod template that need a setting of the operator, and the name of the setting."""

import pytest

from rayloom_operator.__main__ import main
from rayloom_operator.api.pod_template.privileges import PRIVILEGES, SAFE_SYSCTLS
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.errors import NotAllowed
from rt_operator import make_service

EVERYTHING = Permissions(allowed_in_pod_templates=frozenset({*PRIVILEGES, "IPC_LOCK", "NET_ADMIN"}), host_paths=("/",))


NOTHING = Permissions()


def problems(permissions=NOTHING, **spec):
    try:
        permissions.check(make_service(**spec))
    except NotAllowed as error:
        return error.problems
    return ()


def worker(**spec):
    return {"podTemplate": {"worker": {"spec": spec}}}


def ranks(**fields):
    return worker(containers=[{"name": "ray-worker", **fields}])


def other(kind="containers", **fields):
    return worker(**{kind: [{"name": "proxy", "image": "i", **fields}]})


def annotated(key, value):
    return {"podTemplate": {"worker": {"metadata": {"annotations": {key: value}}}}}


def mounting(**mount):
    part = {"name": "proxy", "image": "i", "volumeMounts": [{"name": "a", "mountPath": "/a", **mount}]}
    return worker(volumes=[{"name": "a", "emptyDir": {}}], containers=[part])


def of_kind(kind):
    return worker(volumes=[{"name": "a", kind: {}}])


HTTP, TCP = ({"httpGet": {"port": 80, "host": "h"}}, {"tcpSocket": {"port": 80, "host": "h"}})
APP_ARMOR = "container.apparmor.security.beta.kubernetes.io/proxy"
# Kinds of Kubernetes' VolumeSource, including removed kinds.
RESTRICTED_VOLUMES = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
)
OTHER_VOLUMES = (
    *("awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "fc", "flexVolume", "flocker"),
    *("gcePersistentDisk", "gitRepo", "glusterfs", "iscsi", "nfs", "photonPersistentDisk", "portworxVolume"),
    *("quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume", "local", "a-kind-to-come"),
)
CASES = [
    (worker(hostNetwork=True), "hostNetwork", "hostNetwork"),
    (worker(hostIPC=True), "hostIPC", "hostIPC"),
    (worker(securityContext={"runAsUser": 0}), "securityContext.runAsUser", "root"),
    (worker(securityContext={"runAsNonRoot": False}), "securityContext.runAsNonRoot", "root"),
    (
        worker(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        "securityContext.seccompProfile",
        "privileged",
    ),
    (
        ranks(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}),
        "containers[0].securityContext.capabilities.add[0]",
        "IPC_LOCK",
    ),
    (
        ranks(securityContext={"capabilities": {"add": ["CAP_NET_ADMIN"]}}),
        "containers[0].securityContext.capabilities.add[0]",
        "NET_ADMIN",
    ),
    (ranks(securityContext={"privileged": True}), "containers[0].securityContext.privileged", "privileged"),
    (
        other(securityContext={"allowPrivilegeEscalation": True}),
        "containers[0].securityContext.allowPrivilegeEscalation",
        "privileged",
    ),
    (other(securityContext={"procMount": "Unmasked"}), "containers[0].securityContext.procMount", "privileged"),
    (
        other(securityContext={"appArmorProfile": {"type": "Unconfined"}}),
        "containers[0].securityContext.appArmorProfile",
        "privileged",
    ),
    (
        other(securityContext={"seLinuxOptions": {"type": "spc_t"}}),
        "containers[0].securityContext.seLinuxOptions",
        "privileged",
    ),
    (other(ports=[{"containerPort": 1, "hostPort": 1}]), "containers[0].ports[0].hostPort", "hostPorts"),
    *((of_kind(kind), f"volumes[0].{kind}", "volumes") for kind in OTHER_VOLUMES),
    (
        worker(securityContext={"sysctls": [{"name": SAFE_SYSCTLS[0]}, {"name": "kernel.msgmax", "value": "1"}]}),
        "securityContext.sysctls[1]",
        "privileged",
    ),
    (worker(securityContext={"sysctls": [{"value": "1"}]}), "securityContext.sysctls[0]", "privileged"),
    (
        worker(securityContext={"appArmorProfile": {"type": "unconfined"}}),
        "securityContext.appArmorProfile",
        "privileged",
    ),
    (
        other(securityContext={"seccompProfile": {"type": "Anything"}}),
        "containers[0].securityContext.seccompProfile",
        "privileged",
    ),
    (
        other(securityContext={"seLinuxOptions": {"user": "system_u"}}),
        "containers[0].securityContext.seLinuxOptions",
        "privileged",
    ),
    (
        mounting(mountPropagation="Bidirectional"),
        "containers[0].volumeMounts[0].mountPropagation",
        "privileged",
    ),
    (other(livenessProbe=HTTP), "containers[0].livenessProbe.httpGet.host", "hostNetwork"),
    (other(readinessProbe=TCP), "containers[0].readinessProbe.tcpSocket.host", "hostNetwork"),
    (other("initContainers", startupProbe=HTTP), "initContainers[0].startupProbe.httpGet.host", "hostNetwork"),
    (other(lifecycle={"preStop": HTTP}), "containers[0].lifecycle.preStop.httpGet.host", "hostNetwork"),
    (other(lifecycle={"postStart": TCP}), "containers[0].lifecycle.postStart.tcpSocket.host", "hostNetwork"),
    (
        other("initContainers", securityContext={"runAsUser": 0}),
        "initContainers[0].securityContext.runAsUser",
        "root",
    ),
]


@pytest.mark.parametrize(("spec", "field", "privilege"), CASES)
def test_each_field_needs_the_setting_that_the_message_names(spec, field, privilege):
    assert problems(**spec) == (
        f"spec.podTemplate.worker.spec.{field}: this needs {privilege}, and this operator allows nothing of the kind: "
        f"remove it, or let whoever runs the operator add {privilege} to podTemplate.allow",
    )
    assert problems(Permissions(allowed_in_pod_templates=frozenset({privilege})), **spec) == ()
    (found,) = problems(Permissions(allowed_in_pod_templates=EVERYTHING.allowed_in_pod_templates - {privilege}), **spec)
    assert "and this operator allows IPC_LOCK" in found or privilege == "IPC_LOCK"


@pytest.mark.parametrize(
    "spec",
    [
        worker(hostNetwork=False, hostIPC=False, hostUsers=False),
        worker(securityContext={"runAsUser": 1001, "runAsNonRoot": True, "seccompProfile": {"type": "Localhost"}}),
        ranks(securityContext={"readOnlyRootFilesystem": False, "privileged": False}),
        ranks(securityContext={"seLinuxOptions": {"level": "s0:c1,c2", "type": "container_t"}}),
        other(ports=[{"containerPort": 9000}]),
        other(),
        *(of_kind(kind) for kind in RESTRICTED_VOLUMES),
        worker(securityContext={"sysctls": [{"name": name, "value": "1"} for name in SAFE_SYSCTLS]}),
        worker(securityContext={"runAsGroup": 0, "fsGroup": 0, "supplementalGroups": [0]}),
        worker(hostUsers=True),
        mounting(mountPropagation="HostToContainer", subPath="a"),
        annotated(APP_ARMOR, "runtime/default"),
        annotated(APP_ARMOR, "localhost/mine"),
        annotated("seccomp.security.alpha.kubernetes.io/pod", "docker/default"),
        annotated("example.com/profile", "unconfined"),
        other(securityContext={"procMount": "Default", "appArmorProfile": {"type": "RuntimeDefault"}}),
        other(livenessProbe={"httpGet": {"port": 80, "httpHeaders": [{"name": "Host", "value": "h"}]}}),
        other(livenessProbe={"tcpSocket": {"port": 80, "host": ""}}, lifecycle={"preStop": {"sleep": {"seconds": 1}}}),
        # Kubernetes itself refuses these values, so the operator need not refuse them.
        other(livenessProbe={"httpGet": 5}, lifecycle={"preStop": [1]}),
    ],
)
def test_fields_that_restricted_pod_security_accepts_need_no_setting(spec):
    assert problems(**spec) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (APP_ARMOR, "unconfined"),
        (APP_ARMOR, ""),
        ("seccomp.security.alpha.kubernetes.io/pod", "unconfined"),
        ("container.seccomp.security.alpha.kubernetes.io/proxy", "unconfined"),
    ],
)
def test_a_profile_in_an_annotation_needs_the_same_setting(key, value):
    (found,) = problems(**annotated(key, value))

    assert found.startswith(f"spec.podTemplate.worker.metadata.annotations[{key}]: this needs privileged,")
    assert problems(Permissions(allowed_in_pod_templates=frozenset({"privileged"})), **annotated(key, value)) == ()


@pytest.mark.parametrize("path", ["models/a", ["/models"], ""])
def test_a_host_path_must_be_absolute(path):
    (found,) = problems(Permissions(host_paths=("/",)), **worker(volumes=[{"name": "a", "hostPath": {"path": path}}]))

    assert found.endswith("is no path on nodes; give one that begins with /")


def test_a_host_path_of_any_volume_needs_the_setting():
    spec = worker(volumes=[{"name": "ok", "emptyDir": {}}, {"name": "etc", "hostPath": {"path": "/etc"}}])
    (found,) = problems(**spec)

    assert found.startswith(
        "spec.podTemplate.worker.spec.volumes[1].hostPath.path: '/etc' is a path on nodes, and this"
    )
    assert problems(Permissions(host_paths=("/etc",)), **spec) == ()
    assert (
        "'..' in it"
        in problems(
            Permissions(host_paths=("/models",)),
            **worker(volumes=[{"name": "a", "hostPath": {"path": "/models/../etc"}}]),
        )[0]
    )


def test_a_template_cannot_send_the_token_to_a_hub_of_its_own():
    spec = ranks(env=[{"name": "HF_ENDPOINT", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}])
    model = {"source": "hf://a/b", "tokenSecretRef": {"name": "hub", "key": "token"}}
    (found,) = problems(model=model, **spec)

    assert found.startswith(
        "spec.podTemplate.worker.spec.containers[0].env[0]: the token of tokenSecretRef would be sent"
    )
    assert problems(model={"source": "hf://a/b"}, **spec) == ()
    # A container that the user adds gets no token, so it may have any HF_ENDPOINT.
    assert problems(model=model, **other(env=[{"name": "HF_ENDPOINT", "value": "https://hub.example"}])) == ()


@pytest.mark.parametrize("value", ["hostnetwork", "ipc_lock", "IPC-LOCK"])
def test_an_unknown_privilege_in_a_flag_is_refused_by_name(value, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--engine-image", "i", "--key-file", "k", "--allow-in-pod-templates", f"root,{value}"])

    assert f"{value!r} is nothing that can be allowed; use hostIPC, hostNetwork" in capsys.readouterr().err
