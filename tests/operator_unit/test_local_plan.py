"""The documents of several local engines and their gateway, the split of accelerators, and the back-off."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.local.plan import Ports, plan_processes, replicas_problem, visible_devices
from rayloom_operator.local.restarts import Restarts
from rt_operator import make_service

FOLDER = Path("/run-folder")
GATEWAY = Ports(host="0.0.0.0", port=8000, admin_port=8001)
ENGINES = tuple(Ports(host="127.0.0.1", port=p, admin_port=p + 1, front_port=p + 2) for p in (9000, 9010))


def plans(devices=(), engines=ENGINES, **spec):
    service = make_service(replicas=len(engines), **spec)
    return plan_processes(service, folder=FOLDER, gateway=GATEWAY, engines=engines, devices=devices)


def test_the_gateway_has_the_users_ports_and_the_engines_have_their_own_on_loopback():
    *engines, gateway = plans(drainSeconds=7)

    assert [(plan.name, plan.command) for plan in engines] == [("engine-0", "serve"), ("engine-1", "serve")]
    names = ("host", "port", "admin_port", "front_host", "front_port", "front_key_file", "engines_on_host")
    assert [engines[1].document[name] for name in names] == [
        "127.0.0.1", 9010, 9011, "127.0.0.1", 9012, "/run-folder/key", 2
    ]  # fmt: skip
    assert (gateway.name, gateway.command) == ("gateway", "gateway")
    assert gateway.document == {
        "served_model_name": "chat",
        "host": "0.0.0.0",
        "port": 8000,
        "admin_host": "127.0.0.1",
        "admin_port": 8001,
        "ui": True,
        "drain_seconds": 7,
        "engines": {"engine-0": "127.0.0.1:9002", "engine-1": "127.0.0.1:9012"},
        "key_file": "/run-folder/key",
        "cache_dir": "/run-folder/texts",
    }


def test_each_engine_gets_as_many_accelerators_as_it_has_ranks():
    *engines, gateway = plans(devices=("3", "1", "0", "2", "7"), parallelism={"tensor": 2})

    assert [plan.environment for plan in engines] == [
        {"CUDA_VISIBLE_DEVICES": "3,1"},
        {"CUDA_VISIBLE_DEVICES": "0,2"},
    ]
    assert gateway.environment == {}


def test_ranks_share_accelerators_only_if_local_is_given_a_number():
    service = make_service(replicas=2, parallelism={"tensor": 2, "pipeline": 2})
    *engines, gateway = plan_processes(
        service, folder=FOLDER, gateway=GATEWAY, engines=ENGINES, devices=("3", "1", "0", "2", "7"), ranks_per_gpu=2
    )

    assert [plan.environment for plan in engines] == [
        {"CUDA_VISIBLE_DEVICES": "3,1"},
        {"CUDA_VISIBLE_DEVICES": "0,2"},
    ]
    assert [plan.document.get("ranks_per_gpu") for plan in (*engines, gateway)] == [2, 2, None]
    assert [plan.document.get("ranks_per_gpu") for plan in plans()] == [None, None, None]
    assert replicas_problem(service, tuple("0123"), ranks_per_gpu=2) is None
    assert "need 2 accelerators each, and this machine has 3; use at most 1 replicas" in (
        replicas_problem(service, tuple("012"), ranks_per_gpu=2) or ""
    )


def test_engines_on_a_cpu_get_no_accelerator():
    assert [plan.environment for plan in plans(devices=("0",), engine={"args": {"device": "cpu"}})] == [{}, {}, {}]
    assert [plan.environment for plan in plans()] == [{}, {}, {}]


@given(
    num_devices=st.integers(0, 12),
    num_engines=st.integers(2, 5),
    tensor=st.integers(1, 3),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
)
def test_no_accelerator_is_given_twice_and_too_few_are_refused(num_devices, num_engines, tensor, device):
    devices = tuple(map(str, range(num_devices)))
    spec = {"parallelism": {"tensor": tensor}, "engine": {"args": {"device": device}}}
    problem = replicas_problem(make_service(replicas=num_engines, **spec), devices)
    uses_devices = device == "cuda" or (device == "auto" and num_devices > 0)

    assert (problem is not None) == (uses_devices and num_engines * tensor > num_devices)
    if problem is None:
        *engines, _ = plans(devices, tuple(ENGINES[0] for _ in range(num_engines)), **spec)
        given = [plan.environment["CUDA_VISIBLE_DEVICES"].split(",") for plan in engines if plan.environment]
        assert [len(names) for names in given] == ([tensor] * num_engines if uses_devices else [])
        assert [name for names in given for name in names] == list(
            devices[: tensor * num_engines] if uses_devices else ()
        )


@pytest.mark.parametrize(
    ("spec", "devices", "sentence"),
    [
        ({"replicas": 0}, (), "spec.replicas: 0 suspends the service; use 1 or more to serve it on this machine"),
        (
            {"replicas": 3, "parallelism": {"tensor": 2, "pipeline": 2}},
            tuple("01234567"),
            "spec.replicas: 3 engines need 4 accelerators each, and this machine has 8; use at most 2 replicas, set "
            "spec.engine.args.device to cpu, or let 2 ranks of an engine share an accelerator by --ranks-per-gpu 2, "
            "which is slow",
        ),
        (
            {"replicas": 2, "parallelism": {"tensor": 3, "pipeline": 2}},
            ("0", "1"),
            "spec.replicas: 2 engines need 6 accelerators each, and this machine has 2; use a machine with more of "
            "them, set spec.engine.args.device to cpu, or let 6 ranks of an engine share an accelerator by "
            "--ranks-per-gpu 6, which is slow",
        ),
        (
            {"replicas": 3, "parallelism": {"tensor": 2}},
            ("0", "1"),
            "spec.replicas: 3 engines need 2 accelerators each, and this machine has 2; use at most 1 replicas, or set "
            "spec.engine.args.device to cpu",
        ),
        (
            {"replicas": 2, "engine": {"args": {"device": "cuda"}}},
            (),
            "spec.replicas: 2 engines need an accelerator each, and this machine has 0; use a machine with more of "
            "them, or set spec.engine.args.device to cpu",
        ),
        # A single engine starts as usual, and reports the missing device itself.
        ({"replicas": 1, "engine": {"args": {"device": "cuda"}}}, (), None),
    ],
)
def test_a_number_of_replicas_that_cannot_run_here_is_refused_with_the_cure(spec, devices, sentence):
    assert replicas_problem(make_service(**spec), devices) == sentence


@pytest.mark.parametrize(
    ("setting", "num_present", "names"),
    [
        (None, 2, ("0", "1")),
        (None, 0, ()),
        ("1, GPU-5", 4, ("1", "GPU-5")),
        ("", 2, ()),
        ("2,-1,3", 4, ("2",)),
        ("0", 0, ()),
    ],
)
def test_the_environment_limits_the_accelerators_as_in_cuda(setting, num_present, names):
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}

    assert visible_devices(environment, num_present) == names


def test_the_back_off_is_that_of_a_cluster_and_forgets_after_ten_minutes_of_service():
    restarts = Restarts(make_service(recovery={"restartBudget": 3}).spec.recovery)

    assert [restarts.ended(served_s=0.0) for _ in range(3)] == [0, 10, 20]
    assert not restarts.is_spent
    assert restarts.ended(served_s=599.0) == 300
    assert restarts.is_spent
    assert restarts.ended(served_s=600.0) == 0
    assert not restarts.is_spent
