"""Messages about unknown flags. They name the replacement of another server's flag, or a flag of a similar name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

_BY_GATEWAY = "put a gateway or an Ingress in front of the API port"

# Flag of vLLM or SGLang -> what to use here instead, or why no flag replaces it.
_ELSEWHERE = {
    "--gpu-memory-utilization": "use --kv-cache-memory-bytes or --num-kv-blocks; without them the KV cache takes the "
    "free memory",
    "--mem-fraction-static": "use --kv-cache-memory-bytes or --num-kv-blocks; without them the KV cache takes the "
    "free memory",
    "--num-gpu-blocks-override": "use --num-kv-blocks",
    "--api-key": "use --api-key-file FILE or the variable RAYLOOM_API_KEYS, so that no key is in the list of processes",
    "--model-path": "use --model",
    "--tp": "use --tensor-parallel-size",
    "-tp": "use --tensor-parallel-size",
    "--tp-size": "use --tensor-parallel-size",
    "--pp": "use --pipeline-parallel-size",
    "-pp": "use --pipeline-parallel-size",
    "--pp-size": "use --pipeline-parallel-size",
    "-dp": "start several servers; the operator's spec.replicas does that",
    "--data-parallel-size": "start several servers; the operator's spec.replicas does that",
    "--distributed-executor-backend": "use --executor",
    "--context-length": "use --max-model-len",
    "--max-seq-len": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--enable-chunked-prefill": "prompts are always computed in pieces; --max-num-batched-tokens bounds a step",
    "--allowed-origins": "use --cors-allowed-origins",
    "--uvicorn-log-level": "use --log-level",
    "--disable-log-requests": "requests are not logged",
    "--disable-log-stats": "figures are at /metrics and not in the log",
    "--download-dir": "set the variable HF_HOME",
    "--hf-token": "set the variable HF_TOKEN",
    "--load-format": "works: safetensors folders and GGUF files, without a flag",
    "--trust-remote-code": "a model's own code is never run; leave it out",
    "--tokenizer": "the tokenizer is the one in the model's folder",
    "--chat-template": "the template is the one in the model's folder: chat_template.jinja or tokenizer_config.json",
    "--seed": "give `seed` in a request",
    "--block-size": "KV blocks have 16 tokens",
    "--enforce-eager": "there is no compilation to switch off; leave it out",
    "--swap-space": "use --kv-host-memory-bytes, in bytes and for each rank: sequences load the blocks that they lose",
    "--kv-offloading-size": "use --kv-host-memory-bytes, in bytes and for each rank",
    "--kv-offloading-backend": "there is one backend; leave it out, and use --kv-host-memory-bytes",
    "--enable-hierarchical-cache": "use --kv-host-memory-bytes",
    "--hicache-size": "use --kv-host-memory-bytes, in bytes and for each rank",
    "--hicache-ratio": "use --kv-host-memory-bytes, in bytes and for each rank",
    "--cpu-offload-gb": "weights stay on one device; --tensor-parallel-size shares them among several",
    "-q": "use --quantization",
    "--kv-cache-dtype": "the KV cache has the weights' type",
    "--enable-auto-tool-choice": "models may always call tools; leave it out",
    "--tool-call-parser": "use --tool-parser; without it the format is found from the chat template",
    "--enable-lora": "use --lora NAME=PATH, or --allow-runtime-lora-updating",
    "--lora-paths": "use --lora",
    "--model-impl": "use --model-backend native or transformers",
    "--speculative-config": "use --speculation ngram, with --num-speculative-tokens, --ngram-min and --ngram-max, or "
    "--speculation draft with --draft-model",
    "--speculative-model": "use --speculation draft with --draft-model",
    "--speculative-draft-model-path": "use --speculation draft with --draft-model",
    "--ssl-keyfile": _BY_GATEWAY,
    "--ssl-certfile": _BY_GATEWAY,
}


def complaints(unknown: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns a message for each unknown flag. If all unknown arguments are values without a flag, returns one message.

    `unknown`: the arguments that argparse did not accept, in order. `known`: the command's flags.
    """
    flags = [part.partition("=")[0] for part in unknown if part.startswith("-") and not _is_number(part)]
    if not flags:
        return [f"unexpected {' '.join(unknown)}; write each value after its flag, and name the model only once"]
    return [f"{flag}: {_advice(flag, known)}" for flag in dict.fromkeys(flags)]


def _advice(flag: str, known: Collection[str]) -> str:
    if flag in _ELSEWHERE:
        return f"there is no such flag; {_ELSEWHERE[flag]}"
    similar = difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
    return f"there is no such flag; did you mean {similar[0]}?" if similar else "there is no such flag; see --help"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
