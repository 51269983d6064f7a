"""What in a pod template needs a setting of the operator, by which name, and in which field."""

import pytest

from rayloom_operator.__main__ import main
from rayloom_operator.errors import NotAllowed
from rayloom_operator.permissions import Permissions
from rayloom_operator.pod_privileges import PRIVILEGES
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
    (
        other("initContainers", securityContext={"runAsUser": 0}),
        "initContainers[0].securityContext.runAsUser",
        "root",
    ),
]


@pytest.mark.parametrize(("spec", "field", "privilege"), CASES)
def test_each_needs_the_setting_that_the_message_names(spec, field, privilege):
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
    ],
)
def test_what_restricted_pods_may_needs_none(spec):
    assert problems(**spec) == ()


def test_a_path_of_the_nodes_is_one_wherever_it_is_named():
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


def test_a_hubs_token_goes_to_no_hub_of_the_templates_own():
    spec = ranks(env=[{"name": "HF_ENDPOINT", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}])
    model = {"source": "hf://a/b", "tokenSecretRef": {"name": "hub", "key": "token"}}
    (found,) = problems(model=model, **spec)

    assert found.startswith(
        "spec.podTemplate.worker.spec.containers[0].env[0]: the token of tokenSecretRef would be sent"
    )
    assert problems(model={"source": "hf://a/b"}, **spec) == ()
    # Another container has no token.
    assert problems(model=model, **other(env=[{"name": "HF_ENDPOINT", "value": "https://hub.example"}])) == ()


@pytest.mark.parametrize("value", ["hostnetwork", "ipc_lock", "IPC-LOCK"])
def test_a_flag_that_cannot_be_used_is_named(value, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--engine-image", "i", "--key-file", "k", "--allow-in-pod-templates", f"root,{value}"])

    assert f"{value!r} is nothing that can be allowed; use hostIPC, hostNetwork" in capsys.readouterr().err
