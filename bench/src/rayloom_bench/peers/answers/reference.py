"""Greedy answers of transformers in float32, computed in a fresh process. Its job is written by agreement.py."""

from __future__ import annotations

import json
import os
import sys

from rayloom_bench.child import report_progress, report_result


def main() -> None:
    job = json.load(sys.stdin)
    os.environ["HF_HUB_OFFLINE"] = "1"  # the folder is complete, so no request may wait for a network
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for number, prompt in enumerate(job["prompts"], 1):
            ids_BT = torch.tensor([prompt])
            output_BT = model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=job["num_output"],
                do_sample=False,
            )
            answers.append(output_BT[0, len(prompt) :].tolist())
            report_progress(number)
    report_result({"answers": answers, "version": transformers.__version__})


if __name__ == "__main__":
    main()
