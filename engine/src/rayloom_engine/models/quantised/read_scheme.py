"""Reads `quantization_config` of config.json. Pure. Every error is a ModelError that names field and value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.quantised.awq import AwqReader
from rayloom_engine.models.quantised.compressed import Int8Reader, PackedReader
from rayloom_engine.models.quantised.float8 import Float8Reader
from rayloom_engine.models.quantised.gguf_blocks import GgufReader
from rayloom_engine.models.quantised.gptq import GptqReader
from rayloom_engine.models.quantised.mxfp4 import Mxfp4Reader
from rayloom_engine.models.quantised.reader import MatrixReader
from rayloom_engine.models.quantised.scheme import CheckpointScheme

FIELD = "quantization_config"
METHODS = (
    "awq",
    "gptq",
    "compressed-tensors",
    "fp8",
    "mxfp4",
)  # values of quant_method; the engine's own conversion of GGUF files writes "gguf"
_MAX_GROUP = 1 << 20
_MAX_SKIPPED = 1 << 14
_NAME = re.compile(r"[\w.\-]+")
_STARRED_NAME = re.compile(r"[\w.*\-]+")
_WILD_NAME = re.compile(r"(?:[\w\-]|\\?\.|\.\*)+\$?")
_SCALES = (".input_scale", ".weight_shape", ".k_scale", ".v_scale", ".output_scale")


def read_scheme(config: ConfigJson, layer_inputs: Mapping[str, int], outputs: Mapping[str, int]) -> CheckpointScheme:
    """Returns the scheme that config.json describes. Call it only if the field `quantization_config` is an object.

    `layer_inputs`, `outputs`: name -> number of inputs, or outputs, of the layers' matrices. Raises ModelError.
    """
    given = ConfigJson(path=config.path, values=config.mapping(FIELD))
    method = given.text("quant_method", "")
    if method == "gguf":
        return _gguf(given)
    read = _READERS.get(method)
    if read is None:
        raise _unsupported(given, "quant_method", method or None, f"works: {', '.join(METHODS)}, or a GGUF file")
    label, reader, skipped = read(given)
    _check_sizes(given, reader, layer_inputs, outputs)
    groups = {reader.form(size).group_size for size in layer_inputs.values()}
    return CheckpointScheme(label=label, cut_unit=math.lcm(*groups), linear=reader, skipped=skipped, left_out=_SCALES)


def _awq(given: ConfigJson) -> tuple[str, MatrixReader, tuple[str, ...]]:
    if (version := given.text("version", "gemm").lower()) != "gemm":
        raise _unsupported(given, "version", version, "works: gemm")
    _require_bits(given, given.values.get("bits", 4), (4,))
    if not given.values.get("zero_point", True):
        raise _unsupported(given, "zero_point", False, "works: true")
    size = _group_size(given, given.values.get("group_size", 128))
    if size is None:
        raise _unsupported(given, "group_size", -1, "works: multiples of 32")
    skipped = _parts(given, "modules_to_not_convert")
    return f"awq-int4-g{size}", AwqReader(group_size=size), skipped


def _gptq(given: ConfigJson) -> tuple[str, MatrixReader, tuple[str, ...]]:
    bits = _require_bits(given, given.values.get("bits"), (4, 8))
    size = _group_size(given, given.values.get("group_size", 128))
    if given.flag("desc_act") and size is not None:  # one group of all inputs is the same in any order
        raise _unsupported(
            given, "desc_act", True, "works: false, because groups of inputs that are not neighbours have no kernel"
        )
    if given.flag("lm_head"):
        raise _unsupported(given, "lm_head", True, "works: false")
    version = given.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _unsupported(given, "checkpoint_format", version, "works: gptq, gptq_v2")
    is_symmetric = given.values.get("sym", True) is True
    reader = GptqReader(bits=bits, group_size=size, is_symmetric=is_symmetric, zero_step=int(version == "gptq"))
    return f"gptq-int{bits}{_groups_in_words(size)}", reader, _parts(given, "modules_to_not_convert")


def _float8(given: ConfigJson) -> tuple[str, MatrixReader, tuple[str, ...]]:
    if (fmt := given.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(given, "fmt", fmt, "works: e4m3")
    skipped = (*_parts(given, "modules_to_not_convert"), *_parts(given, "ignored_layers"))
    block = given.values.get("weight_block_size")
    if block is None:
        return "fp8", Float8Reader(scale="weight_scale", kind="tensor"), skipped
    return "fp8-block", Float8Reader(scale="weight_scale_inv", kind="block", block=_block(given, block)), skipped


def _mxfp4(given: ConfigJson) -> tuple[str, MatrixReader, tuple[str, ...]]:
    """Returns the scheme of a model of which only experts are quantised, whatever modules_to_not_convert lists."""
    return "mxfp4", Mxfp4Reader(), ("*.self_attn.*", *_parts(given, "modules_to_not_convert", _STARRED_NAME))


def _compressed(given: ConfigJson) -> tuple[str, MatrixReader, tuple[str, ...]]:
    _check_transforms(given)
    groups = given.mapping("config_groups")
    if len(groups) != 1:
        raise _unsupported(given, "config_groups", f"{len(groups)} groups", "works: one group for all linear layers")
    group = _object(given, next(iter(groups.values())), "config_groups")
    if group.values.get("targets") != ["Linear"]:
        raise _unsupported(given, "targets", group.values.get("targets"), 'works: ["Linear"]')
    weights = _object(given, group.values.get("weights"), "weights")
    if weights.values.get("actorder") not in (None, "weight", "static"):
        raise _unsupported(given, "actorder", weights.values["actorder"], "works: null, weight, static")
    skipped = _patterns(given, "ignore")
    form = group.values.get("format") or given.text("format", "")
    strategy = weights.text("strategy", "tensor")
    is_symmetric = weights.values.get("symmetric", True) is True
    if form == "pack-quantized" and weights.text("type", "int") == "int" and strategy in ("group", "channel"):
        bits = _require_bits(given, weights.values.get("num_bits"), (4, 8))
        size = None if strategy == "channel" else _group_size(given, weights.values.get("group_size"))
        reader = PackedReader(bits=bits, group_size=size, is_symmetric=is_symmetric)
        return f"compressed-int{bits}{_groups_in_words(size)}", reader, skipped
    if form == "int-quantized" and strategy in ("channel", "tensor") and is_symmetric:
        _require_bits(given, weights.values.get("num_bits"), (8,))
        return "compressed-w8a8", Int8Reader(is_per_output=strategy == "channel"), skipped
    if form == "float-quantized" and strategy in ("channel", "tensor"):
        _require_bits(given, weights.values.get("num_bits"), (8,))
        return "compressed-fp8", Float8Reader(scale="weight_scale", kind=strategy), skipped
    if form == "float-quantized" and strategy == "block":
        block = _block(given, weights.values.get("block_structure"))
        return "compressed-fp8-block", Float8Reader(scale="weight_scale", kind="block", block=block), skipped
    raise _unsupported(
        given,
        "format",
        f"{form} with strategy {strategy}",
        "works: pack-quantized by group or channel, symmetric int-quantized by channel or tensor, float-quantized by "
        "channel, tensor or block",
    )


_READERS: Mapping[str, Callable[[ConfigJson], tuple[str, MatrixReader, tuple[str, ...]]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _float8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}


def _check_transforms(given: ConfigJson) -> None:
    """Raises ModelError if activations must be rotated. The checkpoint's weights already have their own rotations."""
    transforms = _object(given, given.mapping("transform_config"), "transform_config")
    for name, value in transforms.mapping("config_groups").items():
        applied = _object(given, value, "transform_config").get("apply")
        places = [each.get("location") if isinstance(each, dict) else each for each in _listed(applied)]
        if not places or any(place not in ("weight_input", "weight_output") for place in places):
            raise _unsupported(
                given, "transform_config", name, f"works: rotations of weights alone, given {shown(places)}"
            )


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _gguf(given: ConfigJson) -> CheckpointScheme:
    """Reads what `models.checkpoint.gguf_convert` wrote: each matrix's kind, and the sizes of a kind's block."""
    blocks = given.mapping("blocks")
    readers: dict[str, MatrixReader] = {}
    kinds = given.mapping("kinds")
    for name, kind in kinds.items():
        inputs, num_bytes = _block(given, blocks.get(kind))
        readers[name] = GgufReader(kind=str(kind), block_inputs=inputs, block_bytes=num_bytes)
    counts = sorted(kinds.values(), key=list(kinds.values()).count)
    label = f"gguf-{str(counts[-1]).lower()}" if counts else "gguf"
    return CheckpointScheme(label=label, cut_unit=32, by_name=readers)


