"""The structures of the C header (engine/csrc/cpu/rayloom_cpu.h) for ctypes, field by field, and its functions' types.

A structure holds addresses of arrays. The code that fills a structure keeps these arrays alive.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "clamped_silu": 2}


class ActivationStruct(Structure):
    """rl_activation: the output of a gated MLP before its last product. `slope` and `limit`: only of clamped_silu."""

    _fields_ = (("kind", c_int32), ("slope", c_float), ("limit", c_float))


class GroupsStruct(Structure):
    """Grouped weights: `size` inputs share a scale, `zero` stands for the weight 0. `bits`: 4, 6 or 8; 0: no groups.

    `numbers`: 1 if the bits are those of floats, else 0.
    """

    _fields_ = (
        ("bits", c_int32),
        ("size", c_int32),
        ("zero", c_int32),
        ("has_offsets", c_int32),
        ("numbers", c_int32),
    )


class LinearStruct(Structure):
    """A packed matrix [num_outputs, num_inputs]. `scales` of an int8 or grouped matrix, and `bias`, are float32.

    `more`: the outputs behind these, in another form.
    """


LinearStruct._fields_ = (  # set here, because a structure refers to another of the same type
    ("weight", c_void_p),
    ("scales", c_void_p),
    ("bias", c_void_p),
    ("num_outputs", c_int32),
    ("num_inputs", c_int32),
    ("groups", GroupsStruct),
    ("more", POINTER(LinearStruct)),
)


class ExpertsStruct(Structure):
    """rl_experts: a mixture of experts. `gate_up` and `down` hold the experts' matrices, the shared expert's last."""

    _fields_ = (
        ("router", LinearStruct),
        ("gate_up", POINTER(LinearStruct)),
        ("down", POINTER(LinearStruct)),
        ("num_experts", c_int32),
        ("num_per_token", c_int32),
        ("num_shared", c_int32),
        ("normalises", c_int32),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("experts", POINTER(ExpertsStruct)),
        ("window", c_int32),
    )


class UpdateStruct(Structure):
    """rl_update: a low-rank update of a matrix of the checkpoint; no update if `rank` is 0."""

    _fields_ = (("b", c_void_p), ("scale", c_float), ("rank", c_int32))


class MatrixUpdateStruct(Structure):
    """rl_matrix_update: the updates of a matrix that stacks up to 3 matrices of the checkpoint."""

    _fields_ = (("a", c_void_p), ("parts", UpdateStruct * 3))


class AdapterLayerStruct(Structure):
    """rl_adapter_layer: the updates of an adapter in one layer."""

    _fields_ = tuple((name, MatrixUpdateStruct) for name in ("qkv", "out", "gate_up", "down"))


class DecoderStruct(Structure):
    """rl_model: the layers of a stage, without embedding, final norm and head."""

    _fields_ = (
        ("dtype", c_int32),
        ("num_layers", c_int32),
        ("width", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("intermediate", c_int32),
        ("activation", ActivationStruct),
        ("has_wide_norms", c_int32),
        ("rms_norm_eps", c_float),
        ("residual_scale", c_float),
        ("score_scale", c_float),
        ("score_cap", c_float),
        ("layers", POINTER(LayerStruct)),
    )


class BatchStruct(Structure):
    """rl_batch: the tokens of a step."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("query_lens", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int32),
        ("slot_mapping", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("window_cosines", c_void_p),
        ("window_sines", c_void_p),
        ("pages", c_void_p),
        ("residual", c_void_p),
        ("wanted_rows", c_void_p),
        ("num_wanted", c_int32),
        ("adapters", c_void_p),
        ("adapter_of_token", c_void_p),
    )


def declare_functions(library: CDLL) -> None:
    """Declares the types of all functions, so that ctypes converts and checks their arguments."""
    linear = POINTER(LinearStruct)
    groups = POINTER(GroupsStruct)
    for name, result, arguments in (
        ("rl_start_threads", c_int, [c_int32, c_int32]),
        ("rl_instruction_sets", c_char_p, []),
        ("rl_choose", c_int, [c_char_p]),
        ("rl_operand_bytes", c_int32, [c_int32]),
        ("rl_packed_elements", c_int64, [c_int64, c_int64]),
        ("rl_pack_weight", None, [c_int32, c_void_p, c_void_p, c_int64, c_int64]),
        ("rl_pack_int8_weight", None, [c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
        ("rl_grouped_bytes", c_int64, [groups, c_int64, c_int64]),
        ("rl_pack_grouped_weight", None, [groups, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64]),
        ("rl_embed", None, [c_int32, linear, c_void_p, c_int32, c_void_p]),
        ("rl_multiply", c_int, [c_int32, linear, c_void_p, c_int32, c_void_p]),
        ("rl_normalise", None, [c_int32, c_void_p, c_void_p, c_float, c_int32, c_int32, c_void_p]),
        (
            "rl_forward",
            c_int,
            [POINTER(DecoderStruct), POINTER(BatchStruct), c_int32, c_int32, c_void_p, POINTER(c_int64)],
        ),
        ("rl_buffer_bytes", c_int64, []),
        ("rl_profile", None, [c_void_p]),
        ("rl_add", None, [c_void_p, c_void_p, c_void_p, c_float, c_float, c_int32, c_int32]),
    ):
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
