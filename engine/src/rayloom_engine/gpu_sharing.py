"""The setting ranks_per_gpu: its possible values, a rank's part of a GPU, and the advice to use it. Pure."""

from __future__ import annotations

_UNITS = 10_000  # Ray counts resources in units of 1/10000


def shareable_numbers(tensor: int, pipeline: int) -> tuple[int, ...]:
    """Returns the possible values for `pipeline` stages of `tensor` ranks each, from 1 to the number of all ranks.

    Every GPU has as many ranks, of one stage or of whole stages.
    """
    num_ranks = tensor * pipeline
    return tuple(
        number
        for number in range(1, num_ranks + 1)
        if num_ranks % number == 0 and (tensor % number == 0 or number % tensor == 0)
    )


def gpu_per_rank(ranks_per_gpu: int) -> float:
    """Returns a rank's part of a GPU, as Ray counts it: rounded down, so that all parts fit into the GPU."""
    return _UNITS // ranks_per_gpu / _UNITS


def ranks_on_gpu(amount: float) -> int:
    """Returns the number of ranks that Ray puts on one GPU, if each takes `amount` of a GPU (at most 1)."""
    return _UNITS // round(amount * _UNITS)


def sharing_advice(number: int) -> str:
    """Returns the end of a sentence that lists remedies for too few GPUs: `number` ranks could share each GPU.

    It is for ranks on one machine. Pods have no such setting, but `rayloom-operator local` has the flag.
    """
    return (
        f"or let {number} ranks share an accelerator by ranks_per_gpu: {number}, on a command line "
        f"--ranks-per-gpu {number} (they exchange through host memory, which is slow)"
    )
