"""The workloads that engines are compared with: W1 to W4, W1 sampled, W1 with JSON answers, and two sweeps."""

from __future__ import annotations

import dataclasses

from rayloom_bench.workload import WORKLOADS, Workload

W1 = WORKLOADS[0]
W3 = WORKLOADS[2]
SAMPLED_W1 = dataclasses.replace(W1, name="W1s", temperature=0.8, top_p=0.95)
JSON_W1 = dataclasses.replace(W1, name="W1j", is_json=True)
COMPARED = (W1, SAMPLED_W1, JSON_W1, *WORKLOADS[1:])

DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# prompt lengths; the longest prompt, its answer and one more token are 8192 tokens
PREFILL_LENGTHS = (128, 512, 2048, 8190)
SWEEP_PROMPT = 32
SWEEP_OUTPUT = 64

# Decode sweep: one batch whose sequences decode together. Prefill sweep: two prompts, one after the other; each answer
# has one token.
DECODE_SWEEP = tuple(
    Workload(name=f"D{batch}", num_requests=batch, concurrency=batch, num_own=SWEEP_PROMPT, num_output=SWEEP_OUTPUT)
    for batch in DECODE_BATCHES
)
PREFILL_SWEEP = tuple(
    Workload(name=f"P{length}", num_requests=2, concurrency=1, num_own=length, num_output=1)
    for length in PREFILL_LENGTHS
)
