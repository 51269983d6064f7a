"""Bytes of a rank's weights, computed from the tensors of transformers' model without the engine's own arithmetic.

In the engine's own decoder, tensor parallelism cuts rows of q, k, v, gate, up, embedding and head. It cuts columns of o
and down. Experts are divided equally: each rank has whole experts, or a part of the rows and columns of all experts.
Every rank has all other tensors. For models of the transformers backend, transformers' own plan cuts the modules, but
embedding and head are cut by rows. The table in docs/models.md gives the bytes of a quantised weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from model_sizes.tensors import Tensor

_BY_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
_FEED_FORWARD = ("gate_proj", "up_proj")
_STACKED = (("q_proj", "k_proj", "v_proj"), _FEED_FORWARD)
_BY_COLUMNS = ("o_proj", "down_proj")
_ROUTERS = ("gate", "router")
_HALF = 2  # bytes of a group's scale or offset in the C library; a group has at most 128 inputs
_SMALLEST_GROUP = 32
_FACTOR = 4  # bytes of the float32 factor that each output has in addition to its groups
# GGUF type -> bytes of a weight on a rank. A group has 32 inputs, in Q6_K 16. It has a scale, and in Q4_K also an
# offset.
_GGUF_HELD = {"Q8_0": 1 + _HALF / 32, "Q4_K": 0.5 + 2 * _HALF / 32, "Q6_K": 0.75 + _HALF / 16}


def weights_of(tensors: Iterable[Tensor]) -> int:
    """Returns the number of weights of a model."""
    return sum(tensor.num_weights for tensor in tensors)


def active_weights_of(tensors: Iterable[Tensor], config: Mapping[str, Any]) -> int:
    """Returns the number of weights that a token uses: all but those of the experts that the token does not select."""
    total = 0
    for tensor in tensors:
        number = tensor.num_weights
        is_expert = ".experts." in tensor.name
        total += number * config["num_experts_per_tok"] // tensor.sizes[0] if is_expert else number
    return total


def rank_bytes(
    tensors: Iterable[Tensor],
    config: Mapping[str, Any],
    *,
    tensor_size: int,
    stages: tuple[range, ...],
    element_bytes: int,
    keeps_quantised: bool,
    by_plan: bool,
) -> tuple[float, ...]:
    """Returns the bytes of the largest rank of each stage. `stages`: the layers of each stage.

    `element_bytes`: bytes of a weight that is not quantised. `keeps_quantised`: ranks keep quantised weights.
    `by_plan`: transformers' own modules compute the model.
    """
    tensors = tuple(tensors)
    held = _Held(config, element_bytes) if keeps_quantised and config.get("quantization_config") else None
    unit = 1 if held is None else held.cut_unit
    has_head = any(tensor.module == "lm_head" for tensor in tensors)
    of_stages = []
    for index, layers in enumerate(stages):
        is_first, is_last = index == 0, index == len(stages) - 1
        total = 0.0
        for tensor in tensors:
            share = _planned_share(tensor, tensor_size) if by_plan else _share(tensor, config, tensor_size, unit)
            layers_with_it = _places(tensor, layers, is_first=is_first, is_last=is_last, has_head=has_head)
            if held is None:
                total += share * element_bytes * len(layers_with_it)
            else:
                total += share * held.bytes_of_all(tensor, layers_with_it, tensor_size)
        of_stages.append(total)
    return tuple(of_stages)


def _places(tensor: Tensor, layers: range, *, is_first: bool, is_last: bool, has_head: bool) -> range:
    """Returns the layers of a stage that have the tensor. For a tensor of no layer: a range of length 1 or 0.

    If the model has no separate head, the last stage has the embedding, too.
    """
    if tensor.first is not None and tensor.last is not None:
        start = max(tensor.first, layers.start)
        return range(start, max(start, min(tensor.last + 1, layers.stop)))
    if tensor.module == "embed_tokens":
        return range(is_first or (is_last and not has_head))
    return range(is_last)


def stored_bytes(tensors: Iterable[Tensor], config: Mapping[str, Any], element_bytes: int) -> float:
    """Returns the bytes of the tensors in the files of a checkpoint that is not a GGUF file."""
    total = 0.0
    for tensor in tensors:
        total += tensor.num_weights * (_stored(config) if _is_quantised(tensor, config) else element_bytes)
    return total


def _planned_share(tensor: Tensor, tensor_size: int) -> float:
    """Returns the elements of the largest part of a tensor of transformers' modules."""
    if tensor.first is None and tensor.module in _BY_ROWS:
        return tensor.numel / tensor.sizes[0] * _largest_part(tensor.sizes[0], tensor_size, 1)
    is_summed_bias = tensor.style.startswith("rowwise") and len(tensor.sizes) == 1  # the first rank has all of it
    return tensor.numel / tensor_size if "wise" in tensor.style and not is_summed_bias else tensor.numel


