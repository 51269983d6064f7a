"""Certificates of engines and gateway pods: renewal, the names for which they are valid, and files in pods."""

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.changes.gateway import gateway_objects
from rayloom_operator.decide.changes.plan import plan
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.decision import decide
from rayloom_operator.decide.llmgateway.plan import wanted_objects
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
from rayloom_operator.objects.engine_config import pod_engine_config
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.objects.tls.certificates import LIFE, PERIOD, Owner, certificate_files
from rayloom_operator.objects.tls.tls_secrets import service_secrets
from rayloom_operator.observe.observed import Verdict
from rayloom_operator.resolve.revision import revision
from rayloom_operator.times import Now
from rt_llmgateway import make_gateway_document
from rt_operator import CLOCK, SETTINGS, make_resolved, make_service, make_serving, turn

KEY, OLD_KEY = b"k" * 16, b"o" * 16
NOW = datetime(2026, 11, 26, 5, 30, tzinfo=UTC)
ENGINE = Owner("engine", "chat-engines.team.svc", "uid-1")
GATEWAY = Owner("gateway", "chat-gateway.team.svc", "uid-1")
BEHIND = make_resolved(gateway={"replicas": 2})
TLS = replace(SETTINGS, pod_tls="permissive")
TIMES = st.datetimes(datetime(2025, 1, 1), datetime(2090, 1, 1)).map(lambda time: time.replace(tzinfo=UTC))


def certificate(files):
    return x509.load_pem_x509_certificate(files.cert.encode())


def authorities(files):
    return x509.load_pem_x509_certificates(files.ca.encode())


def decided(settings, resolved=BEHIND):
    """(kind, name) -> object of the gateway. Names of Secrets are without hashes."""
    before = turn(resolved, [make_serving(resolved)]).document
    situation = turn(resolved, [make_serving(resolved)], previous=before).situation
    found = gateway_objects(replace(situation, settings=settings), resolved)
    return {(each["kind"], each["metadata"]["name"].removesuffix(hash_of(each))): each for each in found}


def hash_of(manifest):
    return manifest["metadata"]["name"][-9:] if manifest["kind"] == "Secret" else "no hash"


def secrets_of(pod):
    sources = [each for volume in pod["volumes"] for each in volume.get("projected", {}).get("sources", ())]
    return {
        each["secret"]["name"]: [item["path"] for item in each["secret"]["items"]]
        for each in sources
        if "secret" in each
    }


@given(time=TIMES, uid=st.uuids().map(str))
def test_at_any_time_a_certificate_is_valid_for_twenty_days_more(time, uid):
    owner = replace(ENGINE, uid=uid)
    found = certificate(certificate_files(KEY, b"", owner, time))
    assert found.not_valid_before_utc <= time - timedelta(days=1)
    assert found.not_valid_after_utc >= time + LIFE - PERIOD
    assert certificate_files(KEY, b"", owner, time + PERIOD) != certificate_files(KEY, b"", owner, time)


def test_equal_keys_and_owners_give_equal_files_so_nothing_is_kept():
    first = certificate_files(KEY, b"", ENGINE, NOW)
    begin = certificate(first).not_valid_before_utc + timedelta(days=1)
    assert begin <= NOW < begin + PERIOD
    assert certificate_files(KEY, b"", ENGINE, begin) == first
    assert certificate_files(KEY, b"", ENGINE, begin + PERIOD - timedelta(seconds=1)) == first
    assert certificate_files(KEY, b"", ENGINE, begin - timedelta(seconds=1)) != first
    others = [replace(ENGINE, uid="uid-2"), replace(ENGINE, name="other-engines.team.svc"), GATEWAY]
    made = [certificate_files(KEY, b"", owner, NOW) for owner in others] + [
        certificate_files(OLD_KEY, b"", ENGINE, NOW)
    ]
    assert len({first.cert, *(each.cert for each in made)}) == 5


def test_services_renew_at_different_times():
    begins = {
        certificate(certificate_files(KEY, b"", replace(ENGINE, uid=f"uid-{number}"), NOW)).not_valid_before_utc
        for number in range(50)
    }
    assert len(begins) == 50
    assert max(begins) - min(begins) < PERIOD


def test_an_engines_certificate_is_no_gateways():
    for owner, usage in ((ENGINE, ExtendedKeyUsageOID.SERVER_AUTH), (GATEWAY, ExtendedKeyUsageOID.CLIENT_AUTH)):
        found = certificate(certificate_files(KEY, b"", owner, NOW))
        assert list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [usage]
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [owner.name]
        assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_previous_ca_signs_until_it_is_removed_and_both_are_trusted():
    before, during, after = (
        certificate_files(*keys, ENGINE, NOW) for keys in ((OLD_KEY, b""), (KEY, OLD_KEY), (KEY, b""))
    )
    [old], [new, still], [last] = map(authorities, (before, during, after))
    assert (still.subject, last.subject) == (old.subject, new.subject)
    assert old.subject != new.subject
    certificate(during).verify_directly_issued_by(old)
    certificate(after).verify_directly_issued_by(new)


def test_the_private_keys_are_not_the_operators_key():
    files = certificate_files(KEY, b"", ENGINE, NOW)
    assert base64.b64encode(KEY).decode().rstrip("=") not in files.key
    assert certificate_files(KEY, b"", ENGINE, NOW + PERIOD).key != files.key


