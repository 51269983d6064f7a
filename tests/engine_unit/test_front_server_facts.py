"""Small endpoints of vLLM (/ping, /load, /server_info, /tokenizer_info), vLLM's names of metrics, and root_path."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.core_link import engine_link
from rayloom_engine.front.operations.metrics import OF_VLLM, Metrics
from rayloom_engine.front.operations.server_info import shown_config, shown_environment
from rt_byte_model import TEMPLATE
from rt_fake_core import say
from rt_front import MODEL, FrontUnderTest, running_front

KEY = {"Authorization": "Bearer key-a"}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    folder = tmp_path_factory.mktemp("front")
    with running_front(folder, api_keys=("key-a",), root_path="/llm", metrics_prefix="vllm") as front:
        front.do(lambda: setattr(front.core, "script", say("one")))
        yield front


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_the_path_in_front_of_the_api_may_be_left_out_but_never_the_key(front: FrontUnderTest, prefix: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1/chat/completions", "/tokenize"):
        assert front.http.post(prefix + path, json=body).status_code == 401
        assert front.http.post(prefix + path, json=body, headers=KEY).status_code == 200
    for path in ("/v1/models", "/server_info", "/tokenizer_info"):
        assert front.http.get(prefix + path).status_code == 401
        assert front.http.get(prefix + path, headers=KEY).status_code == 200


@pytest.mark.parametrize("path", ["/llm", "/llm/", "/llmv1/models", "/llm/llm/v1/models"])
def test_only_the_whole_prefix_is_removed_and_only_once(front: FrontUnderTest, path: str) -> None:
    assert front.http.get(path, headers=KEY).status_code == 404


def test_the_document_has_the_path_in_front(front: FrontUnderTest) -> None:
    assert front.http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_answers_as_health_does(front: FrontUnderTest, method: str) -> None:
    assert front.http.request(method, "/ping").json() == front.http.get("/health").json()


def test_load_counts_requests_in_flight(front: FrontUnderTest) -> None:
    assert front.http.get("/load").json() == {"server_load": 0}
    front.do(lambda: setattr(front.core, "hold_after", 1))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    sender = threading.Thread(target=lambda: front.http.post("/v1/chat/completions", json=body, headers=KEY))
    sender.start()
    front.wait_until(lambda: front.service.lifecycle.num_in_flight == 1, "the request is in flight")
    assert front.http.get("/load").json() == {"server_load": 1}
    front.do(front.core.release)
    sender.join()


def test_server_info_has_the_settings_in_two_forms(front: FrontUnderTest) -> None:
    as_json = front.http.get("/server_info", params={"config_format": "json"}, headers=KEY).json()
    assert as_json["vllm_config"]["root_path"] == "/llm"
    assert as_json["system_env"]["torch_version"]
    as_text = front.http.get("/server_info", headers=KEY).json()
    assert "root_path='/llm'" in as_text["vllm_config"]
    refused = front.http.get("/server_info", params={"config_format": "yaml"}, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "config_format")


def test_server_info_has_no_secrets() -> None:
    config = EngineConfig(ray_runtime_env={"env_vars": {"HF_TOKEN": "secret"}})
    assert "secret" not in str(shown_config(config))
    environment = {"RAYLOOM_API_KEYS": "secret", "RAYLOOM_CPU_ISA": "avx2", "HF_TOKEN": "secret", "PATH": "/bin"}
    assert shown_environment(environment) == {"RAYLOOM_CPU_ISA": "avx2"}


def test_tokenizer_info_is_the_models_own_file(front: FrontUnderTest) -> None:
    info = front.http.get("/tokenizer_info", headers=KEY).json()
    assert info["chat_template"] == TEMPLATE
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert info["tokenizer_class"]
    length = front.http.post("/tokenize", json={"prompt": "Hi"}, headers=KEY).json()["max_model_len"]
    assert info["model_max_length"] == length


def test_vllm_names_replace_ours_where_vllm_has_the_metric() -> None:
    usual = {family.name for family in Metrics("m").families}
    renamed = {family.name for family in Metrics("m", "vllm").families}
    assert {name.removeprefix("rayloom:") for name in usual - renamed} == OF_VLLM
    assert renamed - usual == {f"vllm:{name}" for name in OF_VLLM}


def test_metrics_of_the_server_have_vllms_names_and_labels(front: FrontUnderTest) -> None:
    front.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers=KEY).raise_for_status()
    text = front.http.get("/metrics").text
    samples = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum"),
        *("request_queue_time_seconds_count", "request_inference_time_seconds_count"),
        *("request_num_preemptions_count", "num_requests_waiting_by_reason", "admission_rejections_total"),
        *("request_prefill_time_seconds_count", "iteration_tokens_total_count"),
        *("e2e_request_latency_seconds_count", "request_success_total", "request_decode_time_seconds_sum"),
    ):
        assert samples[f"vllm:{name}"].labels.items() >= {"model_name": MODEL, "engine": "0"}.items()
    labels = samples["vllm:cache_config_info"].labels
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("16", str(front.do(lambda: front.core.num_blocks)))
    assert "rayloom:recoveries_total" in text
    assert "rayloom:num_requests_running" not in text
    for name in ("queue_time_seconds", "prefill_time_seconds", "inference_time_seconds", "num_preemptions"):
        num_decoded = samples["vllm:request_decode_time_seconds_count"].value
        assert samples[f"vllm:request_{name}_count"].value == num_decoded > 0
    cache = samples["vllm:cache_config_info"].labels
    num_tokens = int(cache["num_gpu_blocks"]) * int(cache["block_size"])
    assert int(cache["kv_cache_size_tokens"]) == num_tokens
    length = front.http.post("/tokenize", json={"prompt": "Hi"}, headers=KEY).json()["max_model_len"]
    assert float(cache["kv_cache_max_concurrency"]) == pytest.approx(num_tokens / length, abs=0.001)


def running_by_metrics(front: FrontUnderTest) -> float:
    lines = front.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("vllm:num_requests_running{")).split()[-1])


def test_the_metrics_have_the_present_number_of_running_sequences(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_mute", True))
    front.wait_until(lambda: front.service.client.status_age_s > 0.1, "the last status is old")
    front.do(lambda: setattr(front.core, "num_running", 7))
    assert running_by_metrics(front) == 7
    front.do(lambda: setattr(front.core, "num_running", 1))
    front.wait_until(lambda: front.service.client.status_age_s > 0.1, "the last status is old")
    assert running_by_metrics(front) == 1
    front.do(lambda: setattr(front.core, "is_mute", False))


def test_a_scrape_directly_after_another_requests_no_second_status(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "_NEW_STATUS_S", 1000.0)  # the status is new on a slow machine, too
    front.do(front.core.send_status)
    before = front.do(lambda: front.core.num_status_requests)
    assert running_by_metrics(front) == 1
    assert front.do(lambda: front.core.num_status_requests) == before
    monkeypatch.setattr(engine_link, "_NEW_STATUS_S", 0.0)
    assert running_by_metrics(front) == 1
    assert front.do(lambda: front.core.num_status_requests) == before + 1


def test_a_core_that_does_not_answer_delays_the_metrics_by_a_moment_and_is_asked_once(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_mute", True))
    front.do(lambda: setattr(front.core, "is_responsive", False))
    front.wait_until(lambda: front.service.client.status_age_s > 0.1, "the last status is old")
    before = front.do(lambda: front.core.num_status_requests)
    began = time.monotonic()
    assert [running_by_metrics(front), running_by_metrics(front)] == [1, 1]
    assert time.monotonic() - began < 10.0, "each waits 0.25 s"
    assert front.do(lambda: front.core.num_status_requests) == before + 1
    front.do(lambda: setattr(front.core, "is_responsive", True))
    front.do(lambda: setattr(front.core, "is_mute", False))
    front.do(front.core.send_status)
