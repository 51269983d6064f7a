"""Measures `generate` of transformers in a process of its own. peer.py writes the job and reads the result."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from rayloom_bench.child import report_progress, report_result

WARM_UP_OUTPUT = 4  # tokens of the warm-up; enough to allocate memory and to choose kernels


def main() -> None:
    job = json.load(sys.stdin)
    os.environ["HF_HUB_OFFLINE"] = "1"  # the folder is complete, so no request may wait for a network
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # the progress bar of the bench is on stderr
    start_s = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=getattr(torch, job["dtype"])).eval()
    # Without an end-of-sequence id every output has full length, and no step spends time on suppressing that id.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    load_s = time.perf_counter() - start_s

    result = {}
    num_finished = 0
    for workload in job["workloads"]:
        prompts = workload["prompts"]
        size = workload["batch_size"]
        num_output = workload["num_output"]
        generate(model, [ids[::-1] for ids in prompts[:size]], min(WARM_UP_OUTPUT, num_output))
        batches = []
        for first in range(0, len(prompts), size):
            batches.append(generate(model, prompts[first : first + size], num_output))
            num_finished += len(prompts[first : first + size])
            report_progress(num_finished)
        pss_bytes = psutil.Process().memory_full_info().pss
        result[workload["name"]] = {"batches": batches, "pss_bytes": pss_bytes}
    report_result({"load_s": load_s, "version": transformers.__version__, "workloads": result})


def generate(model: Any, prompts: Sequence[Sequence[int]], num_output: int) -> dict[str, list[float]]:
    """Times of one static batch of equally long prompts, decoded greedily: its start, each token and its end.

    Raises RuntimeError unless every output has `num_output` tokens.
    """
    import torch
    from transformers import LogitsProcessorList

    steps_s: list[float] = []

    def note_time(token_ids_BT: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        steps_s.append(time.perf_counter())
        return logits_BV

    ids_BT = torch.tensor(prompts)
    start_s = time.perf_counter()
    with torch.inference_mode():
        output_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=num_output,
            min_new_tokens=None,
            do_sample=False,
            logits_processor=LogitsProcessorList([note_time]),
        )
    end_s = time.perf_counter()
    num_new = output_BT.shape[1] - ids_BT.shape[1]
    if num_new != num_output or len(steps_s) != num_output:
        raise RuntimeError(f"transformers gave {num_new} tokens in {len(steps_s)} steps, {num_output} asked for")
    return {"start_s": [start_s], "steps_s": steps_s, "end_s": [end_s]}


if __name__ == "__main__":
    main()
