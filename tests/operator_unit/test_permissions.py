"""Host paths and a user's own hub need a setting of the operator.

Without this setting, such specs are refused, and running engines stay.
"""

from dataclasses import replace

import pytest

import rt_world
from rayloom_operator.__main__ import main
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.errors import NotAllowed
from rt_fake_kube import FakeKube
from rt_operator import SETTINGS, make_service
from rt_world import SERVICE, known, service, with_world

NOTHING = Permissions()
HUB = {"source": "hf://acme/tiny"}
SECRET = {"name": "hub", "key": "token"}
ENDPOINT = {"env": [{"name": "A", "value": "1"}, {"name": "HF_ENDPOINT", "value": "https://hub.example"}]}


def problems(permissions=NOTHING, **spec):
    try:
        permissions.check(make_service(**spec))
    except NotAllowed as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ({"source": "file:///srv"}, "spec.model.source: '/srv' is a path on nodes"),
        (HUB | {"cache": {"hostPath": "/var/lib/kubelet"}}, "spec.model.cache.hostPath: '/var/lib/kubelet' is a path"),
    ],
)
def test_by_default_no_path_of_a_node_is_mounted(model, field):
    (problem,) = problems(model=model)

    assert problem.startswith(field)
    assert "this operator allows none" in problem and "set allowHostPaths" in problem
    assert problems(Permissions(host_paths=("/",)), model=model) == ()


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("/models", True),
        ("/models/", True),
        ("/models/a/b.gguf", True),
        ("//models/a", True),
        ("/data/hub/x", True),
        ("/models2", False),
        ("/data", False),
        ("//", False),
        ("/models/../etc", False),
        ("/models/..", False),
        ("/etc/models", False),
    ],
)
def test_a_list_allows_its_folders_and_their_contents(path, is_allowed):
    model = HUB | {"cache": {"hostPath": path}}
    found = problems(Permissions(host_paths=("/models", "/data/hub/")), model=model)

    assert (found == ()) is is_allowed


def test_a_token_goes_to_no_hub_of_the_manifests_own():
    model = HUB | {"tokenSecretRef": SECRET}
    (problem,) = problems(model=model, engine=ENDPOINT)

    assert problem.startswith("spec.engine.env[1]: the token of tokenSecretRef would be sent to HF_ENDPOINT")
    assert problems(Permissions(hub_endpoints=True), model=model, engine=ENDPOINT) == ()
    assert problems(model=HUB, engine=ENDPOINT) == ()
    assert problems(model=model) == ()


@pytest.mark.parametrize("value", ["models", "/models/../etc", "/a,b"])
def test_a_flag_that_cannot_be_used_is_named(value, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--engine-image", "i", "--key-file", "k", "--allow-host-paths", value])

    assert "write whole paths" in capsys.readouterr().err


ALLOWED, FORBIDDEN = {"source": "file:///models/x"}, {"source": "file:///srv"}


def test_no_pod_mounts_a_path_that_is_not_allowed():
    async def story(world):
        world.ask_for(service(model=FORBIDDEN))
        await world.until(lambda: world.reason("Accepted") == "NotAllowed")
        await world.rest()
        assert world.reason() == "NotAllowed"
        assert world.message().startswith("spec.model.source: '/srv' is a path on nodes")
        assert world.kube.named("Job") == world.kube.named("RayCluster") == []

    with_world(story)


def test_running_engines_stay_when_the_setting_changes(monkeypatch):
    kube = FakeKube()

    async def allowed(world):
        world.ask_for(service(model=ALLOWED) | known(ALLOWED["source"]))
        await world.until(lambda: kube.named("RayCluster"))
        await world.rest()

    async def forbidden(world):
        made, before = kube.named("RayCluster"), len(kube.calls)
        world.ask_for(kube.objects[SERVICE])
        await world.until(lambda: world.reason("Accepted") == "NotAllowed")
        await world.rest()
        assert kube.named("RayCluster") == made != []
        assert [path for verb, path in kube.calls[before:] if verb == "delete"] == []

    with_world(allowed, kube=kube)
    monkeypatch.setattr(rt_world, "SETTINGS", replace(SETTINGS, permissions=Permissions()))
    with_world(forbidden, kube=kube)