def _share(tensor: Tensor, config: Mapping[str, Any], tensor_size: int, unit: int) -> float:
    """Returns the elements of the largest part of a tensor among the ranks of a stage.

    The feed-forward part is cut at multiples of `unit`.
    """
    rows = tensor.sizes[0]
    row = tensor.numel / rows
    if tensor.module == "down_proj_bias":
        return float(tensor.numel)  # the first rank has all of it
    if ".experts." in tensor.name:
        width: int = config.get("moe_intermediate_size", config["intermediate_size"])
        return tensor.numel / width * _largest_part(width, tensor_size, unit)
    heads: int = config.get("num_attention_heads", 1)
    kv_heads: int = config.get("num_key_value_heads", heads)
    if tensor.module in ("k_proj", "v_proj"):
        return row * max(rows / tensor_size, rows / kv_heads)
    if tensor.module == "qkv_proj":
        head = rows / (heads + 2 * kv_heads)
        return row * head * (heads / tensor_size + 2 * max(kv_heads / tensor_size, 1))
    if tensor.module == "gate_up_proj":
        return 2 * row * _largest_part(rows // 2, tensor_size, unit)
    if tensor.module in _FEED_FORWARD:
        return row * _largest_part(rows, tensor_size, unit)
    if tensor.module in _BY_ROWS:
        return row * _largest_part(rows, tensor_size, 1)
    if tensor.module in _BY_COLUMNS and len(tensor.sizes) == 2:
        return float(rows * _largest_part(tensor.sizes[1], tensor_size, unit))
    return float(tensor.numel)


def _largest_part(size: int, parts: int, unit: int) -> int:
    return -(-size // unit // parts) * unit


class _Held:
    """Bytes of the weights of a quantised checkpoint in the C library."""

    def __init__(self, config: Mapping[str, Any], element_bytes: int) -> None:
        self._config = config
        self._element_bytes = float(element_bytes)
        self._given = config["quantization_config"]
        self._bits, group, self._has_offsets = _integers(self._given)
        self.cut_unit = group or _SMALLEST_GROUP

    def bytes_of_all(self, tensor: Tensor, layers: range, tensor_size: int) -> float:
        """Returns the bytes of a weight, with its share of the scales, summed over these layers."""
        if self._given["quant_method"] == "gguf":
            return sum(self._gguf_bytes(tensor, layer) for layer in layers)
        if not _is_quantised(tensor, self._config):
            return self._element_bytes * len(layers)
        # transformers transposes the weights of mxfp4 experts: [experts, inputs, outputs].
        inputs = tensor.sizes[-2 if self._given["quant_method"] == "mxfp4" else -1]
        if tensor.module in _BY_COLUMNS:
            inputs = _largest_part(inputs, tensor_size, self.cut_unit)
        of_groups = _HALF * (1 + self._has_offsets) / self.cut_unit
        num_groups = inputs // self.cut_unit
        # If groups have no offsets, the C library stores groups in pairs.
        stored_groups = num_groups if self._has_offsets else num_groups + num_groups % 2
        return ((self._bits / 8 + of_groups) * stored_groups / num_groups + _FACTOR / inputs) * len(layers)

    def _gguf_bytes(self, tensor: Tensor, layer: int) -> float:
        """Returns the bytes of a weight.

        If one stacked matrix is dense, all are. If the types of gate and up differ, both have 8 bits.
        """
        name = tensor.name.removesuffix(".weight").replace("*", str(layer))
        owner = name.removesuffix(tensor.module)
        stacked = next((group for group in _STACKED if tensor.module in group), (tensor.module,))
        of_modules = {module: self._given["kinds"].get(owner + module) for module in stacked}
        kinds = set(of_modules.values())
        if None in kinds:
            return self._element_bytes
        if len(kinds) == 1 or stacked != _FEED_FORWARD:
            return _GGUF_HELD[of_modules[tensor.module]]
        return 1 + (1 + ("Q4_K" in kinds)) * _HALF / _SMALLEST_GROUP  # Q4_K has an offset for each group


def _is_quantised(tensor: Tensor, config: Mapping[str, Any]) -> bool:
    given = config.get("quantization_config")
    if given is None or tensor.first is None or len(tensor.sizes) < 2 or tensor.module in _ROUTERS:
        return False
    if tensor.module.endswith("_bias"):  # of all experts together
        return False
    skipped = [*(given.get("ignore") or ()), *(given.get("ignored_layers") or ())]
    skipped += given.get("modules_to_not_convert") or ()
    return not any(fnmatchcase(tensor.name, f"*{name}*") for name in skipped)


def _stored(config: Mapping[str, Any]) -> float:
    """Returns the bytes of a quantised weight in a checkpoint, with its share of the group's scale and zero point."""
    given = config["quantization_config"]
    bits, group, _ = _integers(given)
    if group is None:
        return 1.0  # scales, one for an output or for a block of 128 x 128, add less than 0.1 %
    if given["quant_method"] == "mxfp4":
        return bits / 8 + 1 / group  # an exponent of 8 bits for each group
    has_zeros = given["quant_method"] in ("awq", "gptq")
    return bits / 8 + (_HALF + has_zeros * bits / 8) / group


def _integers(given: Mapping[str, Any]) -> tuple[int, int | None, bool]:
    """Returns (bits, inputs of a group, whether groups have offsets); the group is None for int8 and fp8 weights."""
    if given["quant_method"] == "mxfp4":
        return 4, 32, False
    if given["quant_method"] in ("awq", "gptq"):
        return given["bits"], given["group_size"], given["quant_method"] == "awq"
    if given["quant_method"] == "compressed-tensors" and given["format"] == "pack-quantized":
        weights = given["config_groups"]["group_0"]["weights"]
        return weights["num_bits"], weights["group_size"], not weights["symmetric"]
    return 8, None, False
