"""Metrics of the front, and the metrics that the core reports.

The names are vLLM's names with the prefix `rayloom:`, or with `vllm:` by the setting metrics_prefix. Metrics that vLLM
lacks always have the prefix `rayloom:`. prometheus_client writes the text format; the values come from figures.py.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.stats import STEP_TOKEN_BOUNDS, SchedulerStats
from rayloom_engine.errors import QueueFull
from rayloom_engine.front.core_link.recoveries import RecoveryRecord
from rayloom_engine.front.http.errors import is_fault
from rayloom_engine.front.operations.figures import Family, Histogram
from rayloom_engine.protocol.gateway_requests import FIRST_TOKEN_BOUNDS_S, GatewayRequests
from rayloom_engine.protocol.messages import CoreStatus

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 3, 5, 10, 20, 50, 100)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

# Counters of the core, which start at zero with each core: field of SchedulerStats -> (metric, meaning).
_CORE_COUNTERS = {
    "num_preemptions": ("num_preemptions_total", "Sequences preempted for want of KV blocks."),
    "prefix_queries": ("prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits_total", "Tokens found in the prefix cache."),
    "host_hits": (
        "prefix_cache_host_hits_total",
        "Tokens of prefix_cache_hits_total that were loaded from host memory.",
    ),
    "num_host_stores": ("kv_host_stored_blocks_total", "KV blocks copied to host memory."),
    "num_host_loads": ("kv_host_loaded_blocks_total", "KV blocks loaded from host memory."),
    "num_drafts": ("spec_decode_num_drafts_total", "Drafts of next tokens that were verified (`speculation`)."),
    "draft_tokens": ("spec_decode_num_draft_tokens_total", "Tokens of these drafts."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."),
    "num_corrupt": (
        "corrupt_requests_total",
        "Sequences that ended in an error because their logits were not finite.",
    ),
}
# The metrics that vLLM has under the same name, with the same meaning and labels.
OF_VLLM = frozenset(
    (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "admission_rejections_total",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_num_preemptions",
        "iteration_tokens_total",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    )
)


class Metrics:
    """All metrics of one engine. Handlers and `observe_core` (the core's counts) change them; `text` writes them."""

    def __init__(self, model_name: str, prefix: str = "rayloom", *, prefix_caching: bool = True) -> None:
        """`prefix`: the prefix of the metrics OF_VLLM. If it is vllm, all samples also have vLLM's label `engine`."""
        self.common_labels = {"model_name": model_name, **({"engine": "0"} if prefix == "vllm" else {})}
        self._prefix = prefix
        self._prefix_caching = prefix_caching
        self._families: dict[str, Family] = {}
        gauge = self._gauge
        counter = self._counter
        self._running = gauge("num_requests_running", "Sequences in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Sequences waiting to be scheduled.")
        self._waiting_by_reason = gauge(
            "num_requests_waiting_by_reason",
            "The same, by reason; the only one is capacity: slots, KV blocks or tokens of a step.",
            "reason",
        )
        self._rejections = counter(
            "admission_rejections_total", "Requests that found the queue full; their answer was a 429.", "reason"
        )
        self._kv_usage = gauge("kv_cache_usage_perc", "KV blocks in use; 1 means all.")
        self._host_room = gauge("kv_host_blocks", "KV blocks that the host memory of a rank has room for.")
        self._host_used = gauge("kv_host_blocks_used", "KV blocks that have a copy in host memory.")
        self._cache_config = gauge(
            "cache_config_info",
            "Always 1; the labels describe the KV cache of a rank.",
            *("block_size", "num_gpu_blocks", "enable_prefix_caching"),
            *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
        )
        self._heartbeat = gauge("rank_heartbeat_age_seconds", "Seconds since each rank's last sign of life.", "rank")
        self._communication = gauge(
            "rank_communication_seconds", "Seconds that each rank has waited for other ranks.", "rank"
        )
        self._startup = gauge("startup_seconds", "Seconds of each phase of the last start.", "phase")
        self._api_keys = gauge("api_keys", "API keys that are accepted; 0: requests need no key.")
        self._api_key_problem = gauge(
            "api_key_file_unusable",
            "1 while the API key file, or that of an alias, cannot be used; keys that were read before stay valid. "
            "If none were read before, every key is refused.",
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of accepted requests.")
        self.generation_tokens = counter("generation_tokens_total", "Generated tokens.")
        self.success = counter("request_success_total", "Sequences finished, by reason.", "finished_reason")
        self.finished = counter(
            "requests_finished_total",
            "Requests that succeeded or failed; those that were refused, or whose client left, do not count.",
        )
        self.failed = counter("requests_failed_total", "Finished requests that failed by an error of the engine.")
        self.repeats_answered = counter(
            "repeats_answered_total",
            "Repeated requests that got the answer to the first request with their Idempotency-Key or X-Request-Id.",
        )
        self.detached_answers = gauge(
            "detached_answers", "Answers that are computed for a repeat although their connection has broken."
        )
        self._core_counters = {field: counter(name, meaning) for field, (name, meaning) in _CORE_COUNTERS.items()}
        self.recoveries = counter(
            "recoveries_total",
            "Losses of processes from which the engine has recovered, by process: core, front or rank.",
            "cause",
        )
        self.replayed = counter("replayed_requests_total", "Requests submitted again after a loss.")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "Seconds to the first token.", FIRST_TOKEN_BOUNDS_S
        )
        # Counts requests, while first_token_s counts choices. Only the status document shows this histogram.
        self.request_first_token_s = Histogram("", "Seconds to the first token of a request.", FIRST_TOKEN_BOUNDS_S)
        self.token_gap_s = self._histogram("inter_token_latency_seconds", "Seconds between tokens.", _TOKEN_S)
        self.request_s = self._histogram("e2e_request_latency_seconds", "Seconds of a whole request.", _REQUEST_S)
        self._queue_s = self._histogram(
            "request_queue_time_seconds", "Seconds that a sequence waited for its first step.", _REQUEST_S
        )
        self._prefill_s = self._histogram(
            "request_prefill_time_seconds", "Seconds from a sequence's first step to its first token.", _REQUEST_S
        )
        self._decode_s = self._histogram(
            "request_decode_time_seconds", "Seconds from a sequence's first token to its last.", _REQUEST_S
        )
        self._inference_s = self._histogram(
            "request_inference_time_seconds", "Seconds from a sequence's first step to its last token.", _REQUEST_S
        )
        self._preemptions = self._histogram(
            "request_num_preemptions", "How often a sequence was preempted.", _PREEMPTIONS
        )
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKEN_BOUNDS)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.request_output_tokens = self._histogram("request_generation_tokens", "Tokens per sequence.", _TOKENS)
        self.request_n = self._histogram("request_params_n", "The field `n` of requests.", _CHOICES)
        self.request_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens that a sequence may have.", _TOKENS
        )
        self.recovery_s = self._histogram("recovery_seconds", "Seconds from a loss until tokens flow.", _REQUEST_S)
        own = (self.prompt_tokens, self.generation_tokens, self.replayed, self.finished, self.failed)
        self.detached_answers.set(0)
        for family in (*own, self.repeats_answered, *self._core_counters.values()):
            family.add(0)  # without a first sample of zero, rate() would miss the first increase
        self._rejections.add(0, reason="queue_full")
        self._last_stats = SchedulerStats()
        self._last_gateway_requests = GatewayRequests()
        self._core_pid = 0

    def observe_core(self, status: CoreStatus, core_pid: int) -> None:
        """Adds a CoreStatus from the EngineCore process `core_pid`. The counters of the metrics never fall.

        A new core process counts from zero, so its first counts are added in full. A new epoch does not mean a new
        process: after the loss of a rank, the same process continues in a new epoch.
        """
        stats = status.stats
        self.observe_queue(stats.num_running, stats.num_waiting)
        used = stats.num_blocks - stats.num_free_blocks
        self._kv_usage.set(used / stats.num_blocks if stats.num_blocks else 0.0)
        self._host_room.set(stats.num_host_slots)
        self._host_used.set(stats.num_used_host_slots)
        num_tokens = stats.num_blocks * BLOCK_SIZE
        self._cache_config.clear()
        self._cache_config.set(
            1,
            block_size=str(BLOCK_SIZE),
            num_gpu_blocks=str(stats.num_blocks),
            enable_prefix_caching=str(self._prefix_caching),
            kv_cache_size_tokens=str(num_tokens),
            kv_cache_max_concurrency=f"{num_tokens / status.model.max_model_len:.3f}" if status.model else "0",
        )
        is_new_core = core_pid != self._core_pid
        before = SchedulerStats() if is_new_core else self._last_stats
        for field, counter in self._core_counters.items():
            counter.add(getattr(stats, field) - getattr(before, field))
        steps = [now - then for now, then in zip(stats.step_token_counts, before.step_token_counts, strict=True)]
        self._step_tokens.add_counts(steps, stats.step_tokens - before.step_tokens)
        self._last_stats = stats
        self._add_gateway_requests(
            GatewayRequests() if is_new_core else self._last_gateway_requests, status.gateway_requests
        )
        self._last_gateway_requests = status.gateway_requests
        self._core_pid = core_pid
        for phase in status.phases:
            self._startup.set(phase.seconds, phase=phase.name)

    def _add_gateway_requests(self, before: GatewayRequests, now: GatewayRequests) -> None:
        """Adds gateway requests to this front's counts: those that the core has counted since its last report."""
        if now == before:
            return
        self.finished.add(now.num_finished - before.num_finished)
        self.failed.add(now.num_failed - before.num_failed)
        pairs = zip(now.first_token_counts, before.first_token_counts, strict=True)
        counts = [count - earlier for count, earlier in pairs]
        for histogram in (self.first_token_s, self.request_first_token_s):
            histogram.add_counts(counts, now.first_token_s - before.first_token_s)

    def observe_queue(self, num_running: int, num_waiting: int) -> None:
        """Sets the numbers of sequences. In a gateway, a sequence runs if an engine has it, and waits otherwise."""
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._waiting_by_reason.set(num_waiting, reason="capacity")

    def forget_batch(self) -> None:
        """Call when the core is gone, and with it all running and waiting sequences."""
        self.observe_queue(0, 0)

    def observe_heartbeats(self, status: CoreStatus, status_age_s: float) -> None:
        """Sets the ages of heartbeats as of now: `status` arrived `status_age_s` ago.

        Ranks that are not in `status` are lost. Their metrics are removed, because their last values would stay.
        """
        self._heartbeat.clear()
        self._communication.clear()
        for rank in status.ranks:
            self._heartbeat.set(rank.heartbeat_age_s + status_age_s, rank=str(rank.rank))
            self._communication.set(rank.communication_s, rank=str(rank.rank))

    def observe_api_keys(self, num_keys: int, problem: str) -> None:
        """Records the result of the last read of the key file. `problem` is empty if the file was usable."""
        self._api_keys.set(num_keys)
        self._api_key_problem.set(1 if problem else 0)

    def observe_recovery(self, recovery: RecoveryRecord) -> None:
        """Counts a recovery that has ended."""
        # The label is the kind of process: the sentence of the cause would create an unbounded number of series.
        process = recovery.process.partition(" ")[0] or "process"  # the name of the lost process may be empty
        self.recoveries.add(1, cause=f"{process}_lost")
        self.replayed.add(recovery.replayed_requests)
        if recovery.seconds is not None:
            self.recovery_s.observe(recovery.seconds)

    def observe_phases(self, *, queue_s: float, prefill_s: float, decode_s: float, num_preemptions: int) -> None:
        """Counts a sequence that has ended after at least one token."""
        self._queue_s.observe(queue_s)
        self._prefill_s.observe(prefill_s)
        self._decode_s.observe(decode_s)
        self._inference_s.observe(prefill_s + decode_s)
        self._preemptions.observe(num_preemptions)

    def observe_failure(self, error: Exception) -> None:
        """Counts a request that ended in `error`. Clients that left do not count."""
        if isinstance(error, QueueFull):
            self._rejections.add(1, reason="queue_full")
        if is_fault(error):
            self.finished.add(1)
            self.failed.add(1)

    def text(self) -> str:
        """Returns all metrics in Prometheus' text format."""
        return metrics_text([self])

    @property
    def families(self) -> tuple[Family, ...]:
        """Every metric that `text` writes, in the order of the text."""
        return tuple(self._families.values())

    def _gauge(self, name: str, meaning: str, *label_names: str) -> Family:
        return self._register(Family("gauge", self._full_name(name), meaning, label_names))

    def _counter(self, name: str, meaning: str, *label_names: str) -> Family:
        return self._register(Family("counter", self._full_name(name), meaning, label_names))

    def _histogram(self, name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(self._full_name(name), meaning, bounds)
        self._register(histogram)
        return histogram

    def _full_name(self, name: str) -> str:
        return f"{self._prefix if name in OF_VLLM else 'rayloom'}:{name}"

    def _register(self, family: Family) -> Family:
        self._families[family.name] = family
        return family


def metrics_text(of_models: Sequence[Metrics]) -> str:
    """Returns the metrics of several models in Prometheus' text format. Each sample has its model's name as a label."""
    # Imported at the first scrape: the import takes 5 ms, which would lengthen each start and recovery of a front.
    from prometheus_client import generate_latest

    return generate_latest(_Collector(of_models)).decode()


class _Collector:
    """Metrics as prometheus_client reads them. All models have the same families in the same order."""

    def __init__(self, of_models: Sequence[Metrics]) -> None:
        self._of_models = of_models

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, with the samples of all models."""
        for families in zip(*(metrics.families for metrics in self._of_models), strict=True):
            metric = _metric(families[0])
            for family, metrics in zip(families, self._of_models, strict=True):
                _add_samples(metric, family, metrics.common_labels)
            yield metric


def _metric(family: Family) -> Metric:
    from prometheus_client import Metric

    # prometheus_client appends "_total" to the names of counters.
    name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
    return Metric(name, family.meaning, family.kind)


def _add_samples(metric: Metric, family: Family, common: dict[str, str]) -> None:
    if isinstance(family, Histogram):
        buckets = family.cumulative()
        for bound, count in buckets.items():
            metric.add_sample(f"{family.name}_bucket", {**common, "le": bound}, count)
        metric.add_sample(f"{family.name}_sum", common, family.sum)
        metric.add_sample(f"{family.name}_count", common, buckets["+Inf"])
    else:
        for labels, value in family.values.items():
            metric.add_sample(family.name, {**common, **dict(labels)}, value)
