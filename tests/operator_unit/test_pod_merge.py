"""The strategic merge: examples of each kind of list, and the invariants of every merge."""

from copy import deepcopy

from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.objects.pod_merge import merged


def spec(**fields):
    return {"spec": fields}


def test_maps_merge_field_by_field_and_values_replace():
    base = spec(nodeSelector={"pool": "gpu", "zone": "a"}, priorityClassName="low")
    patch = spec(nodeSelector={"zone": "b"}, priorityClassName="high", runtimeClassName="nvidia")

    assert merged(base, patch) == spec(
        nodeSelector={"pool": "gpu", "zone": "b"}, priorityClassName="high", runtimeClassName="nvidia"
    )


def test_containers_are_found_by_name_and_new_ones_come_last():
    base = spec(containers=[{"name": "ray-head", "image": "a"}, {"name": "engine", "image": "a"}])
    patch = spec(containers=[{"name": "proxy", "image": "p"}, {"name": "engine", "env": [{"name": "A", "value": "1"}]}])

    assert merged(base, patch) == spec(
        containers=[
            {"name": "ray-head", "image": "a"},
            {"name": "engine", "image": "a", "env": [{"name": "A", "value": "1"}]},
            {"name": "proxy", "image": "p"},
        ]
    )


def test_a_variable_is_replaced_whole_because_one_with_value_and_value_from_is_refused():
    base = spec(env=[{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}])
    patch = spec(env=[{"name": "B", "value": "2"}, {"name": "C", "value": "3"}])

    assert merged(base, patch) == spec(
        env=[{"name": "A", "value": "1"}, {"name": "B", "value": "2"}, {"name": "C", "value": "3"}]
    )


def test_mounts_are_found_by_their_path():
    base = spec(volumeMounts=[{"name": "scratch", "mountPath": "/tmp"}])
    patch = spec(volumeMounts=[{"name": "other", "mountPath": "/data"}, {"name": "scratch", "mountPath": "/var"}])

    assert merged(base, patch) == spec(
        volumeMounts=[
            {"name": "scratch", "mountPath": "/tmp"},
            {"name": "other", "mountPath": "/data"},
            {"name": "scratch", "mountPath": "/var"},
        ]
    )


def test_a_spread_of_the_same_place_and_rule_is_changed_and_another_is_added():
    base = spec(
        topologySpreadConstraints=[{"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 1}]
    )
    patch = spec(
        topologySpreadConstraints=[
            {"topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2},
            {"topologyKey": "host", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1},
        ]
    )

    assert merged(base, patch) == patch


def test_tolerations_and_env_from_are_added_to():
    base = spec(tolerations=[{"key": "a"}], containers=[{"name": "c", "envFrom": [{"prefix": "x"}]}])
    patch = spec(tolerations=[{"key": "b"}, {"key": "a"}], containers=[{"name": "c", "envFrom": [{"prefix": "y"}]}])

    assert merged(base, patch) == spec(
        tolerations=[{"key": "a"}, {"key": "b"}],
        containers=[{"name": "c", "envFrom": [{"prefix": "x"}, {"prefix": "y"}]}],
    )


def test_lists_without_a_key_are_replaced():
    base = spec(securityContext={"supplementalGroups": [1], "capabilities": {"drop": ["ALL"]}})
    patch = spec(securityContext={"supplementalGroups": [2], "capabilities": {"add": ["IPC_LOCK"]}})

    assert merged(base, patch) == spec(
        securityContext={"supplementalGroups": [2], "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    )


NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.one_of(st.sampled_from(["x", "y"]), st.integers(0, 3), st.booleans())


def elements(*keys, **values):
    """Lists of elements with the fields `keys`, and perhaps with the fields `values`. No two agree in all of `keys`."""
    element = st.fixed_dictionaries(dict.fromkeys(keys, NAMES), optional=values)
    return st.lists(element, max_size=3, unique_by=lambda each: tuple(each[key] for key in keys))


MAPS = st.dictionaries(NAMES, VALUES, max_size=3)
CONTAINERS = elements(
    "name",
    image=NAMES,
    env=elements("name", value=NAMES),
    envFrom=st.lists(MAPS, max_size=2),
    volumeMounts=elements("mountPath", name=NAMES),
    resources=st.fixed_dictionaries({}, optional={"limits": MAPS, "requests": MAPS}),
)
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries({}, optional={"labels": MAPS, "annotations": MAPS}),
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "containers": CONTAINERS,
                "initContainers": CONTAINERS,
                "volumes": elements("name", emptyDir=MAPS, secret=MAPS),
                "tolerations": st.lists(MAPS, max_size=3),
                "topologySpreadConstraints": elements("topologyKey", "whenUnsatisfiable", maxSkew=st.integers(1, 3)),
                "nodeSelector": MAPS,
                "affinity": st.dictionaries(NAMES, MAPS, max_size=2),
                "priorityClassName": NAMES,
                "hostNetwork": st.booleans(),
            },
        ),
    },
)


@given(TEMPLATES)
def test_merging_nothing_changes_nothing(base):
    assert merged(base, {}) == base
    assert merged(base, {"spec": {}, "metadata": {}}) == {"spec": {}, "metadata": {}} | base


@given(TEMPLATES, TEMPLATES)
def test_merging_twice_is_merging_once_and_the_inputs_stay(base, patch):
    before = deepcopy((base, patch))
    once = merged(base, patch)

    assert merged(once, patch) == once
    assert (base, patch) == before


@given(TEMPLATES, TEMPLATES)
def test_no_name_is_lost_and_those_of_the_base_come_first(base, patch):
    found = merged(base, patch).get("spec", {})
    for kind in ("containers", "initContainers", "volumes"):
        ours, theirs = ([each["name"] for each in part.get("spec", {}).get(kind, ())] for part in (base, patch))
        assert [each["name"] for each in found.get(kind, ())] == [*ours, *(each for each in theirs if each not in ours)]