def _check_sizes(
    given: ConfigJson, reader: MatrixReader, layer_inputs: Mapping[str, int], outputs: Mapping[str, int]
) -> None:
    for name, size in layer_inputs.items():
        if size % reader.unit or size % 32:
            raise _unsupported(
                given, "group_size", reader.unit, f"works: a divisor of {name}, which is {size}; and 32 must divide it"
            )
    for name, size in outputs.items():
        if size % 8:
            raise ModelError(
                f"{given.path}: {name} is {size}, and quantised weights need a multiple of 8", "Unsupported"
            )


def _require_bits(given: ConfigJson, bits: object, known: tuple[int, ...]) -> int:
    if isinstance(bits, bool) or bits not in known:
        raise _unsupported(given, "bits", bits, f"works: {', '.join(map(str, known))}")
    return int(str(bits))


def _group_size(given: ConfigJson, size: object) -> int | None:
    """Returns the number of inputs that share a scale; None for -1, which means all inputs."""
    if size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= _MAX_GROUP or size % 32:
        raise _unsupported(given, "group_size", size, "works: multiples of 32, or -1 for all inputs")
    return size


def _groups_in_words(size: int | None) -> str:
    return "" if size is None else f"-g{size}"


def _block(given: ConfigJson, block: object) -> tuple[int, int]:
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= _MAX_GROUP for size in sizes):
        raise _unsupported(given, "weight_block_size", block, "works: two whole numbers, such as [128, 128]")
    return sizes[0], sizes[1]


