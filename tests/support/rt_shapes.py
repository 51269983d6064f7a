"""Shapes of well-known models, as their config.json files give them, and questions about them."""

from rayloom_operator.api.model_facts import BUILTIN_FACTS, ModelFacts, ModelShape
from rayloom_operator.resolve.sizing import Question

GIB = 1 << 30
SMOLLM2 = BUILTIN_FACTS["smollm2-135m"].shape
LLAMA3_8B = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    checkpoint_dtype="bfloat16",
)
LLAMA3_70B = LLAMA3_8B.model_copy(
    update={"num_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_heads": 64}
)
QWEN3_32B = ModelShape(
    architecture="Qwen3ForCausalLM",
    num_layers=64,
    hidden_size=5120,
    intermediate_size=25600,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
    checkpoint_dtype="bfloat16",
    qk_norm=True,
)
SHAPES = {"Llama-3-8B": LLAMA3_8B, "Llama-3-70B": LLAMA3_70B, "Qwen3-32B": QWEN3_32B, "SmolLM2": SMOLLM2}
# Llama 3.1 is the same but for its context.
LLAMA31_8B, LLAMA31_70B = (
    ModelFacts(shape=shape.model_copy(update={"max_position_embeddings": 131072}), num_parameters=number)
    for shape, number in ((LLAMA3_8B, 8_030_261_248), (LLAMA3_70B, 70_553_706_496))
)


def make_question(shape, gib=80, per_node=8, **changes):
    """In bfloat16 on accelerators of so many GiB, or with per_node None on CPUs; nothing given by the user."""
    settings = {
        "shape": shape,
        "dtype": "bfloat16",
        "per_node": per_node,
        "memory": None if gib is None else gib * GIB,
        "tensor": None,
        "pipeline": None,
        "max_model_len": None,
        "num_requests": 1,
    }
    return Question(**{**settings, **changes})
