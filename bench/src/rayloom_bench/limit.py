"""The machine's own limit: what no engine can exceed, computed from bandwidth and arithmetic measured in the same run.

A decode step reads every weight once and multiplies it with every sequence's row; a prefill multiplies each token with
the layers. Attention, KV reads, norms and sampling cost nothing here, so a real engine stays below.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """What limit_probe.py measured: the best of several, all threads."""

    read_bytes_s: float
    fp32_flop_s: float
    bf16_flop_s: float
    has_bf16_instructions: bool
    cpu_capability: str  # torch's word for the vector instructions it uses

    @property
    def flop_s(self) -> float:
        """Of the type that this machine multiplies fastest."""
        return max(self.fp32_flop_s, self.bf16_flop_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What one pass must read and multiply."""

    weight_bytes: int  # in the type that the weights are served in
    num_layer_parameters: int  # multiplied with every token
    num_head_parameters: int  # multiplied only where a token is sampled


def model_cost(*, num_parameters: int, num_head_parameters: int, element_bytes: int, is_tied: bool) -> ModelCost:
    """The cost of a decoder. An embedding that is not tied to the head is looked up, not read in full."""
    num_read = num_parameters if is_tied else num_parameters - num_head_parameters
    return ModelCost(
        weight_bytes=num_read * element_bytes,
        num_layer_parameters=num_read - num_head_parameters,
        num_head_parameters=num_head_parameters,
    )


def wall_s(workload: Workload, cost: ModelCost, rates: MachineRates) -> float:
    """The least seconds in which this machine could answer the workload; a shared prefix is computed once."""
    num_batches = workload.num_requests / workload.concurrency
    num_prefilled = workload.num_shared + workload.num_requests * workload.num_own
    prefill_s = 2 * num_prefilled * cost.num_layer_parameters / rates.flop_s
    first_tokens_s = 2 * workload.num_requests * cost.num_head_parameters / rates.flop_s
    num_parameters = cost.num_layer_parameters + cost.num_head_parameters
    step_s = max(
        cost.weight_bytes / rates.read_bytes_s,
        2 * workload.concurrency * num_parameters / rates.flop_s,
    )
    return prefill_s + first_tokens_s + num_batches * (workload.num_output - 1) * step_s


def output_tok_s(workload: Workload, cost: ModelCost, rates: MachineRates) -> float:
    """The most output tokens per second that the machine allows."""
    return workload.num_requests * workload.num_output / wall_s(workload, cost, rates)