def test_off_means_that_nothing_is_different():
    assert [kind for kind, _ in decided(SETTINGS)].count("Secret") == 1
    deployment = decided(SETTINGS)["Deployment", "chat-gateway"]
    assert "tls" not in json.dumps(deployment)
    assert "tls" not in json.dumps([pod_engine_config(BEHIND), ray_cluster(BEHIND, "abcd")])


@pytest.mark.parametrize("mode", ["permissive", "strict"])
def test_each_file_that_a_configuration_names_is_in_a_secret_of_the_pod(mode):
    made = decided(replace(TLS, pod_tls=mode))
    pod = made["Deployment", "chat-gateway"]["spec"]["template"]
    config = json.loads(pod["metadata"]["annotations"]["rayloom.dev/gateway-config"])
    secret = made["Secret", "chat-gateway-tls"]
    assert secrets_of(pod["spec"])[secret["metadata"]["name"]] == ["tls/tls.crt", "tls/tls.key", "tls/ca.crt"]
    assert {name: config[name] for name in config if name.startswith("tls_")} == {
        "tls_cert_file": "/etc/rayloom/tls/tls.crt",
        "tls_key_file": "/etc/rayloom/tls/tls.key",
        "tls_ca_file": "/etc/rayloom/tls/ca.crt",
        "tls_mode": mode,
        "tls_server_suffix": ".team.svc",
    }
    resolved = replace(BEHIND, has_tls=True)
    head = ray_cluster(resolved, "abcd")["spec"]["headGroupSpec"]["template"]["spec"]
    engines = made["Secret", "chat-engines-tls"]["metadata"]["name"]
    assert secrets_of(head)[engines] == ["tls/tls.crt", "tls/tls.key", "tls/ca.crt"]
    document = pod_engine_config(resolved)
    assert document["front_tls_key_file"] == "/etc/rayloom/tls/tls.key"
    assert document["front_tls_mode"] == "permissive", "a change of podTLS must not need other engines"
    assert secret["type"] == "kubernetes.io/tls"
    assert base64.b64decode(secret["data"]["tls.crt"]).startswith(b"-----BEGIN CERTIFICATE-----")


def test_tls_starts_no_rollout():
    assert revision(replace(BEHIND, has_tls=True)) == revision(BEHIND)


def test_an_engine_without_a_port_for_gateways_has_no_certificate():
    alone = replace(make_resolved(), has_tls=True)
    assert "tls" not in json.dumps([pod_engine_config(alone), ray_cluster(alone, "abcd")])
    assert decided(TLS, make_resolved()) == {}


def test_a_new_engine_gets_the_certificate_and_a_running_one_is_not_changed():
    before = turn(BEHIND).document
    situation = turn(BEHIND, previous=before).situation
    wanted = {each["kind"]: each for each in plan(replace(situation, settings=TLS)).wanted}
    head = wanted["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    assert [name for name in secrets_of(head) if name.startswith("chat-engines-tls-")]
    assert "front_tls_cert_file" in json.loads(wanted["ConfigMap"]["data"]["config.json"])


@pytest.mark.parametrize("reason", [Reason.INVALID_SPEC, Reason.NOT_ALLOWED])
def test_running_engines_get_new_certificates_while_the_spec_cannot_be_used(reason):
    serving = turn(BEHIND, [make_serving(BEHIND)])
    situation = turn(BEHIND, [make_serving(BEHIND)], previous=serving.document).situation
    refused = replace(
        situation, settings=TLS, resolved=None, step=None, accepted=Verdict(reason=reason, message="changed")
    )
    later = replace(refused, now=Now(CLOCK + PERIOD, 0.0))
    now_made, later_made = (
        {each["metadata"]["name"]: each for each in decide(each).plan.wanted if each["kind"] == "Secret"}
        for each in (refused, later)
    )
    certificates = [name for name in later_made if "-tls-" in name]
    assert sorted(name[:-9] for name in certificates) == ["chat-engines-tls", "chat-gateway-tls"]
    assert now_made.keys() == later_made.keys()
    assert all(now_made[name] != later_made[name] for name in certificates), "a month later, the certificates are new"

    without = replace(refused, settings=SETTINGS)
    assert not [each for each in decide(without).plan.wanted if each["kind"] == "Secret"]


def test_an_llmgateway_has_a_certificate_of_its_own():
    gateway = parse_gateway(make_gateway_document())
    situation = GatewaySituation(
        now=Now(CLOCK, 0.0), settings=TLS, generation=1, previous={}, gateway=gateway, accepted=VALID
    )
    made = wanted_objects(situation)
    [secret] = [each for each in made if each["kind"] == "Secret" and "-tls-" in each["metadata"]["name"]]
    [deployment] = [each for each in made if each["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]
    assert secrets_of(pod["spec"])[secret["metadata"]["name"]] == ["tls/tls.crt", "tls/tls.key", "tls/ca.crt"]
    config = json.loads(pod["metadata"]["annotations"]["rayloom.dev/gateway-config"])
    assert (config["tls_mode"], config["tls_server_suffix"]) == ("permissive", ".team.svc")
    off = replace(situation, settings=SETTINGS)
    assert not [each for each in wanted_objects(off) if "-tls-" in each["metadata"]["name"]]


def test_a_secret_is_renewed_with_its_period():
    service = make_service(gateway={})
    first, later = (service_secrets(service, KEY, b"", NOW + days) for days in (timedelta(), PERIOD))
    for before, after in zip(first, later, strict=True):
        assert before["metadata"] == after["metadata"]
        assert before["data"] != after["data"]
        assert before["metadata"]["labels"]["rayloom.dev/renewed"] == "true"
