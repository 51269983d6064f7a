"""Facts of well-known models that the operator ships, and inputs of sizings for them."""

import json

from rayloom_operator.api.costs import Costs
from rayloom_operator.api.shipped_facts import shipped_facts
from rayloom_operator.resolve.question import Question

GIB = 1 << 30
SHIPPED = shipped_facts()
SMOLLM2 = SHIPPED["builtin://smollm2-135m"]
LLAMA31_8B = SHIPPED["hf://meta-llama/Llama-3.1-8B"]
LLAMA31_70B = SHIPPED["hf://meta-llama/Llama-3.1-70B"]
QWEN3_32B = SHIPPED["hf://Qwen/Qwen3-32B"]


def with_context(facts, length):
    """The facts of the same model with another context length and unchanged costs."""
    return facts.model_copy(update={"shape": facts.shape.model_copy(update={"max_position_embeddings": length})})


# Llama 3 differs from Llama 3.1 only in the context length.
LLAMA3_8B, LLAMA3_70B = (with_context(facts, 8192) for facts in (LLAMA31_8B, LLAMA31_70B))
MODELS = {"Llama-3-8B": LLAMA3_8B, "Llama-3-70B": LLAMA3_70B, "Qwen3-32B": QWEN3_32B, "SmolLM2": SMOLLM2}


def without_costs(facts):
    """The facts that an engine of an earlier version returned."""
    return facts.model_copy(update={"costs": None})


def stored(facts, source, revision=""):
    """status.model, with these facts."""
    return facts.model_dump(mode="json", by_alias=True, exclude_none=True) | {"source": source, "revision": revision}


def make_costs(
    *,
    tensor=(1, 2, 4),
    layers="8a",
    weights=(1000,),
    kv=(64,),
    windows=(None,),
    embedding=500,
    head=600,
    both=1000,
    head_layers=0.5,
    packed=None,
):
    """Costs that ranks share evenly, rounded up. `weights`, `kv`, `windows`, `packed`: by kind of layer."""

    def part(total, packed=None):
        amounts = {"elements": [-(-total // n) for n in tensor]}
        return amounts | ({"bytes": [-(-packed // n) for n in tensor]} if packed is not None else {})

    kinds = [
        {"weights": part(each, packed and packed[at]), "kv": part(kv[at]), "window": windows[at]}
        for at, each in enumerate(weights)
    ]
    document = {
        "tensor": tensor,
        "embedding": part(embedding),
        "head": part(head),
        "both": part(both),
        "kinds": kinds,
        "layers": layers,
        "head_layers": head_layers,
        "step": {"token": part(100), "sequence_bytes": 12},
        "checkpoint_bytes": 1000,
    }
    return Costs.model_validate_json(json.dumps(document))


def make_question(facts, gib=80, per_node=8, **changes):
    """Inputs of a sizing in bfloat16 on accelerators of `gib` GiB, or on CPUs if `per_node` is None.

    By default the numbers of shards and stages are not given.
    """
    settings = {
        "shape": facts.shape,
        "costs": facts.costs,
        "dtype": "bfloat16",
        "per_node": per_node,
        "memory": None if gib is None else gib * GIB,
        "tensor": None,
        "pipeline": None,
        "max_model_len": None,
        "num_requests": 1,
    }
    return Question(**{**settings, **changes})
