"""The machine's limit: an upper bound of throughput, computed from bandwidth and FLOP/s measured in the same run.

A decode step reads every weight once, and multiplies it with the row of every sequence. A prefill multiplies the
weights of the layers with each token. Attention, KV reads, norms and sampling are left out, so every real engine is
slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Rates that limit_probe.py measured with all threads: the best of several runs."""

    read_bytes_s: float
    fp32_flop_s: float
    bf16_flop_s: float
    has_bf16_instructions: bool
    cpu_capability: str  # torch's name of the vector instructions that it uses

    @property
    def flop_s(self) -> float:
        """FLOP/s of the type that this machine multiplies fastest."""
        return max(self.fp32_flop_s, self.bf16_flop_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Bytes that one forward pass must read, and parameters that it multiplies."""

    weight_bytes: int  # bytes of the weights in the type in which they are served
    num_layer_parameters: int  # parameters that are multiplied with every token
    num_head_parameters: int  # parameters that are multiplied only where a token is sampled


def model_cost(*, num_parameters: int, num_head_parameters: int, element_bytes: int, is_tied: bool) -> ModelCost:
    """The cost of a decoder. An embedding that is not tied to the head does not count: a step reads few of its rows."""
    num_read = num_parameters if is_tied else num_parameters - num_head_parameters
    return ModelCost(
        weight_bytes=num_read * element_bytes,
        num_layer_parameters=num_read - num_head_parameters,
        num_head_parameters=num_head_parameters,
    )


def wall_s(workload: Workload, cost: ModelCost, rates: MachineRates) -> float:
    """Lower bound of the seconds in which this machine can answer the workload. A shared prefix is computed once."""
    num_batches = workload.num_requests / workload.concurrency
    num_prefilled = workload.num_shared + workload.num_requests * workload.num_own
    prefill_s = 2 * num_prefilled * cost.num_layer_parameters / rates.flop_s
    first_tokens_s = 2 * workload.num_requests * cost.num_head_parameters / rates.flop_s
    return (
        prefill_s + first_tokens_s + num_batches * (workload.num_output - 1) * step_s(workload.concurrency, cost, rates)
    )


def step_s(batch: int, cost: ModelCost, rates: MachineRates) -> float:
    """Lower bound of the seconds of a decode step of `batch` sequences."""
    num_parameters = cost.num_layer_parameters + cost.num_head_parameters
    return max(cost.weight_bytes / rates.read_bytes_s, 2 * batch * num_parameters / rates.flop_s)


def output_tok_s(workload: Workload, cost: ModelCost, rates: MachineRates) -> float:
    """Upper bound of the output tokens per second."""
    return workload.num_requests * workload.num_output / wall_s(workload, cost, rates)