def _parts(given: ConfigJson, field: str, allowed: re.Pattern[str] = _NAME) -> tuple[str, ...]:
    """Returns a pattern for each text of a list. As in transformers, a pattern matches names that contain its text."""
    names = given.texts(field) if given.get(field) is not None else []
    _check_names(given, field, names, allowed)
    return tuple(f"*{name}*" for name in names)


def _patterns(given: ConfigJson, field: str) -> tuple[str, ...]:
    """Returns patterns for the names in a list. A name after `re:` is a simple regular expression."""
    names = given.texts(field) if given.get(field) is not None else []
    _check_names(given, field, [name.removeprefix("re:") for name in names], _WILD_NAME)
    found = []
    for name in names:
        expression = name.removeprefix("re:")
        if expression == name:
            found.append(name)
        else:
            wild = expression.replace("\\.", "\0").replace(".*", "*").replace(".", "?").replace("\0", ".")
            found.append(wild.removesuffix("$") if wild.endswith("$") else f"{wild}*")
    return tuple(found)


def _check_names(given: ConfigJson, field: str, names: list[str], allowed: re.Pattern[str]) -> None:
    if len(names) > _MAX_SKIPPED:
        raise _unsupported(given, field, f"{len(names)} names", f"works: up to {_MAX_SKIPPED}")
    for name in names:
        if not allowed.fullmatch(name):
            raise _unsupported(given, field, name, "works: names of modules, and `re:` with .* for any text")


def _object(given: ConfigJson, value: object, field: str) -> ConfigJson:
    if not isinstance(value, dict):
        raise ModelError(f"{given.path}: {FIELD}.{field} must be an object, given {shown(value)}")
    values: dict[str, Any] = value
    return ConfigJson(path=given.path, values=values)


def _unsupported(given: ConfigJson, field: str, value: object, works: str) -> ModelError:
    text = word(value) if isinstance(value, str) else shown(value)
    return ModelError(f"{given.path}: {FIELD}.{field} {text} is not supported; {works}", "Unsupported")
