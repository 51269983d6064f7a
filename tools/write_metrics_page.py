"""Writes `docs/metrics.md` from the metrics that engine and operator register: `make schemas`."""

from __future__ import annotations

from pathlib import Path

from rayloom_engine.front.operations.metrics import Metrics as EngineMetrics
from rayloom_operator.telemetry.metrics import GAUGES
from rayloom_operator.telemetry.metrics import Metrics as OperatorMetrics

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "metrics.md"

_HEAD = """\
# Metrics

<!-- Made by `make schemas` from the code; change tools/write_metrics_page.py or the metrics themselves. -->

Engine and operator write Prometheus' text format (version 0.0.4) at `/metrics`, without a key. Histograms have
`_bucket`, `_sum` and `_count` after their names.

## Engines

In a cluster, port 8000 of an engine's head pod has the metrics, beside the API; on one machine it is the server's own
port. Every sample has the label `model_name`, the name that clients put into `model`. If vLLM has the same metric, the
name is vLLM's with the prefix `rayloom:`. Counters survive a restart of the engine's core process and start at zero
with a new pod. Finished and failed requests and times to the first token include those of gateways
([gateway.md](gateway.md#on-kubernetes)).

With `--metrics-prefix vllm` (in an LLMService `engine.args.metricsPrefix: vllm`), the metrics of the last column have
the prefix `vllm:` instead, and all samples have the label `engine="0"`, as vLLM's. So vLLM's dashboards, triggers of
KEDA and endpoint pickers of gateways work. The other metrics keep the prefix `rayloom:`.

- **Core**: the engine's process that schedules sequences and allocates KV blocks.
- **Front**: the engine's process that answers HTTP requests.
- **Rank**: a process that computes a part of the model, on one accelerator or on the CPU.

"""
_BETWEEN = """
The most useful metrics:

- `rayloom:num_requests_waiting` above 0 for long: there are too few engine replicas
  ([expose.md](expose.md#autoscaling)).
- `rayloom:kv_cache_usage_perc` near 1 with a rising `rayloom:num_preemptions_total`: the KV cache is too small for the
  requests.
- `rate(rayloom:requests_failed_total[5m])` above 0: errors of the engine, never of a client.

With the Prometheus operator, `--set metrics.enginePodMonitor.enabled=true` of the chart creates a PodMonitor that finds
the head pods of all engine replicas, and gateway pods; their samples get the labels `rayloom_dev_service` and
`rayloom_dev_revision` from the pods (gateway pods have no revision). The engines' NetworkPolicies leave the API port
open, so Prometheus reaches it from any namespace. Without the Prometheus operator, discover pods with one of the labels
`ray.io/node-type=head` and `rayloom.dev/gateway`, and the port named `http`. The DCGM exporter, not the engine, has the
metrics of GPUs (utilisation, temperature, memory).

## The operator

Port 8080 of the operator's pods has the metrics, including those of the process (`process_resident_memory_bytes` and
others). Except for `rayloom_operator_leader`, read them from the leading pod. `--set metrics.podMonitor.enabled=true`
or `metrics.serviceMonitor.enabled=true` creates the objects by which Prometheus finds them.

"""
_TAIL = """
Alert on `sum(rayloom_operator_leader) != 1`, on `rayloom_operator_services{condition="Available",status="False"} >
0`, and on any increase of `rayloom_operator_rollout_failures_total` or of
`rayloom_operator_reconcile_total{result="bug"}`.
"""

Row = tuple[str, str, tuple[str, ...], str]  # name, kind, labels, meaning


def engine_rows() -> tuple[Row, ...]:
    """Rows of the engine's metrics, in the order of its /metrics."""
    families = EngineMetrics("").families
    return tuple((each.name, each.kind, each.label_names, each.meaning) for each in families)


def operator_rows() -> tuple[Row, ...]:
    """Rows of the operator's metrics by name, including the gauges that only a running operator registers."""
    metrics = OperatorMetrics()
    for name in GAUGES:
        metrics.gauge(name, lambda: 0.0)
    metrics.follow(lambda: (), lambda: 0)
    return metrics.described()


def vllm_names() -> set[str]:
    """The usual names of the engine's metrics that `--metrics-prefix vllm` renames."""
    renamed = EngineMetrics("", "vllm").families
    return {
        usual.name for usual, other in zip(EngineMetrics("").families, renamed, strict=True) if usual.name != other.name
    }


def page() -> str:
    return _HEAD + _table(engine_rows(), vllm_names()) + _BETWEEN + _table(operator_rows()) + _TAIL


def _table(rows: tuple[Row, ...], marked: set[str] | None = None) -> str:
    heads = ("metric", "type", "labels", "meaning", *(() if marked is None else ("`vllm:`",)))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, kind, labels, meaning in rows:
        names = ", ".join(f"`{label}`" for label in labels)
        mark = "" if marked is None else f" {'yes' if name in marked else ''} |"
        lines.append(f"| `{name}` | {kind} | {names} | {meaning} |{mark}")
    return "\n".join(lines) + "\n"


def main() -> None:
    FILE.write_text(page(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
